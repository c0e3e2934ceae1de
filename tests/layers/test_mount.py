"""Mounting through the runtime's helper: the descriptor arrives, and every way to fail is a Fault with the helper's words."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dsec.backends.runtime import runtime_path
from dsec.layers import LayerStore, mount_layer
from dsec.protocol.errors import ErrorKind, Fault
from tests.layers.conftest import Tiny

_HELPER = """#!{python}
import array, os, socket, sys
assert sys.argv[1:4] == ["helper", "mount-layer", "--fd"], sys.argv
connection = socket.socket(fileno=int(sys.argv[4]))
meta, *data = sys.argv[5:]
{body}
"""
_SEND = "connection.sendmsg([b'ok'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [os.open(meta, os.O_RDONLY)]))])"


def helper(scratch: Path, body: str) -> Path:
    path = scratch / "helper"
    path.write_text(_HELPER.format(python=sys.executable, body=body))
    path.chmod(0o755)
    return path


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_descriptor_is_handed_over(scratch: Path) -> None:
    (scratch / "meta").write_text("the mount")
    before = open_descriptors()
    fd = mount_layer(
        helper(scratch, f"assert data == ['{scratch}/data'], data\n{_SEND}"), scratch / "meta", [scratch / "data"]
    )
    try:
        assert os.read(fd, 100) == b"the mount"
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("sys.stderr.write('EINVAL: no superblock\\n'); sys.exit(1)", "EINVAL: no superblock"),
        ("sys.exit(3)", "ended with 3"),
        ("pass", "ended with 0"),
        (f"{_SEND}\nsys.stderr.write('late'); sys.exit(1)", "late"),
    ],
)
def test_failures_say_what_the_helper_said(scratch: Path, body: str, says: str) -> None:
    (scratch / "meta").touch()
    before = open_descriptors()
    with pytest.raises(Fault) as caught:
        mount_layer(helper(scratch, body), scratch / "meta", [])
    assert caught.value.body.kind is ErrorKind.CREATE_FAILED and says in caught.value.body.message
    assert caught.value.body.details["stage"] == "layer"
    assert open_descriptors() == before


def test_a_missing_runtime_is_said(scratch: Path) -> None:
    with pytest.raises(Fault) as caught:
        mount_layer(scratch / "nothing", scratch / "meta", [])
    assert "cannot run" in caught.value.body.message and caught.value.body.hint


@pytest.fixture
def runtime() -> Path:
    try:
        path = runtime_path()
    except Fault as fault:
        pytest.skip(fault.body.message)
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    return path


def test_the_real_helper_mounts_a_layer(runtime: Path, store: LayerStore, tiny: Tiny) -> None:
    tiny("tool@1", files={"a/b": "inside the layer"})
    meta, data = store.paths(store.resolve("tool@1"))
    mounts = Path("/proc/self/mountinfo").read_bytes()
    fd = mount_layer(runtime, meta, data)
    try:
        file = os.open("a/b", os.O_RDONLY, dir_fd=fd)
        assert os.read(file, 100) == b"inside the layer"
        os.close(file)
        with pytest.raises(OSError, match="Read-only"):
            os.open("a/new", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
        assert Path("/proc/self/mountinfo").read_bytes() == mounts  # detached: the machine's table does not show it
    finally:
        os.close(fd)


def test_the_real_helper_refuses_what_is_not_erofs(runtime: Path, scratch: Path) -> None:
    (scratch / "meta").write_bytes(bytes(8192))
    with pytest.raises(Fault) as caught:
        mount_layer(runtime, scratch / "meta", [])
    assert caught.value.body.kind is ErrorKind.CREATE_FAILED and caught.value.body.message
