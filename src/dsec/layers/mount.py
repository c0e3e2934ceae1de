"""Mounting a layer: a detached EROFS mount by descriptor, made by the runtime's helper (mount(2) needs root, we may not be)."""

from __future__ import annotations

import array
import os
import socket
import subprocess
from pathlib import Path

from dsec.protocol.errors import ErrorKind, Fault

TIMEOUT = 30.0  # seconds; a mount takes a third of a millisecond, a sick disk longer


def mount_layer(runtime: Path, meta: Path, data: list[Path]) -> int:
    """Mount a layer's blobs and return the descriptor of the detached mount; the caller closes it.

    Runs `runtime helper mount-layer --fd N META DATA...`, which sends one message with the descriptor over the socket N.
    Blocks for some milliseconds: call it in a thread. Fault CREATE_FAILED (stage "layer") with what the helper said.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        command = [str(runtime), "helper", "mount-layer", "--fd", str(theirs.fileno()), str(meta), *map(str, data)]
        try:
            run = subprocess.run(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT,
                check=False,
            )
        except OSError as error:
            raise _failed(meta, f"cannot run {runtime}: {error.strerror}", "build the runtime (`make`)") from None
        except subprocess.TimeoutExpired:
            raise _failed(meta, f"no answer in {TIMEOUT:.0f} s", "look at the disk that holds the store") from None
        theirs.close()
        mount = _received(ours)
    if run.returncode == 0 and mount is not None:
        return mount
    if mount is not None:
        os.close(mount)
    said = run.stderr.decode(errors="replace").strip() or f"the helper ended with {run.returncode}"
    raise _failed(meta, said, "`dsec doctor` tells whether this kernel mounts EROFS from files")


def _received(connection: socket.socket) -> int | None:
    """The descriptor in the one message that waits on `connection`, None when there is none."""
    descriptors = array.array("i")
    connection.setblocking(False)  # the helper has ended: what it sent is there
    try:
        _, ancillary, _, _ = connection.recvmsg(4096, socket.CMSG_SPACE(descriptors.itemsize), socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return descriptors[0] if descriptors else None


def _failed(meta: Path, why: str, hint: str) -> Fault:
    return Fault(ErrorKind.CREATE_FAILED, f"cannot mount the layer {meta.name}: {why}", hint=hint, stage="layer")
