"""Where modules come from: the pristine image first for everything that is not the agent's to define."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, ModuleType

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
    helpers: directories of tests; modules from there are loaded by `seal`, which notes what they consist of.
    """

    def __init__(
        self,
        stdlib: Sequence[str],
        site: Sequence[str],
        sources: Sequence[str],
        changed: frozenset[str] | None,
        helpers: Sequence[str],
        seal: Callable[[str], CodeType | None],
    ) -> None:
        self._stdlib = list(stdlib)
        self._site = list(site)
        self._sources = sources
        self._changed = changed
        self._helpers = tuple(helpers)
        self._seal = seal

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if spec := self._helper(name, sys.path if path is None else path):
            return spec
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

    def _helper(self, name: str, places: Sequence[str]) -> importlib.machinery.ModuleSpec | None:
        """A module that lies among the tests, unless an earlier place has it."""
        if not any(f"{place}/".startswith(self._helpers) for place in places):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, places)
        if spec is None or spec.origin is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None
        if not spec.origin.startswith(self._helpers) or (self._changed is not None and spec.origin in self._changed):
            return None
        spec.loader = _Sealing(spec.loader, self._seal)
        return spec

    def _own(self, name: str) -> bool:
        """Whether the pristine workspace has a module of that name."""
        return any(
            self._changed is not None and path not in self._changed for path in workspace_files(name, self._sources)
        )

    def _planted(self, name: str) -> bool:
        return self._changed is not None and any(True for _ in workspace_files(name, self._sources))


class _Sealing(importlib.machinery.SourceFileLoader):
    """Loads a module of the tests with a seal at its end."""

    def __init__(self, plain: importlib.machinery.SourceFileLoader, seal: Callable[[str], CodeType | None]) -> None:
        super().__init__(plain.name, plain.path)
        self._seal = seal

    def get_code(self, fullname: str) -> CodeType | None:
        return self._seal(self.path) or super().get_code(fullname)


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
