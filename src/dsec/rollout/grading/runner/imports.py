"""Where modules come from: the pristine image first for everything that is not the agent's to define."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType

MACHINERY = frozenset({"pytest", "_pytest", "pluggy", "iniconfig"})


def installed(python: str) -> tuple[str, list[str]]:
    """The prefix of an interpreter and its directories of installed packages, found without running anything of them."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    prefix = os.path.dirname(os.path.dirname(os.path.abspath(python)))
    config = os.path.join(prefix, "pyvenv.cfg")
    if os.path.isfile(config):
        with open(config, encoding="utf-8") as file:
            shared = "include-system-site-packages=true" in file.read().replace(" ", "").lower()
        found = [os.path.join(prefix, "lib", version, "site-packages")]
        return prefix, found + (_system(version) if shared else [])
    return sys.prefix, _system(version)


def _system(version: str) -> list[str]:
    places = [
        f"{sys.prefix}/lib/{version}/site-packages",
        f"/usr/local/lib/{version}/dist-packages",
        "/usr/lib/python3/dist-packages",
    ]
    return [place for place in places if os.path.isdir(place)]


class Finder:
    """First in sys.meta_path: the standard library and installed packages cannot be shadowed by files the agent brought.

    A name counts as the workspace's own when some file of it there was not changed by the agent (nothing else is known of it).
    """

    def __init__(
        self, stdlib: Sequence[str], site: Sequence[str], sources: Sequence[str], changed: frozenset[str] | None
    ) -> None:
        self._stdlib = list(stdlib)
        self._site = list(site)
        self._sources = sources
        self._changed = changed

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is not None or self._own(name):
            return None
        if name in sys.stdlib_module_names:
            for finder in (importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter):
                if spec := finder.find_spec(name):
                    return spec
            return importlib.machinery.PathFinder.find_spec(name, self._stdlib)
        if self._planted(name):
            return importlib.machinery.PathFinder.find_spec(name, self._site)
        return None

    def _own(self, name: str) -> bool:
        """Whether the pristine workspace has a module of that name."""
        return any(
            self._changed is not None and path not in self._changed for path in workspace_files(name, self._sources)
        )

    def _planted(self, name: str) -> bool:
        return self._changed is not None and any(True for _ in workspace_files(name, self._sources))


def workspace_files(name: str, sources: Iterable[str]) -> Iterable[str]:
    """The files of a top-level module below the source directories, as far as they tell whose it is."""
    for source in sources:
        base = os.path.join(source, name)
        if os.path.isfile(f"{base}.py"):
            yield f"{base}.py"
        elif os.path.isdir(base):
            for folder, _, files in os.walk(base):
                for file in files:
                    if file.endswith(".py"):
                        yield os.path.join(folder, file)


def forget(sources: Sequence[str]) -> None:
    """Let go of modules that the parent imported from the image and that the workspace has its own copy of."""
    for top in {name.partition(".")[0] for name in sys.modules} - MACHINERY - frozenset(sys.stdlib_module_names):
        if any(True for _ in workspace_files(top, sources)):
            for name in [name for name in sys.modules if name == top or name.startswith(top + ".")]:
                del sys.modules[name]
