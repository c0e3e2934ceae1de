"""What of an agent's changes arrives in the grading sandbox: exactly what counts, in any number, kind and name."""

from __future__ import annotations

import dsec
from dsec import DropReason, GradeReason

from .conftest import FIXED, Shop

LOOK = """
import os, sys
top = os.fsencode("/workspace/src")
for path, directories, files in sorted(os.walk(top)):
    for name in sorted(files):
        whole = os.path.join(path, name)
        about = os.lstat(whole)
        sys.stdout.buffer.write(b"%s %o %d\\0" % (whole[len(top) + 1 :], about.st_mode & 0o7777, about.st_size))
"""


async def look(shop: Shop, agent: dsec.Sandbox, **options: object) -> tuple[dict[str, tuple[str, int]], dsec.Verdict]:
    """Files below src of a graded sandbox, by name: mode and size."""
    runner = dsec.CommandRunner(argv=("python3", "-c", LOOK))
    verdict = await shop.grade(agent, runner=runner, **{"include": ("src/**",), **options})
    assert verdict.reward == 1.0, verdict
    found = {}
    for line in verdict.evidence.output.split("\0")[:-1]:
        name, mode, size = line.rsplit(" ", 2)
        found[name] = (mode, int(size))
    return found, verdict


async def test_kinds_modes_and_names(shop: Shop, agent: dsec.Sandbox) -> None:
    await agent.run_shell(
        r"""set -e; cd /workspace/src
        printf 'a\0b\377' > shop/binary.dat
        chmod 755 shop/__init__.py
        rm shop/old.py
        mv shop/legacy/a.py shop/renamed.py
        printf x > "$(printf 'shop/new\nline \377.py')"
        ln -s renamed.py shop/link.py; mkfifo shop/pipe
        chmod 6777 shop/renamed.py
        mkdir -p shop/deep/er; printf y > shop/deep/er/z.txt
        rm -r shop/legacy; mkdir shop/legacy; printf n > shop/legacy/new.py
        printf 'import os' > conftest.py; printf x > sitecustomize.py; printf x > json.py; printf x > ../tests/test_hidden.py
        """,
        check=True,
    )
    found, verdict = await look(shop, agent)
    assert found == {
        "shop/__init__.py": ("755", 46),
        "shop/binary.dat": ("644", 4),
        "shop/renamed.py": ("755", 6),
        "shop/new\nline \ufffd.py": ("644", 1),
        "shop/deep/er/z.txt": ("644", 1),
        "shop/legacy/new.py": ("644", 1),
        "shop/legacy/conftest.py": ("644", 26),  # of the repository's own: the agent may not remove it
    }
    why = {drop.path: drop.why for drop in verdict.evidence.dropped}
    assert why == {
        "src/conftest.py": DropReason.TEST_CONFIG,
        "src/sitecustomize.py": DropReason.STARTUP,
        "src/json.py": DropReason.SHADOWS,
        "tests/test_hidden.py": DropReason.TESTS,
        "src/shop/link.py": DropReason.LINK,
        "src/shop/pipe": DropReason.SPECIAL,
    }
    assert "set_id" in {signal.name for signal in verdict.evidence.signals}


async def test_a_whole_tree_gone_leaves_what_is_not_the_agents_to_remove(shop: Shop, agent: dsec.Sandbox) -> None:
    await agent.run_shell("rm -rf /workspace/src /workspace/tests /workspace/conftest.py", check=True)
    found, _ = await look(shop, agent)
    assert list(found) == ["shop/legacy/conftest.py"]


async def test_a_directory_in_the_place_of_a_file_and_the_other_way_round(shop: Shop, agent: dsec.Sandbox) -> None:
    line = "cd /workspace/src/shop; rm old.py; mkdir old.py; echo > old.py/x.py; rm -r legacy; echo > legacy"
    await agent.run_shell(line, check=True)
    found, verdict = await look(shop, agent)
    assert set(found) == {"shop/__init__.py", "shop/old.py/x.py", "shop/legacy/conftest.py", "shop/legacy/a.py"}
    assert {drop.path: drop.why for drop in verdict.evidence.dropped} == {"src/shop/legacy": DropReason.TESTS}


MANY = """
import os
for directory in range(100):
    os.mkdir(f"/workspace/src/{directory}")
    for number in range(1000):
        open(f"/workspace/src/{directory}/{number}.py", "w").write("x")
"""
COUNT = "import os, sys; sys.exit(0 if sum(len(files) for _, _, files in os.walk('/workspace/src')) == 100_004 else 1)"


async def test_a_hundred_thousand_files(shop: Shop, agent: dsec.Sandbox) -> None:
    await agent.exec(("python3", "-c", MANY), check=True)
    runner = dsec.CommandRunner(argv=("python3", "-c", COUNT))
    verdict = await shop.grade(agent, runner=runner, include=("src/**",), timeout=120)
    assert (verdict.reward, verdict.evidence.kept) == (1.0, 100_101), verdict.detail


async def test_too_much_is_a_zero_with_its_reason(shop: Shop) -> None:
    args = dsec.DSecContainerRunArgs("debian@12", layers=(shop.workspace,), memory_limit_mb=512)
    async with shop.client.run_container(args) as agent:
        await agent.run_shell("head -c 300M /dev/zero > /workspace/src/shop/big.bin", check=True)
        verdict = await shop.grade(agent, include=("src/**",))
        assert (verdict.reward, verdict.valid, verdict.reason) == (0.0, True, GradeReason.CHANGES_TOO_LARGE)
        assert "big.bin has 314,572,800 bytes" in verdict.detail
        await agent.stop()
    async with shop.client.run_container(args) as agent:
        line = "cd /workspace; mkdir .venv .git; for where in .venv .git .; do head -c 150M /dev/zero > $where/big.bin; done"
        await agent.run_shell(line, check=True)
        await agent.files.write("/workspace/src/shop/__init__.py", FIXED)
        verdict = await shop.grade(agent, exclude=("big.bin",))
        assert verdict.reward == 1.0, verdict  # what does not count may be of any size


async def test_a_signal_for_what_was_tried(shop: Shop, agent: dsec.Sandbox) -> None:
    line = "mkdir -p /workspace/.git/hooks; echo > /workspace/.git/hooks/post-checkout; echo > /usr/local/bin/python3"
    await agent.run_shell(line, check=True)
    verdict = await shop.grade(agent)
    assert {signal.name for signal in verdict.evidence.signals} == {"dropped_git", "dropped_on_path"}
    assert all(drop.suspicious for drop in verdict.evidence.dropped)
