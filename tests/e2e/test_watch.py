"""Watching files: everything is told, once, in order, by its name; nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Self

import pytest

import dsec
from dsec import (
    CapacityError,
    DSecClient,
    DSecContainerRunArgs,
    FileChange,
    FileChangeKind,
    Sandbox,
    SandboxUnavailable,
)

from .conftest import BASE

pytestmark = pytest.mark.e2e
ODD = b"a b\n\xff\xc3"
Short = tuple[str, bytes]


MANY = """
import os
for number in range(60_000):
    name = f"/w/{number:060}"
    os.close(os.open(name, os.O_CREAT))
    os.unlink(name)
"""


class Watch:
    """A watch that is in place."""

    def __init__(self, changes: AsyncIterator[FileChange]) -> None:
        self._changes = changes

    async def __aenter__(self) -> Self:
        first = await anext(self._changes)
        assert first.kind is FileChangeKind.READY and first.source is None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._changes.aclose()  # type: ignore[attr-defined]

    async def until(self, *last: Short) -> list[FileChange]:
        """Changes until all of `last` have come."""
        found: list[FileChange] = []
        missing = set(last)
        async with asyncio.timeout(30):
            async for change in self._changes:
                found.append(change)
                missing.discard((change.kind.value, change.path))
                if not missing:
                    return found
        raise AssertionError(f"the watch ended without {missing}")

    async def rest(self) -> list[FileChange]:
        async with asyncio.timeout(30):
            return [change async for change in self._changes]


def watch(sandbox: Sandbox, path: str | bytes, *, recursive: bool = False) -> Watch:
    return Watch(sandbox.files.watch(path, recursive=recursive))


def short(changes: list[FileChange]) -> list[Short]:
    return [(change.kind.value, change.path) for change in changes]


async def test_every_kind_of_change(sandbox: Sandbox) -> None:
    await sandbox.run_shell("mkdir /w; echo old > /w/old")
    async with watch(sandbox, "/w/") as here:
        await sandbox.files.write(b"/w/" + ODD, b"x")
        made = await here.until(("moved", b"/w/" + ODD))
        assert made[-1].source is not None and made[-1].source.startswith(b"/w/.dsec-"), "written beside, then renamed"
        await sandbox.run_shell(
            "cd /w; echo more >> old; chmod 600 old; mv old new; mkdir sub; echo x > sub/unseen; rm -r sub new; mv /w /v"
        )
        changes = await here.rest()
    assert short(changes) == [
        ("modified", b"/w/old"),
        ("attributes", b"/w/old"),
        ("moved", b"/w/new"),
        ("created", b"/w/sub"),
        ("deleted", b"/w/sub"),
        ("deleted", b"/w/new"),
        ("deleted", b"/w"),
    ], "ends when what is watched is no longer where it was"
    assert changes[2].source == b"/w/old" and [change.is_dir for change in changes] == [False] * 3 + [
        True,
        True,
        False,
        True,
    ]


async def test_below_too_and_nothing_is_lost_in_new_directories(sandbox: Sandbox) -> None:
    await sandbox.run_shell("mkdir -p /w/there/deep; mkdir /out; echo x > /out/f")
    async with watch(sandbox, "/w", recursive=True) as here:
        await sandbox.run_shell(
            "cd /w; for d in 1 2 3 4 5; do mkdir -p new$d/a/b/c; touch new$d/a/f new$d/a/b/f new$d/a/b/c/{1..50}; done; "
            "echo x > there/deep/f; touch end"
        )
        changes = await here.until(
            ("created", b"/w/end"), ("created", b"/w/new5/a/b/c/50"), ("created", b"/w/there/deep/f")
        )
        created = [change.path for change in changes if change.kind is FileChangeKind.CREATED]
        wanted = {f"/w/new{d}/{rest}".rstrip("/").encode()
                  for d in range(1, 6)
                  for rest in ("", "a", "a/b", "a/b/c", "a/f", "a/b/f", *(f"a/b/c/{n}" for n in range(1, 51)))}  # fmt: skip
        assert set(created) == wanted | {b"/w/end", b"/w/there/deep/f"}
        assert len(created) == len(set(created)), "told once, by an event or by looking"
        await sandbox.run_shell("cd /w; mv there moved; echo x > moved/deep/g; mv moved/deep /out/; echo x > /out/deep/h; "
                                "mv /out /w/in; echo y > in/f; echo y > in/deep/h; touch last")  # fmt: skip
        changes = await here.until(("created", b"/w/last"), ("modified", b"/w/in/deep/h"))
    told = short(changes)
    assert ("moved", b"/w/moved") in told and ("created", b"/w/moved/deep/g") in told, "paths follow a move"
    assert (
        ("deleted", b"/w/moved/deep") in told and ("created", b"/w/in") in told and ("created", b"/w/in/deep/h") in told
    )
    assert not any(b"/out" in change.path for change in changes), "what left is not told any more"


async def test_one_file(sandbox: Sandbox) -> None:
    await sandbox.run_shell("echo a > /f; ln -s /f /link")
    async with watch(sandbox, "/link") as here:
        await sandbox.run_shell("echo b >> /f; echo x > /other; rm /f")
        assert short(await here.rest())[0] == ("modified", b"/link")


async def test_who_does_not_read_is_told_that_changes_are_lost(sandbox: Sandbox) -> None:
    await sandbox.run_shell("mkdir /w")
    async with watch(sandbox, "/w") as here:
        result = await sandbox.exec(["python3", "-c", MANY])
        assert result.ok
        changes = await here.until(("lost", b"/w"))
        assert len(changes) > 1000, "what was told before"
        await sandbox.run_shell("touch /w/after")
        await here.until(("created", b"/w/after"))


async def test_watches_are_bounded_and_given_back(client: DSecClient, sandbox: Sandbox) -> None:
    for _ in range(3):
        async with contextlib.AsyncExitStack() as open_ones:
            for _ in range(16):
                await open_ones.enter_async_context(watch(sandbox, "/tmp"))
            with pytest.raises(CapacityError, match="watches are open"):
                await watch(sandbox, "/tmp").__aenter__()
        async with asyncio.timeout(10):
            while True:  # a cancel travels behind the end of the request
                with contextlib.suppress(CapacityError):
                    async with watch(sandbox, "/tmp"):
                        break
    inside = await sandbox.run_shell("mkdir -p /many/{1..9000} && ls /many | wc -l")
    assert inside.text == "9000\n"
    with pytest.raises(CapacityError, match="too many directories"):
        await watch(sandbox, "/many", recursive=True).__aenter__()
    async with watch(sandbox, "/many"):
        assert (await sandbox.run_shell("pwd")).ok


async def test_what_cannot_be_watched_says_so(client: DSecClient, sandbox: Sandbox) -> None:
    for path, error in (
        ("/missing", FileNotFoundError),
        ("/etc/passwd/x", NotADirectoryError),
        ("/proc", PermissionError),
    ):
        with pytest.raises(error):
            await watch(sandbox, path).__aenter__()
    args = DSecContainerRunArgs(container_image=BASE, init_user="nobody")
    async with client.run(args) as other:
        line = "mkdir -m 700 /secret; mkdir -p /open/{hidden,shown}; chmod 700 /open/hidden"
        await other.run_shell(line, user="root")
        with pytest.raises(PermissionError):
            await watch(other, "/secret").__aenter__()
        async with watch(other, "/open", recursive=True) as here:
            await other.run_shell("touch /open/hidden/f /open/shown/f", user="root")
            assert short(await here.until(("attributes", b"/open/shown/f"))) == [
                ("created", b"/open/shown/f"),
                ("attributes", b"/open/shown/f"),
            ], "of what the user may read"


async def test_a_watch_keeps_nothing_alive_and_ends_with_the_sandbox(client: DSecClient) -> None:
    async with client.run(DSecContainerRunArgs(container_image=BASE, ttl_running_stop=1)) as sandbox:
        async with watch(sandbox, "/tmp") as here:
            with pytest.raises((SandboxUnavailable, dsec.ConnectionLost)) as caught:
                await here.rest()
            assert isinstance(caught.value, SandboxUnavailable) and caught.value.reason == "ttl_idle"
