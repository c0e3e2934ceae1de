"""A recorded step as a line that a person reads: when, how long, what was asked, what came of it."""

from __future__ import annotations

import base64
import shlex
import signal
from typing import NamedTuple

import msgspec

from dsec.protocol.rollouts import Blob, StepRecord
from dsec.protocol.specs import ExecDone

_KIB = 1024


class Line(NamedTuple):
    """mood: "good", "bad", "open" (no outcome) or "plain"."""

    number: str
    at: str
    took: str
    kind: str
    what: str
    came: str
    mood: str


def line_of(record: StepRecord, begun: float) -> Line:
    """begun: Unix time from which `at` counts."""
    took = "" if record.done_at is None else span(record.done_at - record.asked_at)
    came, mood = _came(record)
    asked = msgspec.json.decode(record.request, type=dict[str, object])
    return Line(
        str(record.step),
        f"+{span(record.asked_at - begun)}",
        took,
        record.kind,
        _what(record.kind, asked, record),
        came,
        mood,
    )


def span(seconds: float) -> str:
    """Short, with as much as tells something: 3ms, 1.2s, 4m10s, 2h05m."""
    if seconds < 1:
        return f"{max(0.0, seconds) * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def size(count: int) -> str:
    """Bytes: 12 B, 3.4 KB, 5.6 MB."""
    if count < _KIB:
        return f"{count} B"
    return f"{count / _KIB:.1f} KB" if count < _KIB * _KIB else f"{count / _KIB / _KIB:.1f} MB"


def text(value: object) -> str:
    """A value of a canonical request as it was: text, bytes that are none, or what stands for a long one."""
    if isinstance(value, dict) and "b64" in value:
        return base64.b64decode(str(value["b64"])).decode("utf-8", "backslashreplace")
    if isinstance(value, dict) and "blake3" in value:
        return f"<{size(int(value['size']))}>"
    return str(value)


def _what(kind: str, asked: dict[str, object], record: StepRecord) -> str:
    if kind == "exec":
        return _command(asked)
    path = text(asked.get("path", ""))
    command = text(asked.get("exec_id", ""))
    match kind:
        case "exec.wait":
            return command
        case "exec.write":
            return f"{command} < {_shortened(text(asked.get('data', '')))}"
        case "exec.signal":
            return f"{command} {_signal(asked.get('signal'))}"
        case "exec.resize":
            return f"{command} {asked.get('cols')}x{asked.get('rows')}"
        case "fs.move":
            return f"{text(asked.get('source', ''))} -> {text(asked.get('target', ''))}"
        case "fs.read" if asked.get("offset") or asked.get("length"):
            return f"{path} from {asked.get('offset', 0)}" + (f", {asked['length']} B" if "length" in asked else "")
        case "sandbox.network":
            rules = asked.get("rules")
            found = rules.items() if isinstance(rules, dict) else ()
            return " ".join(f"{'+' if allowed else '-'}{name}" for name, allowed in found) or "none"
        case "sandbox.changes":
            globs = asked.get("include")
            return " ".join(map(str, globs)) if isinstance(globs, list) else ""
        case "grade":
            return text(asked.get("tests", ""))
        case "session.open" | "session.close" | "session.interrupt":
            return text(asked.get("name", ""))
    return path or command


def _command(asked: dict[str, object]) -> str:
    argv = asked.get("argv")
    if isinstance(argv, list):
        shown = " ".join(shlex.quote(text(word)) for word in argv)
    else:
        shown = f"$ {text(asked.get('line', ''))}"
    session = f"[{asked['session']}] " if "session" in asked else ""
    return session + shown + (" &" if asked.get("detached") else "")


def _signal(number: object) -> str:
    try:
        return signal.Signals(int(str(number))).name
    except ValueError:
        return str(number)


def _shortened(value: str, most: int = 40) -> str:
    line = repr(value)[1:-1]
    return line if len(line) <= most else line[: most - 3] + "..."


def _came(record: StepRecord) -> tuple[str, str]:
    if record.done_at is None:
        return "outcome not known (yet)", "open"
    if record.error is not None:
        return f"{record.error.kind.value}: {record.error.message}", "bad"
    result = msgspec.json.decode(record.result)
    if isinstance(result, dict) and "exit_code" in result:
        return _ended(record)
    parts = []
    if record.kind == "grade" and isinstance(result, dict):
        parts.append(f"reward {result.get('reward')}, {result.get('reason')}")
    elif isinstance(result, dict):
        if "pid" in result and record.kind == "exec":
            parts.append(f"pid {result['pid']}")
        parts += [f"{result[name]} {word}" for name, word in _COUNTS.items() if isinstance(result.get(name), int)]
    parts += [_content(name, blob) for name, blob in {**record.inputs, **record.outputs}.items()]
    return ", ".join(parts) or "ok", "plain"


_COUNTS = {"count": "entries", "entries": "entries"}


def _ended(record: StepRecord) -> tuple[str, str]:
    done = msgspec.json.decode(record.result, type=ExecDone)
    how = f"killed ({done.signal})" if done.signal else f"exit {done.exit_code}"
    if done.timed_out:
        how = f"timed out ({done.timed_out})"
    if done.reason:
        how += f", {done.reason}"
    sizes = [
        f"{size(count)} {name}" + (" (cut)" if cut else "")
        for name, count, cut in (
            ("out", done.stdout_bytes, done.stdout_truncated),
            ("err", done.stderr_bytes, done.stderr_truncated),
        )
        if count
    ]
    good = done.exit_code == 0 and not done.timed_out
    return ", ".join([how, *sizes]), "good" if good else "bad"


def _content(name: str, blob: Blob) -> str:
    kept = "" if blob.size == blob.total else f" ({size(blob.size)} kept)"
    return size(blob.total) + ("" if name == "data" else f" {name}") + kept
