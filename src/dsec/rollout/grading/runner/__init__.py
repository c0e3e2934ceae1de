"""The pytest runner of a grading sandbox, as one self-contained file that its interpreter runs (docs/security.md).

The modules here are that file, piece by piece: `source` puts them together. They import nothing but the standard library and
pytest, since nothing else is there.
"""

from __future__ import annotations

import marshal
import re
from base64 import b64encode
from functools import cache
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from .start import NAME

_HERE = Path(__file__).parent
_PIECES = ("marks", "imports", "scales", "guard", "child", "main")
_FUTURE = "from __future__ import annotations\n"
_OWN_IMPORT = re.compile(r"^from \.\w+ import [^\n(]*\n", re.MULTILINE)


@cache
def source() -> bytes:
    """The program: run as root of a fresh grading sandbox, `python3 -I -S FILE`, the job on stdin, descriptor 3 open."""
    start = (_HERE / "start.py").read_text()
    body = text()
    code = marshal.dumps(compile(body, NAME, "exec", dont_inherit=True))
    start = start.replace('TEXT = ""', f"TEXT = {b64encode(body.encode()).decode()!r}")
    start = start.replace('CODE = ""', f"CODE = {b64encode(code).decode()!r}")
    return start.replace('MAGIC = b""', f"MAGIC = {MAGIC_NUMBER!r}").encode()


def text() -> str:
    """The pieces as one module."""
    texts = [(_HERE / f"{name}.py").read_text() for name in _PIECES]
    return _FUTURE + f"NAME = {NAME!r}\n" + "".join(_OWN_IMPORT.sub("", text).replace(_FUTURE, "") for text in texts)
