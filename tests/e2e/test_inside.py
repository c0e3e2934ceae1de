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
from .raw import Raw, Refused

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


async def test_a_key_reaches_its_rollouts_and_nothing_else(
    platform: embedded.Endpoint, client: dsec.DSecClient
) -> None:
    async with Raw(platform) as owner:
        mine = await owner.open("agent/1", job="keys")
        other = await owner.open("other/1", job="keys")
        elsewhere = await owner.open("agent/1", job="others")
        made = await client.keys.create("keys", rollouts="agent/*", may=("use", "create"), layers=BASE)
        async with dsec.DSecClient(platform.url, made.key) as holder, Raw(platform, made.key) as raw:
            sandbox = await holder.attach(mine.info["sandbox"])
            assert (await sandbox.run_shell("echo mine")).text == "mine\n"
            again = await raw.open("agent/1", job="keys", opens_job=False)
            assert again.info["id"] == mine.id and again.info["epoch"] == mine.info["epoch"] + 1
            assert (await again.shell(0, "echo step"))["done"]["exit_code"] == 0
            new = await raw.open("agent/2", job="keys", opens_job=False)
            await new.finish(reward=1.0)
            for foreign in (other, elsewhere):
                with pytest.raises(dsec.PermissionDenied):
                    await holder.attach(foreign.info["sandbox"])
                with pytest.raises(Refused) as refused:
                    await foreign._replace(raw=raw).now()
                assert refused.value.kind == "permission"
                with pytest.raises(Refused) as refused:  # its own sandbox, by a step of another's rollout
                    await foreign._replace(raw=raw, info={**foreign.info, "sandbox": mine.info["sandbox"]}).shell(
                        0, "id"
                    )
                assert refused.value.kind in ("permission", "conflict", "invalid_request")
            for name, more in {
                "other/2": {},
                "agent/3": {"layers": ["tests@1"]},
                "agent/4": {"network_rules": {"dsec": True}},
            }.items():
                with pytest.raises(Refused) as refused:
                    await raw.open(name, job="keys", opens_job=False, **more)
                assert refused.value.kind == "permission", name
            with pytest.raises(dsec.PermissionDenied):
                await sandbox.set_network({"dsec": True})
            with pytest.raises(dsec.PermissionDenied):
                await holder.run_container(DSecContainerRunArgs(BASE))
            await owner.json("DELETE", "/v1/jobs/keys")
            with pytest.raises(dsec.PermissionDenied, match="has ended"):
                await sandbox.run_shell("true")
            await owner.open("agent/1", job="keys")  # a later job of the same name is another
            with pytest.raises(Refused) as refused:
                await raw.open("agent/1", job="keys", opens_job=False)
            assert refused.value.kind == "permission"
        for job in ("keys", "others"):
            await owner.json("DELETE", f"/v1/jobs/{job}")
