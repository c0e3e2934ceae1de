"""A launcher driven over its socket, without an edge, and commands in its sandboxes over link."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dsec.layers.mount import mount_layer
from dsec.protocol.ids import new_exec_id
from dsec.protocol.link import Data, LinkClient
from dsec.protocol.specs import ExecDone, ExecSpec

DEADLINE = 30.0
MIB = 1024 * 1024


class Refused(Exception):
    def __init__(self, reply: dict[str, Any]) -> None:
        super().__init__(f"{reply['stage']}: {reply['error']}")
        self.stage: str = reply["stage"]
        self.errno: int = reply["errno"]


class Launcher:
    """One launcher process. Requests are answered in any order; `call` waits for one."""

    def __init__(
        self, runtime: Path, run: Path, uppers: str, name: str, pool: int = 4, ephemeral: bool = False
    ) -> None:
        run.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [runtime, "launcher", "--control-fd", str(theirs.fileno()), "--run", run, "--name", name,
                 "--uppers", uppers, "--pool", str(pool), "--ephemeral", "yes" if ephemeral else "no"],
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self.runtime = runtime
        self.run = run
        self.uppers = uppers
        self.name = name
        self.socket = ours
        self.events: list[dict[str, Any]] = []
        self._replies: dict[int, tuple[dict[str, Any], list[int]]] = {}
        self._next = 0

    def send(self, verb: str, fds: Sequence[int] = (), **fields: object) -> int:
        self._next += 1
        message = msgspec.msgpack.encode({"id": self._next, "v": verb, **fields})
        socket.send_fds(self.socket, [message], list(fds))
        return self._next

    def receive(self, deadline: float) -> None:
        """Takes one message in."""
        if not select.select([self.socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError("the launcher did not answer")
        data, fds, _, _ = socket.recv_fds(self.socket, 65536, 4)
        if not data:
            raise EOFError("the launcher is gone")
        message = msgspec.msgpack.decode(data)
        if "event" in message:
            self.events.append(message)
        else:
            self._replies[message["id"]] = (message, fds)

    def reply_with_fds(self, number: int) -> tuple[dict[str, Any], list[int]]:
        deadline = time.monotonic() + DEADLINE
        while number not in self._replies:
            self.receive(deadline)
        message, fds = self._replies.pop(number)
        if not message["ok"]:
            raise Refused(message)
        return message, fds

    def reply(self, number: int) -> dict[str, Any]:
        message, fds = self.reply_with_fds(number)
        for fd in fds:
            os.close(fd)
        return message

    def call(self, verb: str, fds: Sequence[int] = (), **fields: object) -> dict[str, Any]:
        return self.reply(self.send(verb, fds, **fields))

    def event(self) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE
        while not self.events:
            self.receive(deadline)
        return self.events.pop(0)

    def add_layer(self, digest: str, image: Path) -> None:
        mount = mount_layer(self.runtime, image, [])
        try:
            self.call("layer", [mount], digest=digest)
        finally:
            os.close(mount)

    def ask_create(self, sandbox: str, layers: Sequence[str] = ("base",), **fields: object) -> int:
        wanted: dict[str, object] = {
            "memory": 256 * MIB, "cpu": 2.0, "pids": 64, "disk": 64 * MIB, "hostname": "box", "incarnation": 1,
            "socket": str(self.socket_path(sandbox)), "init_user": "root", "env": [], "workdir": None,
            "max_output": MIB,
        }  # fmt: skip
        return self.send("create", sandbox=sandbox, layers=list(layers), **(wanted | fields))

    def create(self, sandbox: str, layers: Sequence[str] = ("base",), **fields: object) -> dict[str, Any]:
        return self.reply(self.ask_create(sandbox, layers, **fields))

    def socket_path(self, sandbox: str) -> Path:
        return self.run / "sb" / f"{sandbox}.sock"

    def close(self) -> None:
        self.socket.close()
        self.process.wait(DEADLINE)


class Output(msgspec.Struct):
    done: ExecDone
    out: str
    err: str


async def run(
    launcher: Launcher, sandbox: str, *argv: str, user: str | None = None, cwd: bytes | None = None
) -> Output:
    """One command, to its end."""
    client = await LinkClient.connect_unix(launcher.socket_path(sandbox))
    try:
        spec = ExecSpec(
            exec_id=new_exec_id(), argv=tuple(a.encode() for a in argv), user=user, cwd=cwd, timeout=DEADLINE
        )
        stream = await client.open("exec", msgspec.structs.asdict(spec) | {"cursor": 0, "follow": True})
        pieces: dict[int, bytes] = {1: b"", 2: b""}
        async for item in stream:
            if isinstance(item, Data):
                pieces[item.channel] += item.data
        done = await stream.result(ExecDone)
        return Output(done, pieces[1].decode(errors="replace"), pieces[2].decode(errors="replace"))
    finally:
        await client.close()


async def attack(
    launcher: Launcher, sandbox: str, *args: object, user: str | None = None, cwd: bytes | None = None
) -> str:
    """What the test program inside says."""
    ended = await run(launcher, sandbox, "/attacker", *map(str, args), user=user, cwd=cwd)
    return ended.out.strip()
