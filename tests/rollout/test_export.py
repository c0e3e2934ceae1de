"""An export has all of a rollout, and shows when it was changed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dsec.protocol.errors import Fault
from dsec.protocol.export import check_export

from .logs import ARGS, ID, do, opened


async def exported(root: Path) -> list[bytes]:
    store = opened(root)
    trajectory = store.create(ID, job="j", name="r\n", args=ARGS)
    await trajectory.opened()
    for number, out in enumerate((b"text\n", b"\xff\x00", b"", "lang ä".encode() * 5000, bytes(range(256)) * 200)):
        await do(trajectory, number, out)
    await trajectory.finished(reward=1.0, valid=True)
    lines = list(store.export(ID))
    store.close()
    return lines


async def test_every_content_is_in_it(tmp_path: Path) -> None:
    lines = await exported(tmp_path)
    assert len(lines) == 7 and all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    head, *steps, end = map(msgspec.json.decode, lines)
    assert head["head"]["reward"] == 1.0 and head["head"]["name"] == "r\n" and end["end"] == {"steps": 5}
    contents = [step["contents"]["outputs"]["stdout"] for step in steps]
    assert contents[0] == {"text": "text\n"} and contents[1] == {"b64": "/wA="} and contents[2] == {"text": ""}
    assert contents[3] == {"text": "lang ä" * 5000} and "b64" in contents[4]
    assert [step["step"]["outputs"]["stdout"]["total"] for step in steps] == [5, 2, 0, 35_000, 51_200]
    assert check_export(lines) == end["chain"]


async def test_a_changed_export_is_no_export(tmp_path: Path) -> None:
    lines = await exported(tmp_path)
    wrong = {
        "dropped": [*lines[:2], *lines[3:]],
        "swapped": [lines[0], lines[2], lines[1], *lines[3:]],
        "cut": lines[:-1],
        "longer": [*lines, lines[-1]],
        "empty": [],
        "edited": [lines[0], lines[1].replace(b'"exit_code":0', b'"exit_code":1'), *lines[2:]],
        "headless": lines[1:],
        "rubbish": [*lines[:3], b"{}", *lines[4:]],
    }
    for why, changed in wrong.items():
        with pytest.raises(Fault):
            print(why, check_export(changed))


async def test_a_flipped_byte_of_an_export_is_found(tmp_path: Path) -> None:
    lines = (await exported(tmp_path))[:3]
    for number, line in enumerate(lines):
        for position in range(len(line) - 1):
            changed = bytearray(line)
            changed[position] ^= 1
            with pytest.raises(Fault, match=f"line {number + 1} of"):
                check_export([*lines[:number], bytes(changed), *lines[number + 1 :]])
