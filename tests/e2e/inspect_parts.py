"""What tests of the Inspect provider share: a recorded model, and a look from the host at what runs inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from inspect_ai.model import ChatMessage, ChatMessageTool, GenerateConfig, ModelOutput, ModelUsage
from inspect_ai.tool import ToolChoice, ToolInfo

MODEL = "mockllm/model"
Recording = Callable[[list[ChatMessage], list[ToolInfo], ToolChoice, GenerateConfig], ModelOutput]


def calls(*lines: str) -> Recording:
    """A model that makes these bash calls one after the other, then says what the last of them answered."""

    def answer(
        messages: list[ChatMessage], tools: list[ToolInfo], choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        answers = [message for message in messages if isinstance(message, ChatMessageTool)]
        if len(answers) < len(lines):
            output = ModelOutput.for_tool_call(MODEL, "bash", {"command": lines[len(answers)]})
        else:
            output = ModelOutput.from_content(MODEL, answers[-1].text)
        output.usage = ModelUsage()  # without it tokens would be counted with tables from the network
        return output

    return answer


def host_processes(words: Sequence[str]) -> list[int]:
    """Host pids of every process whose arguments are exactly these: sandboxes' processes are seen from outside too."""
    wanted = b"".join(word.encode() + b"\0" for word in words)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes() == wanted:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
