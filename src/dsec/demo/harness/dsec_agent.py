#!/usr/bin/python3 -IS
"""dsec-agent: the tools a coding agent calls inside its sandbox. One process per call; JSON or bytes on stdin; text out.

    dsec-agent view PATH [FIRST [LAST]]      a file with line numbers, or a folder
    dsec-agent search REGEX [PATH]           matching lines of text files under PATH
    dsec-agent edit PATH     < {"old":, "new":}   replace the one place where `old` stands
    dsec-agent create PATH   < BYTES         write a file
    dsec-agent patch         < UNIFIED DIFF  apply a diff in the current folder
    dsec-agent test [ARGS]                   run pytest, quiet, the last lines only

Exit status 1 and one line on stderr say what was wrong with a call, in words that a model can act on.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

MAX_LINES = 400
SKIP = {".git", "__pycache__", ".pytest_cache"}


class Refused(Exception):
    """A call that cannot be done; the text is for the model."""


def read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError:
        raise Refused(f"{path} is not UTF-8 text") from None


def view(path: str, first: str = "1", last: str | None = None) -> None:
    if os.path.isdir(path):
        print("\n".join(sorted(name + "/" * os.path.isdir(os.path.join(path, name)) for name in os.listdir(path))))
        return
    lines = read_text(path).splitlines()
    start = max(1, int(first))
    end = min(len(lines), int(last) if last else start + MAX_LINES - 1)
    for number in range(start, end + 1):
        print(f"{number:6}  {lines[number - 1]}")
    if end < len(lines):
        print(f"... {len(lines) - end} more lines")


def search(pattern: str, top: str = ".") -> None:
    regex = re.compile(pattern)
    found = 0
    for folder, folders, names in os.walk(top) if os.path.isdir(top) else [("", [], [top])]:
        folders[:] = sorted(set(folders) - SKIP)
        for name in sorted(names):
            path = os.path.join(folder, name)
            try:
                text = read_text(path)
            except (Refused, OSError):
                continue
            for number, line in enumerate(text.splitlines(), 1):
                if regex.search(line):
                    print(f"{path}:{number}: {line.strip()[:200]}")
                    found += 1
                    if found == MAX_LINES:
                        print("... more matches; narrow the pattern")
                        return
    if not found:
        raise Refused(f"nothing under {top} matches {pattern!r}")


def edit(path: str) -> None:
    call = json.load(sys.stdin)
    text = read_text(path)
    count = text.count(call["old"])
    if count != 1:
        raise Refused(f"`old` stands {count} times in {path}, it must stand there once: give more lines around it")
    write(path, text.replace(call["old"], call["new"]).encode())
    line = text[: text.index(call["old"])].count("\n") + 1
    print(f"edited {path} at line {line}: {len(call['old'].splitlines())} lines became {len(call['new'].splitlines())}")


def create(path: str) -> None:
    data = sys.stdin.buffer.read()
    write(path, data)
    print(f"wrote {path}, {len(data)} bytes")


def write(path: str, data: bytes) -> None:
    """Beside and renamed, keeping the mode: a reader never sees half a file."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    mode = os.stat(path).st_mode & 0o777 if os.path.exists(path) else 0o644
    beside = f"{path}.{os.getpid()}.tmp"
    with open(beside, "wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)
    os.replace(beside, path)


def patch() -> None:
    diff = sys.stdin.buffer.read()
    done = subprocess.run(["git", "apply", "--verbose", "--whitespace=nowarn", "-"], input=diff, capture_output=True)
    if done.returncode:
        raise Refused(done.stderr.decode(errors="replace").strip())
    print(done.stderr.decode(errors="replace").strip())


def test(*arguments: str) -> int:
    command = [
        "python",
        "-m",
        "pytest",
        "-q",
        "--color=no",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        *arguments,
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print("\n".join(done.stdout.decode(errors="replace").splitlines()[-30:]))
    return done.returncode


def mark() -> None:
    """Leaves the number of this call, if it has one, where whoever made it can count how often it was started."""
    number = os.environ.pop("DSEC_CALL", "")
    if number:
        with open("/var/tmp/dsec-agent.calls", "a", encoding="ascii") as file:
            file.write(f"{number}\n")


def main() -> None:
    mark()
    tools: dict[str, Callable[..., int | None]] = {
        tool.__name__: tool for tool in (view, search, edit, create, patch, test)
    }
    if len(sys.argv) < 2 or sys.argv[1] not in tools:
        sys.exit(__doc__)
    try:
        sys.exit(tools[sys.argv[1]](*sys.argv[2:]) or 0)
    except (Refused, OSError, re.error, TypeError, ValueError, KeyError) as error:
        sys.exit(f"dsec-agent {sys.argv[1]}: {error}")


main()
