"""Names of files that do more than hold source: what starts with a program, decides how tests run, or shadows a module.

Names are compared folded (case and Unicode normalisation), so that one that looks the same is not another.
"""

from __future__ import annotations

import sys
import unicodedata
from fnmatch import fnmatchcase
from functools import lru_cache

from dsec.protocol.grading import DropReason

TEST_CONFIG = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "tox.toml", "setup.cfg", "setup.py",
    "pyproject.toml", "noxfile.py", ".coveragerc", ".pdbrc", "nose.cfg", ".noserc", "unittest.cfg",
    "jest.config.*", "vitest.config.*", "karma.conf.*", ".mocharc*", "phpunit.xml*", ".rspec",
)  # fmt: skip
_STARTUP = (
    "sitecustomize.py", "sitecustomize", "usercustomize.py", "usercustomize", "*.pth", "*.egg-link", "pyvenv.cfg", "python*._pth",
)  # fmt: skip
_SHELL = (
    ".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile", ".zshrc", ".zshenv", ".zprofile",
    ".zlogin", ".kshrc", ".shinit", ".cshrc", ".tcshrc", ".login", ".inputrc", ".envrc", "bash.bashrc",
)  # fmt: skip
_LOADER = ("ld.so.preload", "ld.so.conf", "ld.so.cache", "ld-linux*.so*")
_COMPILED = (
    "*.so", "*.so.[0-9]*", "*.pyd", "*.dylib", "*.dll", "*.o", "*.a", "*.ko", "*.exe", "*.class", "*.jar", "*.wasm",
)  # fmt: skip
_CACHES = frozenset(
    (
        "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".cache", ".coverage", ".tox", ".nox",
    )
)  # fmt: skip
_INSTALLED = frozenset(("site-packages", "dist-packages", ".venv", "venv", "node_modules", "__pypackages__"))
_INSTALLED_LIKE = ("*.dist-info", "*.egg-info", "*.egg")
BARE = tuple(f"**/{name}/**" for name in sorted(_CACHES | _INSTALLED | {".git"}))
"""Where nothing counts and much may lie: what is there need not be read."""
TEST_DIRECTORIES = frozenset(("test", "tests", "testing", "__tests__", "spec", "specs"))
SHELL_DIRECTORIES = (b"etc/profile.d/", b"etc/zsh/", b"etc/fish/", b"root/.config/fish/")
LOADER_DIRECTORIES = (b"etc/ld.so.conf.d/",)
_GIT_EFFECTIVE = frozenset(("hooks", "config", "config.worktree", "info", "modules"))
"""Of what is inside .git: what makes others do something, and not only what was."""

# What a test run imports besides the standard library and the installed packages.
_HARNESS = frozenset(
    (
        "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "exceptiongroup", "tomli", "pygments", "colorama",
        "xdist", "execnet", "pytest_cov", "coverage", "hypothesis", "mock", "six", "attr", "attrs", "pkg_resources",
        "setuptools", "_distutils_hack",
    )
)  # fmt: skip
IMPORTED = frozenset(sys.stdlib_module_names) | _HARNESS

_MAGIC = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xce\xfa\xed\xfe", b"\xca\xfe\xba\xbe", b"\0asm")


def folded(name: bytes) -> str:
    """A name as a careless reader has it."""
    if name.isascii():
        return name.decode("ascii").lower()
    text = unicodedata.normalize("NFKC", name.decode("utf-8", "surrogateescape"))
    return unicodedata.normalize("NFKC", text.casefold())


@lru_cache(maxsize=8192)
def special(name: bytes) -> DropReason | None:
    """What a name alone says, wherever the file lies; the more telling reason first."""
    text = folded(name)
    if text in _CACHES or text.endswith((".pyc", ".pyo")):
        return DropReason.BYTECODE
    for patterns, why in (
        (_STARTUP, DropReason.STARTUP),
        (_LOADER, DropReason.LOADER),
        (_SHELL, DropReason.SHELL),
        (_INSTALLED_LIKE, DropReason.INSTALLED),
        (TEST_CONFIG, DropReason.TEST_CONFIG),
        (_COMPILED, DropReason.COMPILED),
    ):
        if any(fnmatchcase(text, pattern) for pattern in patterns):
            return why
    if text in _INSTALLED:
        return DropReason.INSTALLED
    return None


@lru_cache(maxsize=8192)
def is_git(name: bytes) -> bool:
    return folded(name) == ".git"


def git_is_effective(below: list[bytes]) -> bool:
    """Whether a path inside .git does something (a hook) and not only says what was. [] is .git itself."""
    return not below or folded(below[0]) in _GIT_EFFECTIVE


def module(name: bytes) -> str:
    """What a file or directory is imported as, folded."""
    return folded(name).partition(".")[0]


def is_compiled(data: bytes) -> bool:
    return data.startswith(_MAGIC)
