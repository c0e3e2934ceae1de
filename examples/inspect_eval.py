"""An Inspect AI evaluation whose bash tool runs in DSec sandboxes. The model is a recording, so no network is needed.

pip install 'dsec[inspect]' && sudo dsec up && sudo python examples/inspect_eval.py
"""

import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, ChatMessageTool, GenerateConfig, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import ToolChoice, ToolInfo, bash
from inspect_ai.util import SandboxEnvironmentSpec

from dsec.integrations.inspect import DSecSandboxConfig

MODEL = "mockllm/model"


def recorded(
    messages: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
) -> ModelOutput:
    """Calls the tool once, then answers with what it said."""
    last = messages[-1]
    if isinstance(last, ChatMessageTool):
        output = ModelOutput.from_content(MODEL, f"It has {last.text.strip()} lines.")
    else:
        output = ModelOutput.for_tool_call(MODEL, "bash", {"command": "wc -l < data.txt"})
    output.usage = ModelUsage()  # without it the tokens would be counted, with tables from the network
    return output


task = Task(
    name="count_lines",
    dataset=[
        Sample(input="How many lines has data.txt?", target=str(lines), files={"data.txt": "line\n" * lines})
        for lines in range(1, 9)
    ],
    solver=[use_tools(bash(timeout=30)), generate()],
    scorer=includes(),
    # sandbox=("dsec", "dsec.yaml") reads the same from a file
    sandbox=SandboxEnvironmentSpec("dsec", DSecSandboxConfig(memory_limit_mb=256, init_user="1000:1000")),
)

with tempfile.TemporaryDirectory() as logs:
    [log] = eval(task, model=get_model(MODEL, custom_outputs=recorded), log_dir=logs, display="none")
    if log.status != "success" or log.results is None:
        sys.exit(f"the evaluation ended with {log.status}: {log.error.message if log.error else 'no results'}")
    samples = log.samples or []  # read from the log when they are asked for
    for sample in samples:
        print(f"{sample.id}: {sample.output.completion}")
    print(f"accuracy {log.results.scores[0].metrics['accuracy'].value:g} over {len(samples)} samples")
