"""The toolkit `dsec-sdk`: the SDK of this installation with what it needs, for programs inside a sandbox (`import dsec`).

It has what the SDK imports and nothing else of the platform: not the edge, not the launcher's binary, not the demo's tasks.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions, version
from pathlib import Path

from dsec.layers.build import build_directory
from dsec.layers.python import VERSION, compile_tree, matches
from dsec.layers.store import LayerStore
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import LayerRef

NAME = "dsec-sdk"
HOME = "/opt/dsec/sdk"  # inside the sandbox
_PARTS = ("__init__.py", "sync.py", "sdk", "protocol")
# A line in one of these makes `python3` look in HOME: of Debian's Python, and of one built from source.
_SITES = (f"usr/local/lib/python{VERSION}/dist-packages", f"usr/local/lib/python{VERSION}/site-packages")
_SOURCES_OF_COMPILED = frozenset((".pyx", ".pxd", ".pyi", ".c", ".h", ".hash"))
_OF_AN_INSTALLATION = frozenset(("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"))
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


def build_sdk(store: LayerStore) -> LayerRef:
    """`dsec-sdk@<version of this installation>`, built unless the store has it of the same files; the same files give the same
    layer. Fault unsupported where the Python that runs here is not the base layer's."""
    if not matches():
        running = ".".join(map(str, sys.version_info[:2]))
        raise Fault(
            ErrorKind.UNSUPPORTED, f"the SDK's layer is for Python {VERSION}, and Python {running} runs here",
            hint=f"run this with Python {VERSION}: compiled modules are of one version",
        )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="dsec-layer-sdk-") as folder:
        root = Path(folder, "root")
        contents = _lay_out(root)
        ref = f"{NAME}@{version('dsec')}"
        if (present := _present(store, ref, contents)) is not None:
            return present
        compile_tree(root / HOME.lstrip("/"), HOME)
        _settle(root)
        return build_directory(
            store, root, name=NAME, version=version("dsec"), kind="toolkit", labels={"contents": contents}, owner=(0, 0),
            force=True,
        )  # fmt: skip


def _present(store: LayerStore, ref: str, contents: str) -> LayerRef | None:
    try:
        found = store.resolve(ref)
        store.paths(found)
    except Fault as fault:
        if fault.body.kind not in (ErrorKind.NOT_FOUND, ErrorKind.CREATE_FAILED):
            raise
        return None
    return found.ref() if found.labels.get("contents") == contents else None


def _lay_out(root: Path) -> str:
    """The tree, uncompiled; its digest."""
    home = root / HOME.lstrip("/")
    own = Path(__file__).parents[1]
    files = {f"dsec/{path}": own / path for path in _own(own)}
    for found in _closure(_imported(files.values())):
        files |= _files(found)
    digest = hashlib.sha256()
    for name, source in sorted(files.items()):
        target = home / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        digest.update(f"{name}\0{hashlib.sha256(target.read_bytes()).hexdigest()}\0".encode())
    info = home / f"dsec-{version('dsec')}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dsec\nVersion: {version('dsec')}\n")
    for site in _SITES:
        (root / site).mkdir(parents=True)
        (root / site / "dsec-sdk.pth").write_text(f"{HOME}\n")
    return digest.hexdigest()


def _own(package: Path) -> Iterator[str]:
    for part in _PARTS:
        path = package / part
        for found in [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else ():
            if found.is_file() and found.suffix != ".pyc":
                yield found.relative_to(package).as_posix()


def _imported(files: Iterable[Path]) -> set[str]:
    """Names of the distributions that these modules import from."""
    tops: set[str] = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_bytes())) if path.suffix == ".py" else ():
            if isinstance(node, ast.Import):
                tops |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                tops.add(node.module.partition(".")[0])
    known = packages_distributions()
    return {known[top][0] for top in tops - sys.stdlib_module_names - {"dsec"}}


def _closure(names: Iterable[str]) -> list[Distribution]:
    """With all that they require and that is installed here; what is not was required for another system."""
    found: dict[str, Distribution] = {}
    waiting = sorted(names)
    while waiting:
        name = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        try:
            found[key] = distribution(name)
        except PackageNotFoundError:
            continue
        for requirement in found[key].requires or ():
            if "extra ==" not in requirement and (match := _REQUIREMENT.match(requirement)):
                waiting.append(match[1])
    return [found[key] for key in sorted(found)]


def _files(found: Distribution) -> dict[str, Path]:
    """Of one distribution, by their place below the packages' folder."""
    files = {}
    for path in found.files or ():
        source = Path(str(found.locate_file(path)))
        outside = ".." in path.parts or "__pycache__" in path.parts
        if outside or path.suffix in _SOURCES_OF_COMPILED or path.name in _OF_AN_INSTALLATION or not source.is_file():
            continue
        files[path.as_posix()] = source
    return files


def _settle(root: Path) -> None:
    """Modes and times that say nothing of when and where this was made."""
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.utime(path, (0, 0))
