"""How the program begins: with fixed hashes, and compiled already where the interpreter is the one it was compiled for."""

from __future__ import annotations

import os
import sys

TEXT = ""
CODE = ""
MAGIC = b""
"""Filled in by `source`: the program, the program compiled (both base 64), and by which version."""
NAME = "<dsec runner>"


def start() -> None:
    """Hashes are fixed when an interpreter starts, and an isolated one takes that from nowhere: then it starts once more."""
    if sys.flags.hash_randomization:
        os.set_inheritable(3, True)
        script = os.path.abspath(sys.argv[0])
        flags = ["-s", "-S", "-P"] if sys.version_info >= (3, 11) else ["-s", "-S"]
        os.execve(sys.executable, [sys.executable, *flags, script], {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8"})
    import binascii
    import marshal
    from _frozen_importlib_external import MAGIC_NUMBER

    if MAGIC_NUMBER == MAGIC:
        code = marshal.loads(binascii.a2b_base64(CODE))
    else:
        code = compile(binascii.a2b_base64(TEXT), NAME, "exec", dont_inherit=True)
    exec(code, {"__name__": "__main__", "__file__": os.path.abspath(sys.argv[0])})
    sys.stderr.flush()
    os._exit(0)  # all is said; taking an interpreter apart in order takes its time


if __name__ == "__main__":
    start()
