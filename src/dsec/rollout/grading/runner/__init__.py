"""The pytest runner of a grading sandbox, as one self-contained file that its interpreter runs (docs/security.md).

The modules here are that file, piece by piece: `source` puts them together. They import nothing but the standard library and
pytest, since nothing else is there.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_PIECES = ("marks", "imports", "guard", "child", "main")
_OWN_IMPORT = re.compile(r"^from \.\w+ import [^\n(]*\n", re.MULTILINE)


@cache
def source() -> bytes:
    """The program: run as root of a fresh grading sandbox, `python3 -I -S FILE`, the job on stdin, descriptor 3 open."""
    texts = [(Path(__file__).parent / f"{name}.py").read_text() for name in _PIECES]
    future = "from __future__ import annotations\n"
    body = "".join(_OWN_IMPORT.sub("", text).replace(future, "") for text in texts)
    return (future + body).encode()
