"""Files become durable together, by the kernel's asynchronous I/O or by threads, and whoever waits is told what came of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.rollout.commit import Syncer
from dsec.rollout.disk import Descriptors


@pytest.fixture(params=["kernel", "threads"])
def syncer(request: pytest.FixtureRequest) -> Iterator[Syncer]:
    syncer = Syncer(threads=request.param == "threads")
    yield syncer
    syncer.close()


async def test_more_files_than_the_kernel_takes_at_once(syncer: Syncer, tmp_path: Path) -> None:
    fds = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(300)]
    for _ in range(2):
        for fd in fds:
            os.write(fd, b"x" * 100)
        await asyncio.wait_for(asyncio.gather(*map(syncer.sync, fds)), 60)
    for fd in fds:
        os.close(fd)


async def test_who_asks_while_one_is_under_way_gets_the_next_one(syncer: Syncer, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    first = syncer.sync(fd)
    assert syncer.sync(fd) is first, "nothing has begun yet: one sync covers both"
    await asyncio.sleep(0)
    second = syncer.sync(fd)
    assert second is not first, "what was written meanwhile is not in the one that runs"
    await asyncio.wait_for(asyncio.gather(first, second), 20)
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    await asyncio.wait_for(syncer.sync(directory), 20)
    os.close(fd)
    os.close(directory)


async def test_a_file_that_cannot_be_synced_does_not_hold_the_others(syncer: Syncer, tmp_path: Path) -> None:
    good = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(4)]
    reading, writing = os.pipe()
    futures = [syncer.sync(fd) for fd in (*good[:2], writing, *good[2:])]
    results = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 20)
    assert [type(result) for result in results] == [type(None), type(None), OSError, type(None), type(None)]
    for fd in (*good, reading, writing):
        os.close(fd)


async def test_what_waits_at_the_end_is_told(tmp_path: Path) -> None:
    syncer = Syncer()
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    future = syncer.sync(fd)
    syncer.close()
    with pytest.raises(OSError, match="closed"):
        await future
    os.close(fd)


def test_one_after_another_event_loop(tmp_path: Path) -> None:
    syncer = Syncer()
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)

    async def once() -> None:
        await asyncio.wait_for(syncer.sync(fd), 20)

    for _ in range(3):
        asyncio.run(once())
    syncer.close()
    os.close(fd)


def test_few_descriptors_are_open_and_none_that_is_needed_is_closed(tmp_path: Path) -> None:
    files = Descriptors(most=3)
    paths = [tmp_path / str(number) for number in range(10)]
    for path in paths:
        path.write_bytes(path.name.encode())
    pinned = files.use(paths[0])
    files.pin(pinned)
    for path in paths:
        assert os.pread(files.use(path), 9, 0) == path.name.encode()
    assert len(files) == 3 and os.pread(pinned, 9, 0) == b"0"
    files.drop(paths[0])
    assert os.pread(pinned, 9, 0) == b"0", "it is needed until it is unpinned"
    assert files.use(paths[0]) != pinned
    files.unpin(pinned)
    with pytest.raises(OSError):
        os.fstat(pinned)
    files.close()
    assert len(files) == 0
