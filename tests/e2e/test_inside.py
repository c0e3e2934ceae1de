"""From inside a sandbox to the API of its own platform: by a rule and a scoped key, by nothing else, through any restart."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import dsec
from dsec import DSecContainerRunArgs
from dsec.cluster import embedded
from dsec.iam.scoped import Claims, Signer
from dsec.layers import LayerStore, build_sdk

from .conftest import BASE

pytestmark = pytest.mark.e2e
ASK = "import dsec.sync; print(dsec.sync.DSecClient().capabilities().version)"


@pytest.fixture(scope="session")
def sdk(store: LayerStore) -> str:
    """The toolkit, by its digest: another checkout may build one of the same version on this machine."""
    ref = build_sdk(store)
    return f"{ref.name}@{ref.digest}"


def worker(sdk: str, **rules: bool) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(BASE, layers=(sdk,), network_rules=rules)


def signed(platform: embedded.Endpoint) -> str:
    owner = Path(platform.key_file).read_text().strip()
    return Signer(owner.encode()).sign(Claims(key="ky-test", job="jb-local-000000000000", until=time.time() + 600))


async def test_the_sdk_is_there_and_finds_its_platform(
    platform: embedded.Endpoint, client: dsec.DSecClient, sdk: str
) -> None:
    async with client.run_container(worker(sdk, dsec=True)) as sandbox:
        assert (await sandbox.info()).network.enforced == {"dsec": "allowed"}
        key = {"DSEC_API_KEY": signed(platform)}
        told = await sandbox.exec(["python3", "-c", ASK], env=key, check=True)
        assert told.text.strip() == (await client.capabilities()).version
        owner = Path(platform.key_file).read_text().strip()
        refused = await sandbox.exec(["python3", "-c", ASK], env={"DSEC_API_KEY": owner})
        assert not refused.ok and "not taken from inside a sandbox" in refused.stderr_text
        nobody = await sandbox.exec(["python3", "-c", ASK], env={"DSEC_API_KEY": "x" * 40})
        assert not nobody.ok and "AuthenticationError" in nobody.stderr_text
        plain = await sandbox.run_shell("curl -s -o /dev/null -w '%{http_code}' http://dsec/v1/status")
        assert plain.text == "401"


@pytest.mark.parametrize("rules", [{}, {"dsec": False}, {"example.com": True}], ids=str)
async def test_without_the_rule_there_is_no_way(client: dsec.DSecClient, sdk: str, rules: dict[str, bool]) -> None:
    async with client.run_container(worker(sdk, **rules)) as sandbox:
        address = client._transport.url("/healthz")
        for url in ("http://dsec/healthz", str(address), f"http://127.0.0.1:{address.port}/healthz"):
            told = await sandbox.run_shell(f"curl -s -m 5 -o /dev/null -w '%{{http_code}}' {url}")
            assert told.text in ("000", "403"), (url, told)


async def test_it_holds_through_restarts(platform: embedded.Endpoint, client: dsec.DSecClient, sdk: str) -> None:
    """The apiserver and the edge are killed; what runs inside asks on."""
    async with client.run_container(worker(sdk, dsec=True)) as sandbox:
        program = (
            "import dsec.sync, sys\n"
            "with dsec.sync.DSecClient() as client:\n"
            "    for line in sys.stdin:\n"
            "        print(client.capabilities().version, flush=True)\n"
        )
        asking = await sandbox.start(
            ["python3", "-c", program], stdin=True, env={"DSEC_API_KEY": signed(platform)}, exec_id="asking"
        )
        events = asking.events()
        for role in (None, "apiserver", "edge", "apiserver"):
            if role is not None:
                before = _pid(platform, role)
                os.kill(before, signal.SIGKILL)
            await asking.write("again\n")
            said = await anext(events)
            assert isinstance(said, dsec.Stdout) and said.data.decode().strip() == "0.1.0"
        await asking.close_stdin()
        assert (await asking.wait()).ok


def _pid(platform: embedded.Endpoint, role: str) -> int:
    found = {process.role: process.pid for process in embedded.status(platform.state).processes}
    assert found[role] is not None
    return found[role]
