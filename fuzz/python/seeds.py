"""`python fuzz/python/seeds.py`: inputs to start from, made of the shared vectors of link and of archives of every kind."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "python"))

from targets import name_of  # noqa: E402

FORMATS = (tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)


def _hex(value: object) -> Iterator[bytes]:
    """Every string of bytes that the vectors hold."""
    if isinstance(value, dict):
        for one in value.values():
            yield from _hex(one)
    elif isinstance(value, list):
        for one in value:
            yield from _hex(one)
    elif isinstance(value, str) and len(value) % 2 == 0:
        try:
            yield bytes.fromhex(value)
        except ValueError:
            return


def link_inputs() -> Iterator[bytes]:
    found = [
        one for one in _hex(json.loads((ROOT.parent / "tests/vectors/link.json").read_text())) if 4 < len(one) < 2000
    ]
    yield from found
    yield b"".join(found)


def _member(
    name: str, kind: bytes, data: bytes = b"", target: str = "", **fields: object
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(data), target
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def _members() -> list[tuple[tarfile.TarInfo, bytes]]:
    return [
        _member("d", tarfile.DIRTYPE, mode=0o700),
        _member("d/f", tarfile.REGTYPE, b"contents", mode=0o4755, mtime=1.5),
        _member("d/l", tarfile.SYMTYPE, target="f"),
        _member("d/h", tarfile.LNKTYPE, target="d/f"),
        _member("d/.wh.f", tarfile.REGTYPE),
        _member("d/.wh..wh..opq", tarfile.REGTYPE),
        _member("n" * 120 + "/" + "m" * 90, tarfile.REGTYPE, b"x"),
        _member("up", tarfile.SYMTYPE, target="../outside"),
        _member("up/file", tarfile.REGTYPE, b"escaped"),
        _member("root", tarfile.SYMTYPE, target="/outside"),
        _member("root/file", tarfile.REGTYPE, b"escaped"),
        _member("../outside/file", tarfile.REGTYPE, b"escaped"),
        _member("/outside/file", tarfile.REGTYPE, b"escaped"),
        _member("hard", tarfile.LNKTYPE, target="../outside/file"),
        _member("hard2", tarfile.LNKTYPE, target="/outside/file"),
        _member("hard3", tarfile.LNKTYPE, target="root/file"),
        _member("hard3", tarfile.REGTYPE, b"escaped"),
        _member("d", tarfile.REGTYPE, b"in the place of a directory"),
        _member("fifo", tarfile.FIFOTYPE),
        _member("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
        _member("é\udcff", tarfile.REGTYPE, b"x"),
        _member(".", tarfile.DIRTYPE, mode=0o500),
        _member("", tarfile.REGTYPE),
        _member("a/../b", tarfile.REGTYPE),
        _member("long", tarfile.SYMTYPE, target="t" * 300),
        _member("self", tarfile.SYMTYPE, target="self"),
        _member("self/x", tarfile.REGTYPE),
        _member("big", tarfile.REGTYPE, b"z" * 1500, uid=2**40, mtime=-1),
    ]


def _sparse() -> bytes:
    """An old GNU sparse head that claims eight exabytes."""
    info, _ = _member("sparse", tarfile.GNUTYPE_SPARSE, b"x" * 512)
    head = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    head[386:398], head[398:410] = b"00000000000\0", b"00000001000\0"
    head[483:495] = b"\x80" + bytes(3) + (1 << 62).to_bytes(8, "big")
    return bytes(head) + b"x" * 512 + bytes(1024)


def tar_inputs() -> Iterator[bytes]:
    yield _sparse()
    for form in FORMATS:
        groups = [[one] for one in _members()] + [_members()]
        for group in groups:
            buffer = io.BytesIO()
            try:
                with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
                    for info, data in group:
                        tar.addfile(info, io.BytesIO(data))
            except ValueError:
                continue  # this format cannot say it
            yield buffer.getvalue()[:8192].rstrip(b"\0") + bytes(1024)
    for records in (
        b"16 path=../evil\n",
        b"13 size=99999\n",
        b"9 path=a\0\n",
        b"99999999999999999999 a=b\n",
        b"6 a=b\n",
    ):
        info, _ = _member("x", tarfile.XHDTYPE, records)
        body = records + bytes(-len(records) % 512)
        yield info.tobuf() + body + _member("f", tarfile.REGTYPE)[0].tobuf() + bytes(1024)


def main() -> None:
    for name, inputs in (("link", link_inputs()), ("tar", tar_inputs())):
        directory = ROOT / "corpus" / name
        directory.mkdir(parents=True, exist_ok=True)
        for data in inputs:
            (directory / name_of(data)).write_bytes(data)
        print(f"{name}: {len(list(directory.iterdir()))} inputs")


if __name__ == "__main__":
    main()
