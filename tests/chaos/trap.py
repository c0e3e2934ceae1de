"""Where the edge stands still before and after each durable step, and what is done to whom meanwhile."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from dsec.protocol.steps import Standing


class Trap:
    """Serves DSEC_STEPS. One shot: the first time the edge stands where it is armed for, the blow falls."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._armed: tuple[str, str, Callable[[str], bool]] | None = None
        self._skip = 0
        self.hit: str | None = None
        """The sandbox it happened to; None until then."""
        self.killed = False
        self.struck = asyncio.Event()
        """The blow has fallen."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = asyncio.get_running_loop().create_task(self._serve())

    def arm(self, step: str, when: str, blow: Callable[[str], bool], *, skip: int = 0) -> None:
        """blow gets the sandbox's id, ends somebody, and says whether there was somebody to end. skip: so many times the edge
        stands there and goes on."""
        self._armed, self.hit, self.killed = (step, when, blow), None, False
        self._skip = skip
        self.struck.clear()

    def disarm(self) -> None:
        self._armed = None

    async def close(self) -> None:
        self._server.cancel()
        self._listener.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            task = loop.create_task(self._stand(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _stand(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with connection:
            loop = asyncio.get_running_loop()
            said = await loop.sock_recv(connection, 4096)
            if not said:
                return
            standing = msgspec.json.decode(said, type=Standing)
            armed = self._armed
            if armed is not None and armed[:2] == (standing.step, standing.when):
                if self._skip:
                    self._skip -= 1
                else:
                    self._armed, self.hit = None, standing.sandbox
                    self.killed = await asyncio.to_thread(armed[2], standing.sandbox)
                    self.struck.set()
            try:
                await loop.sock_sendall(connection, b"g")
            except OSError:
                return  # the one that stood there is dead
