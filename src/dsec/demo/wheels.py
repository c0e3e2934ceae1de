"""Installing wheels into a folder that becomes a layer, for the sandbox's Python and not the one that runs here."""

from __future__ import annotations

import configparser
import zipfile
from collections.abc import Iterable
from pathlib import Path

from dsec.demo.fetch import SANDBOX_PYTHON
from dsec.layers.python import compile_tree

PREFIX = "/opt/venv"  # inside the sandbox
SITE = f"lib/python{SANDBOX_PYTHON}/site-packages"


def make_prefix(root: Path, wheels: Iterable[Path]) -> None:
    """Write a virtual environment with these wheels under `root` + PREFIX, as `python -m venv` of the sandbox would."""
    prefix = root / PREFIX.lstrip("/")
    (prefix / "bin").mkdir(parents=True)
    (prefix / SITE).mkdir(parents=True)
    (prefix / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {SANDBOX_PYTHON}\n"
    )
    for name in ("python", "python3", f"python{SANDBOX_PYTHON}"):
        (prefix / "bin" / name).symlink_to(f"/usr/bin/python{SANDBOX_PYTHON}")
    for wheel in wheels:
        _unpack(wheel, prefix)
    compile_tree(prefix / SITE, f"{PREFIX}/{SITE}")


def _unpack(wheel: Path, prefix: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            target = prefix / _place(info.filename)
            if info.is_dir() or not target.resolve().is_relative_to(prefix.resolve()):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(info))
            target.chmod(0o755 if (info.external_attr >> 16) & 0o111 else 0o644)
        for name in archive.namelist():
            if name.endswith(".dist-info/entry_points.txt"):
                _write_scripts(archive.read(name).decode(), prefix / "bin")


def _place(name: str) -> str:
    """Where a member of a wheel goes, relative to the prefix (binary distribution format, `.data` folders)."""
    top, _, rest = name.partition("/")
    if not top.endswith(".data"):
        return f"{SITE}/{name}"
    kind, _, rest = rest.partition("/")
    folder = {"purelib": SITE, "platlib": SITE, "scripts": "bin", "data": ".", "headers": "include"}[kind]
    return f"{folder}/{rest}"


def _write_scripts(entry_points: str, folder: Path) -> None:
    config = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    config.optionxform = str  # type: ignore[assignment,method-assign]
    config.read_string(entry_points)
    for name, target in config["console_scripts"].items() if config.has_section("console_scripts") else ():
        module, _, function = target.split("[")[0].strip().partition(":")
        script = folder / name
        script.write_text(
            f"#!{PREFIX}/bin/python\nimport sys\nfrom {module} import {function.split('.')[0]}\nsys.exit({function}())\n"
        )
        script.chmod(0o755)
