"""The one way out of a sandbox: allowed names are reached, everything else is refused at once and says why."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import signal
import threading
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dsec
from dsec import DSecClient, DSecContainerRunArgs, Mirror, MirrorKind, Sandbox
from dsec.cluster import embedded

from .conftest import BASE

pytestmark = pytest.mark.e2e
REFUSED_WITHIN_S = 0.1


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        self.server.asked.append((self.command, self.path, dict(self.headers)))  # type: ignore[attr-defined]


class Site(http.server.ThreadingHTTPServer):
    """A directory on loopback; `asked` is who asked for what, with which headers."""

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(_Handler, directory=str(directory)))
        self.asked: list[tuple[str, str, dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(site: http.server.HTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=site.serve_forever)
    thread.start()
    try:
        yield
    finally:
        site.shutdown()
        thread.join()
        site.server_close()


def make_index(root: Path) -> None:
    """A PEP 503 index as mirrors have it: pages below simple/, files beside it."""
    (root / "repo" / "simple" / "tinyone").mkdir(parents=True)
    (root / "repo" / "files").mkdir()
    wheel = root / "repo" / "files" / "tinyone-1.0-py3-none-any.whl"
    info = "tinyone-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tinyone.py", "ANSWER = 42\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinyone\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"tinyone.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (root / "repo" / "simple" / "tinyone" / "index.html").write_text(
        f'<!DOCTYPE html><a href="../../files/{wheel.name}#sha256={digest}">{wheel.name}</a>'
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("site")
    make_index(root)
    (root / "secret").write_text("outside the mirror")
    site = Site(root)
    with serving(site):
        yield site


@pytest.fixture(scope="module")
def node(site: Site, nothing_is_left: None) -> Iterator[embedded.Endpoint]:
    mirrors = (
        Mirror(
            name="pypi",
            kind=MirrorKind.PYPI,
            url=f"{site.url}/repo/simple/",
            headers={"X-Token": "the-operators-secret"},
        ),
        Mirror(name="npm", kind=MirrorKind.NPM, url=f"{site.url}/npm/"),
    )
    with embedded.private(mirrors=mirrors) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
async def client(node: embedded.Endpoint) -> AsyncIterator[DSecClient]:
    async with DSecClient(node.url, Path(node.key_file).read_text().strip()) as client:
        yield client


@pytest.fixture
async def sandbox(client: DSecClient) -> AsyncIterator[Sandbox]:
    rules = {"pypi": True, "npm": False, "nosuch": True}
    async with client.run_container(DSecContainerRunArgs(BASE, network_rules=rules)) as sandbox:
        yield sandbox


async def curl(sandbox: Sandbox, *words: str) -> tuple[str, float]:
    """What curl says, and its own count of seconds."""
    result = await sandbox.exec(["curl", "-sS", "-i", "-m", "20", "-w", "\n%{time_total}", *words], merge_stderr=True)
    text, _, seconds = result.text.strip().rpartition("\n")
    return text, float(seconds)


async def test_pip_installs_from_the_allowed_mirror(sandbox: Sandbox, site: Site) -> None:
    result = await sandbox.run_shell(
        "pip install --break-system-packages tinyone && python3 -c 'import tinyone as t; print(t.ANSWER)'"
    )
    assert result.ok and result.text.endswith("42\n"), result.text + result.stderr_text
    seen = [headers for _, path, headers in site.asked if path.startswith("/repo/")]
    assert seen and all(headers.get("X-Token") == "the-operators-secret" for headers in seen)
    everything = await sandbox.run_shell(
        "env; cat /proc/*/environ /etc/pip.conf /etc/npmrc; grep -rl operators /etc || true"
    )
    assert "operators" not in everything.text, "credentials stay on the node"


async def test_by_configuration_alone(sandbox: Sandbox) -> None:
    """Programs that lose their environment (su, cron) find the mirror by its files."""
    line = "env -i PATH=$PATH pip download --no-deps -d /tmp/got tinyone && ls /tmp/got"
    result = await sandbox.run_shell(line)
    assert "tinyone-1.0-py3-none-any.whl" in result.text, result.text + result.stderr_text


async def test_the_denied_one_is_refused_at_once_and_says_why(sandbox: Sandbox) -> None:
    for url in ("http://npm/left-pad", "https://example.com/", "http://example.com/"):
        text, seconds = await curl(sandbox, url)
        assert "403 Denied: " in text and "(reachable: pypi)" in text, text
        assert seconds < REFUSED_WITHIN_S
    text, _ = await curl(sandbox, "http://npm/left-pad")
    assert "the rule 'npm' denies it" in text and "http://pypi/repo/simple/" in text and "Trying again" in text
    result = await sandbox.run_shell("pip download -i https://pypi.example.com/simple six")
    assert not result.ok and result.timed_out is None
    assert "no network rule allows it (reachable: pypi)" in result.text + result.stderr_text, "pip shows the reason"


async def test_info_and_logs_tell_the_truth(sandbox: Sandbox, client: DSecClient) -> None:
    await curl(sandbox, "http://npm/x")
    network = (await sandbox.info()).network
    assert network.mode == "proxy" and network.enforced["pypi"] == "allowed"
    assert (
        network.enforced["npm"].startswith("refused: denied")
        and "no mirror named 'nosuch'" in network.enforced["nosuch"]
    )
    assert any(line.startswith("network: denied npm") for line in [line async for line in sandbox.logs()])
    assert (await client.capabilities()).mirrors == {"pypi": "pypi", "npm": "npm"}


async def test_rules_change_at_run_time(client: DSecClient) -> None:
    async with client.run_container(DSecContainerRunArgs(BASE)) as sandbox:
        assert (await sandbox.info()).network.mode == "none"
        assert (await sandbox.run_shell("env | grep -ic proxy; ls /etc/pip.conf")).text == "0\n"
        told = await sandbox.set_network({"pypi": True})
        assert told.mode == "proxy" and told.enforced == {"pypi": "allowed"}
        assert "200 OK" in (await curl(sandbox, "http://pypi/repo/simple/tinyone/"))[0]
        assert (await sandbox.changes(include=("etc/**", "usr/**", "etc", "usr"))).changes == (), (
            "none of it is the agent's"
        )
        await sandbox.set_network({"pypi": False})
        assert "403 Denied" in (await curl(sandbox, "http://pypi/repo/simple/tinyone/"))[0]
        await sandbox.set_network({})
        assert (await sandbox.info()).network.mode == "none"
        text, _ = await curl(sandbox, "http://pypi/repo/simple/tinyone/")
        assert "Could not resolve host" in text
        assert (await sandbox.run_shell("ls /etc/pip.conf /etc/npmrc /etc/apt/apt.conf.d")).text.count("dsec") == 0
        assert (await sandbox.changes(include=("etc/**", "usr/**", "etc", "usr"))).changes == ()
        with pytest.raises(dsec.InvalidRequest, match="network_rules"):
            await sandbox.set_network({"10.0.0.1": True})


async def test_files_of_others_are_left_alone(client: DSecClient) -> None:
    async with client.run_container(DSecContainerRunArgs(BASE)) as sandbox:
        await sandbox.files.write("/etc/pip.conf", "[global]\nno-color = true\n")
        await sandbox.set_network({"pypi": True})
        assert await sandbox.files.read_text("/etc/pip.conf") == "[global]\nno-color = true\n"
        await sandbox.set_network({})
        assert await sandbox.files.exists("/etc/pip.conf")
        changed = {change.path for change in (await sandbox.changes(include=("etc/**",))).changes}
        assert changed == {b"etc", b"etc/pip.conf"}


async def test_the_callers_variables_come_first(client: DSecClient) -> None:
    args = DSecContainerRunArgs(BASE, network_rules={"pypi": True}, env={"PIP_INDEX_URL": "http://mine/"})
    async with client.run_container(args) as sandbox:
        line = "echo $PIP_INDEX_URL $http_proxy"
        assert (await sandbox.run_shell(line, env={"http_proxy": "own"})).text == "http://mine/ own\n"


async def test_without_rules_there_is_nothing(client: DSecClient) -> None:
    async with client.run_container(DSecContainerRunArgs(BASE)) as sandbox:
        listening = "cat /proc/net/tcp /proc/net/tcp6 | grep -c ' 0A '"
        assert (await sandbox.run_shell(listening)).text == "0\n"


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:{port}/secret", "http://localhost:{port}/secret", "http://2130706433:{port}/secret",
     "http://0x7f.1:{port}/secret", "http://[::1]:{port}/secret", "http://[::ffff:127.0.0.1]:{port}/secret",
     "http://169.254.169.254/latest/meta-data/", "http://metadata.google.internal/", "http://pypi:{port}/secret",
     "http://pypi/secret", "http://pypi/repo/../secret", "http://pypi/repo/%2e%2e/secret", "http://pypi/repo/..%2fsecret",
     "http://pypi@127.0.0.1:{port}/secret"],
)  # fmt: skip
async def test_no_way_around(sandbox: Sandbox, site: Site, url: str) -> None:
    before = len(site.asked)
    words = ["--path-as-is", "--noproxy", "", "-x", "http://127.0.0.1:18080"]
    text, seconds = await curl(sandbox, *words, url.format(port=site.server_port))
    assert "outside the mirror" not in text and " 200 " not in text, text
    assert len(site.asked) == before and seconds < 1
    tunnel, _ = await curl(sandbox, "-p", *words, url.format(port=site.server_port))
    assert " 200 " not in tunnel and len(site.asked) == before, tunnel


async def test_the_platform_is_out_of_reach(sandbox: Sandbox, client: DSecClient) -> None:
    host, port = client._transport._endpoint.url.removeprefix("http://").split(":")  # type: ignore[union-attr]
    for target in (f"{host}:{port}", f"localhost:{port}", "169.254.169.254:80", "10.0.0.1:443", f"pypi:{port}"):
        text, _ = await curl(sandbox, "-p", "--noproxy", "", "-x", "http://127.0.0.1:18080", f"http://{target}/healthz")
        assert "403 Denied" in text, text
    assert "Failed to connect" in (await curl(sandbox, f"http://{host}:{port}/healthz"))[0], "nor by a socket"
    for line in ("exec 3<>/dev/tcp/1.1.1.1/53", "getent hosts pypi.org", "getent hosts pypi"):
        result = await sandbox.run_shell(line, timeout=20)
        assert not result.ok and result.timed_out is None and result.duration_s < 5, line


async def test_a_killed_proxy_is_replaced(sandbox: Sandbox, node: embedded.Endpoint) -> None:
    assert "200 OK" in (await curl(sandbox, "http://pypi/repo/simple/tinyone/"))[0]
    pid = proxy_of(node)
    pidfd = os.pidfd_open(pid)
    assert proxy_of(node) == pid, "not somebody else by now"
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    assert (
        "200 OK" in (await curl(sandbox, "--retry", "3", "--retry-all-errors", "http://pypi/repo/simple/tinyone/"))[0]
    )
    assert proxy_of(node) != pid


def proxy_of(node: embedded.Endpoint) -> int:
    """The proxy process of a platform, found among its edge's children."""
    edge = next(process.pid for process in embedded.status(node.state).processes if process.role == "edge")
    children = Path(f"/proc/{edge}/task/{edge}/children").read_text().split()
    [proxy] = [pid for pid in children if b"dsec.edge.proxy" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(proxy)


async def test_the_proxy_has_no_privilege(sandbox: Sandbox, node: embedded.Endpoint) -> None:
    await curl(sandbox, "http://pypi/repo/simple/tinyone/")
    lines = Path(f"/proc/{proxy_of(node)}/status").read_text().splitlines()
    facts = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    assert set(facts["Uid"]) == set(facts["Gid"]) == {"65534"} and facts["Groups"] == []
    assert int(facts["CapPrm"][0], 16) == int(facts["CapEff"][0], 16) == int(facts["CapInh"][0], 16) == 0
    assert facts["NoNewPrivs"] == ["1"] and facts["Seccomp"] == ["2"]
