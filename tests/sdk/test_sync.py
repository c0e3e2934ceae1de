"""`dsec.sync` is the async SDK without await: the same classes, methods and parameters; and it works."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import dsec
import dsec.sync
from dsec import CommandFailed, Exit, NotFound
from tests.apiserver.fake_edge import FakeEdge
from tests.apiserver.serving import KEY

ROOT = Path(__file__).parent.parent.parent
CLASSES = (
    "DSecClient",
    "Sandbox",
    "Process",
    "Files",
    "Layers",
    "Forward",
    "Exposed",
    "Burst",
    "Outcome",
    "Rollout",
    "RolloutFiles",
    "RolloutProcess",
    "RolloutSession",
    "Rollouts",
)
T = TypeVar("T")


def public(cls: type) -> dict[str, object]:
    return {name: value for name, value in inspect.getmembers(cls) if not name.startswith("_")}


@pytest.mark.parametrize("name", CLASSES)
def test_same_signatures(name: str) -> None:
    theirs, ours = public(getattr(dsec, name)), public(getattr(dsec.sync, name))
    assert theirs.keys() <= ours.keys()
    for method, function in theirs.items():
        if not inspect.isfunction(function):
            continue
        wanted = [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        found = inspect.signature(ours[method])  # type: ignore[arg-type]
        assert [(p.name, p.kind, p.default) for p in found.parameters.values()] == wanted, method
        assert not inspect.iscoroutinefunction(ours[method]) and "Async" not in str(found.return_annotation)
        assert ours[method].__doc__, method


def test_every_public_name_is_there() -> None:
    assert set(dsec.__all__) - {"sync"} == set(dsec.sync.__all__)
    assert all(hasattr(dsec.sync, name) for name in dsec.sync.__all__)


def test_generated_file_is_current() -> None:
    check = [sys.executable, str(ROOT / "scripts" / "generate_sync.py"), "--check"]
    assert subprocess.run(check, check=False).returncode == 0, "run scripts/generate_sync.py"


async def in_thread(work: Callable[[], T]) -> T:
    """The fake edge lives on this loop, so blocking calls go to a thread."""
    import asyncio

    return await asyncio.to_thread(work)


async def test_a_session(url: str, edge: FakeEdge, tmp_path: Path) -> None:
    def session() -> str:
        with dsec.sync.DSecClient(url, KEY) as client:
            with client.run_container(dsec.DSecContainerRunArgs("debian@12", labels={"s": "y"})) as sandbox:
                assert sandbox.run_shell("echo hi").text == "hi\n"
                with pytest.raises(CommandFailed):
                    sandbox.exec(["false"], check=True)
                process = sandbox.start("cat", stdin=True)
                process.write("x")
                process.close_stdin()
                events = list(process.events())
                assert isinstance(events[-1], Exit) and process.wait().text == "x"
                pieces: Iterator[bytes] = iter([b"a" * 10, b"b"])
                assert sandbox.files.write("/f", pieces) == 11
                assert b"".join(sandbox.files.stream("/f")) == b"a" * 10 + b"b"
                assert sandbox.files.download("/f", tmp_path / "f").bytes == 11
                assert [info.id for info in client.list(labels={"s": "y"})] == [sandbox.id]
                assert list(sandbox.logs()) == ["created"]
                with client.attach(sandbox.id) as same:
                    assert same.info().state == "running"
                assert sandbox.info().state == "running"
            with client.run_many(dsec.DSecContainerRunArgs("debian@12"), count=3) as burst:
                kept = next(iter(burst)).sandbox
            kept.stop()
            with pytest.raises(NotFound):
                client.attach("sb-fake-000000000000")
            assert "debian@12" in map(str, client.layers.list())
            return sandbox.id

    ended = await in_thread(session)
    assert edge.boxes[ended].state == "stopped"


FORKING = """
import gc, os, sys
from dsec.sync import DSecClient, DSecContainerRunArgs

def use(client):
    with client.run_container(DSecContainerRunArgs("debian@12")) as sandbox:
        assert sandbox.exec(["echo", "a"]).text == "a\\n"

with DSecClient(sys.argv[1], sys.argv[2]) as client:
    use(client)
    for _ in range(3):
        child = os.fork()
        if child == 0:
            with DSecClient(sys.argv[1], sys.argv[2]) as own:
                use(own)
            gc.collect()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        use(client)
"""


async def test_a_forked_child_has_a_loop_of_its_own(url: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", FORKING, url, KEY)
    async with asyncio.timeout(30):
        assert await process.wait() == 0
