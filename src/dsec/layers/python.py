"""Python in layers: for which version, and modules compiled before anybody runs them."""

from __future__ import annotations

import py_compile
import sys
from pathlib import Path

VERSION = "3.11"
"""Of the base layer's `python3`."""


def matches() -> bool:
    """Whether this process runs the same Python, so that its compiled modules are good there."""
    return sys.version_info[:2] == tuple(int(number) for number in VERSION.split("."))


def compile_tree(folder: Path, inside: str) -> None:
    """Compile every module for good: a sandbox lives shorter than a compilation would pay off in.

    Unchecked hash files do not depend on the times of the sources. Bytecode is bound to the minor version, so another
    Python than the sandbox's writes none, and imports there are slower by the compilation.
    """
    if not matches():
        return
    for source in sorted(folder.rglob("*.py")):
        name = f"{inside}/{source.relative_to(folder).as_posix()}"
        try:
            py_compile.compile(
                str(source), dfile=name, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
            )
        except py_compile.PyCompileError:  # test data of packages that is no Python of this version
            continue
