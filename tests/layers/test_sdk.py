"""The SDK's toolkit: what is in it, what is not, and that it is the same each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.layers import LayerStore
from dsec.layers import sdk as subject
from dsec.layers.python import compile_tree
from dsec.protocol.errors import ErrorKind, Fault


def laid_out(root: Path) -> Path:
    subject._lay_out(root)
    home = root / subject.HOME.lstrip("/")
    compile_tree(home, subject.HOME)
    subject._settle(root)
    return home


def test_it_works_alone(tmp_path: Path) -> None:
    """A Python without site-packages, in an empty directory, has the SDK and nothing that it needs is missing."""
    home = laid_out(tmp_path / "root")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]);\n"
        "import dsec, dsec.sync, pkgutil, importlib, importlib.metadata\n"
        "import dsec.sdk, dsec.protocol\n"
        "for package in (dsec.sdk, dsec.protocol):\n"
        "    for found in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(found.name)\n"
        "for name in dsec.__all__: getattr(dsec, name)\n"
        "outside = [m.__file__ for m in sys.modules.values() if 'site-packages' in (getattr(m, '__file__', None) or '')]\n"
        "assert not outside, outside\n"
        "print(importlib.metadata.version('dsec'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(home)], capture_output=True, text=True, cwd=tmp_path, env={}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == subject.version("dsec")


def test_nothing_else_of_the_platform_is_in_it(tmp_path: Path) -> None:
    home = laid_out(tmp_path / "root")
    assert sorted(path.name for path in (home / "dsec").iterdir()) == [
        "__init__.py", "__pycache__", "protocol", "sdk", "sync.py",
    ]  # fmt: skip
    names = {path.name for path in home.rglob("*")}
    assert not names & {"edge", "launcher", "tasks.json", "breaks.json", "dsec-runtime", "RECORD", "direct_url.json"}
    where = os.fsencode(Path(subject.__file__).parents[3])
    assert not [path for path in home.rglob("*") if path.is_file() and where in path.read_bytes()], (
        "a path of this machine"
    )


def test_the_same_files_give_the_same_layer(scratch: Path) -> None:
    first, second = (LayerStore(scratch / name) for name in ("a", "b"))
    one = subject.build_sdk(first)
    assert subject.build_sdk(second).digest == one.digest
    before = first.resolve(str(one)).created
    assert subject.build_sdk(first) == one and first.resolve(str(one)).created == before, "built again for nothing"


def test_another_python_is_refused(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "matches", lambda: False)
    with pytest.raises(Fault) as caught:
        subject.build_sdk(LayerStore(scratch))
    assert caught.value.body.kind is ErrorKind.UNSUPPORTED
