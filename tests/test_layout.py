"""Imports point downwards only: cli -> sdk -> protocol; apiserver -> iam, placement, watcher -> protocol;
edge -> backends -> layers -> protocol. Nobody imports `edge` but the edge."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "dsec"

# package -> packages it may import besides itself; "" is dsec/__init__.py and its public face, which only users and tools import
ALLOWED: dict[str, set[str]] = {
    "protocol": set(),
    "sdk": {"protocol"},
    "sync": {"sdk", "protocol", ""},
    "": {"sdk", "protocol", "cluster", "sync"},
    "iam": {"protocol"},
    "placement": {"protocol"},
    "watcher": {"protocol"},
    "apiserver": {"iam", "placement", "watcher", "rollout", "protocol"},
    "rollout": {"protocol"},
    "layers": {"protocol"},
    "backends": {"layers", "protocol"},
    "edge": {"backends", "layers", "rollout", "protocol"},
    "cluster": {"backends", "protocol"},
    "integrations": {""},
    "demo": {"sdk", "layers", "cluster", "protocol", "backends", ""},
    "cli": {"sdk", "layers", "cluster", "protocol", "demo", "backends", "sync", ""},
}


def package_of(module: str) -> str | None:
    """`dsec.sdk.client` -> `sdk`; `dsec` -> ``; None for what is not ours."""
    parts = module.split(".")
    if parts[0] != "dsec":
        return None
    return parts[1] if len(parts) > 1 else ""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import, those inside functions and TYPE_CHECKING included."""
    own = ("dsec", *path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = own[: len(own) - node.level] if node.level else ()
            module = ".".join([*start, *([node.module] if node.module else [])])
            if module == "dsec":
                yield from (
                    (node.lineno, f"dsec.{name.name}" if is_package(name.name) else "dsec") for name in node.names
                )
            else:
                yield node.lineno, module


def is_package(name: str) -> bool:
    return (ROOT / name).is_dir() or (ROOT / f"{name}.py").exists()


SOURCES = sorted(path for path in ROOT.rglob("*.py"))


def owner(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    own = owner(path)
    assert own in ALLOWED, f"package {own!r} has no rule: say in ALLOWED what it may import"
    for line, module in imports(path):
        package = package_of(module)
        if package is None or package == own:
            continue
        assert package in ALLOWED[own], f"{path.relative_to(ROOT)}:{line} imports {module}: {own or 'dsec'} must not"


def test_the_rules_catch_something(tmp_path: Path) -> None:
    """The reader sees every form of import."""
    forms = "import dsec.edge\nfrom dsec import edge, DSecClient\nfrom ..edge import x\nfrom . import y\ndef f():\n import dsec\n"
    path = ROOT / "sdk" / "client.py"
    found = [module for _, module in imports_of(forms, path)]
    assert found == ["dsec.edge", "dsec.edge", "dsec", "dsec.edge", "dsec.sdk", "dsec"]


def imports_of(text: str, path: Path) -> Iterator[tuple[int, str]]:
    class Text(type(path)):  # type: ignore[misc]
        def read_text(self, *args: object, **kwargs: object) -> str:
            return text

    return imports(Text(path))
