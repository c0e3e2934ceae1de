"""The one way out of a sandbox: allowed names are reached, everything else is refused at once and says why."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import http.server
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dsec
from dsec import DSecClient, DSecContainerRunArgs, Mirror, MirrorKind, Sandbox
from dsec.cluster import embedded
from tests.edge.proxy.certificates import Authority

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


def make_archive(root: Path, work: Path) -> None:
    """An apt repository with one package."""
    package = work / "tinydeb"
    (package / "DEBIAN").mkdir(parents=True)
    (package / "usr" / "share").mkdir(parents=True)
    (package / "usr" / "share" / "tinydeb").write_text("from the mirror\n")
    control = (
        "Package: tinydeb\nVersion: 1.0\nArchitecture: all\nMaintainer: Test <test@example.org>\nDescription: test\n"
    )
    (package / "DEBIAN" / "control").write_text(control)
    (root / "pool").mkdir(parents=True)
    deb = root / "pool" / "tinydeb_1.0_all.deb"
    subprocess.run(
        ["dpkg-deb", "--build", "--root-owner-group", str(package), str(deb)], check=True, capture_output=True
    )
    lists = root / "dists" / "stable" / "main" / "binary-amd64"
    lists.mkdir(parents=True)
    digest = hashlib.sha256(deb.read_bytes()).hexdigest()
    index = f"{control}Filename: pool/{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n\n".encode()
    (lists / "Packages").write_bytes(index)
    (root / "dists" / "stable" / "Release").write_text(
        "Suite: stable\nCodename: stable\nArchitectures: amd64\nComponents: main\nDate: Sat, 01 Nov 2025 00:00:00 UTC\n"
        f"SHA256:\n {hashlib.sha256(index).hexdigest()} {len(index)} main/binary-amd64/Packages\n"
    )


@pytest.fixture(scope="module")
async def streams(nothing_is_left: None) -> AsyncIterator[tuple[int, int]]:
    """Ports of a server that begins to answer and waits, and of one that sends without end."""

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegun\n")
        await reader.read()
        writer.close()

    async def big(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n")
            while True:
                writer.write(bytes(65536))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()

    servers = [await asyncio.start_server(one, "127.0.0.1", 0) for one in (slow, big)]
    yield servers[0].sockets[0].getsockname()[1], servers[1].sockets[0].getsockname()[1]
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
async def tls_site(authority: Authority, nothing_is_left: None) -> AsyncIterator[int]:
    async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\nConnection: close\r\n\r\nhello over TLS")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0, ssl=authority.server("git.corp"))
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("site")
    make_index(root)
    make_archive(root / "debian", tmp_path_factory.mktemp("deb"))
    (root / "registry").mkdir()
    (root / "registry" / "left-pad").write_text('{"name": "left-pad"}\n')
    (root / "secret").write_text("outside the mirror")
    site = Site(root)
    with serving(site):
        yield site


@pytest.fixture(scope="module")
def node(site: Site, streams: tuple[int, int], tls_site: int, nothing_is_left: None) -> Iterator[embedded.Endpoint]:
    mirrors = (
        Mirror(
            name="pypi",
            kind=MirrorKind.PYPI,
            url=f"{site.url}/repo/simple/",
            headers={"X-Token": "the-operators-secret"},
        ),
        Mirror(name="npm", kind=MirrorKind.NPM, url=f"{site.url}/npm/"),
        Mirror(name="registry", kind=MirrorKind.NPM, url=f"{site.url}/registry/"),
        Mirror(name="debian", kind=MirrorKind.APT, url=f"{site.url}/debian/", suites=("stable",), trusted=True),
        Mirror(name="slow", url=f"http://127.0.0.1:{streams[0]}/"),
        Mirror(name="big", url=f"http://127.0.0.1:{streams[1]}/"),
        Mirror(name="git.corp", kind=MirrorKind.TUNNEL, url=f"https://127.0.0.1:{tls_site}"),
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
    assert (await client.capabilities()).mirrors == {
        "pypi": "pypi", "npm": "npm", "registry": "npm", "debian": "apt", "slow": "http", "big": "http", "git.corp": "tunnel",
        "dsec": "api",
    }  # fmt: skip


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
        many = {f"V{number}": "x" for number in range(10_000)}
        line += " $https_proxy $V9999"
        result = await sandbox.run_shell(line, env={**many, "http_proxy": "own"})
        assert result.text == "http://mine/ own http://127.0.0.1:18080 x\n"


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
    for line in ("exec 3<>/dev/tcp/1.1.1.1/53", "getent hosts files.example.org", "getent hosts pypi"):
        result = await sandbox.run_shell(line, timeout=20)
        assert not result.ok and result.timed_out is None and result.duration_s < 5, line


async def test_connections_of_a_rule_that_goes_are_cut(client: DSecClient, site: Site) -> None:
    async with client.run_container(DSecContainerRunArgs(BASE, network_rules={"slow": True, "pypi": True})) as sandbox:
        command = await sandbox.start("curl -sSN http://slow/; echo ended $?", merge_stderr=True)
        events = command.events()
        first = await anext(events)
        assert isinstance(first, dsec.Stdout) and first.data.startswith(b"begun")
        await sandbox.set_network({"pypi": True})
        result = await command.wait()
        assert "ended 18" in result.text or "ended 56" in result.text, result.text
        assert "403 Denied" in (await curl(sandbox, "http://slow/"))[0]
        assert "200 OK" in (await curl(sandbox, "http://pypi/repo/simple/tinyone/"))[0]


async def test_stalled_connections_hold_up_nothing_else(client: DSecClient) -> None:
    """Downloads that nobody reads fill their own credit: commands, files and other sandboxes go on."""
    rules = {"big": True, "pypi": True}
    async with client.run_container(DSecContainerRunArgs(BASE, network_rules=rules)) as sandbox:
        line = "for i in $(seq 40); do (curl -s --noproxy '' http://big/ | sleep 60) & done; wait"
        await sandbox.start(line)
        async with client.run_container(DSecContainerRunArgs(BASE, network_rules=rules)) as other:
            assert "200 OK" in (await curl(other, "http://pypi/repo/simple/tinyone/"))[0]
            for _ in range(3):
                await sandbox.files.write("/tmp/file", bytes(8 << 20))
                assert len(await sandbox.files.read("/tmp/file")) == 8 << 20
                assert "200 OK" in (await curl(other, "http://pypi/repo/simple/tinyone/"))[0]


async def test_apt_finds_its_mirror(client: DSecClient) -> None:
    async with client.run_container(DSecContainerRunArgs(BASE, network_rules={"debian": True})) as sandbox:
        result = await sandbox.run_shell(
            "apt-get update && apt-get install -y tinydeb && cat /usr/share/tinydeb", merge_stderr=True
        )
        assert result.ok and result.text.endswith("from the mirror\n"), result.text
        await sandbox.set_network({"pypi": True})
        result = await sandbox.run_shell("apt-get update; ls /etc/apt/sources.list.d", merge_stderr=True)
        assert "dsec" not in result.text


async def test_npm_asks_its_registry_by_the_same_settings(client: DSecClient) -> None:
    """What npm does with its settings: a request of the registry's URL through the proxy."""
    async with client.run_container(DSecContainerRunArgs(BASE, network_rules={"registry": True})) as sandbox:
        line = """curl -sS "$npm_config_registry"left-pad; . /etc/npmrc; curl -sS -x "$proxy" "$registry"left-pad"""
        assert (await sandbox.run_shell(line)).text == '{"name": "left-pad"}\n' * 2


async def test_https_end_to_end(client: DSecClient, authority: Authority) -> None:
    async with client.run_container(DSecContainerRunArgs(BASE, network_rules={"git.corp": True})) as sandbox:
        await sandbox.files.write("/ca.pem", authority.pem.read_text())
        text, _ = await curl(sandbox, "--cacert", "/ca.pem", "https://git.corp/hello")
        assert text.startswith("HTTP/1.1 200 Connection established") and text.endswith("hello over TLS")
        for other in ("files.example.org", "other.corp"):  # another name in TLS than in CONNECT
            line = f"openssl s_client -proxy 127.0.0.1:18080 -connect git.corp:443 -servername {other} </dev/null 2>&1"
            result = await sandbox.run_shell(f"command -v openssl >/dev/null && {line} || echo none")
            assert "access denied" in result.text or result.text.endswith("none\n"), result.text
        spoofed = await sandbox.run_shell(FORGED_SNI)
        assert spoofed.text == "refused\n", spoofed.text + spoofed.stderr_text
        assert any("SNI" in line for line in [line async for line in sandbox.logs()])


FORGED_SNI = """python3 - <<'END'
import socket, ssl
raw = socket.create_connection(("127.0.0.1", 18080))
raw.sendall(b"CONNECT git.corp:443 HTTP/1.1\\r\\nHost: git.corp:443\\r\\n\\r\\n")
assert b" 200 " in raw.recv(1000)
try:
    ssl.create_default_context(cafile="/ca.pem").wrap_socket(raw, server_hostname="other.corp")
except ssl.SSLError as error:
    print("refused" if "ACCESS_DENIED" in str(error) else error)
END"""


async def test_a_port_that_is_taken_inside_is_told_and_found_again(client: DSecClient) -> None:
    async with client.run_container(DSecContainerRunArgs(BASE)) as sandbox:
        server = await sandbox.start(["python3", "-m", "http.server", "--bind", "127.0.0.1", "18080"])
        await until(lambda: answers(sandbox, "http://127.0.0.1:18080/"))
        told = await sandbox.set_network({"pypi": True})
        assert "18080" in told.enforced["pypi"] and told.enforced["pypi"].startswith("refused: no proxy inside")
        await server.signal("KILL")
        await server.wait()
        await until(lambda: answers(sandbox, "http://pypi/repo/simple/tinyone/"))
        assert (await sandbox.info()).network.enforced == {"pypi": "allowed"}


async def answers(sandbox: Sandbox, url: str) -> bool:
    return (await sandbox.exec(["curl", "-sf", "-o", "/dev/null", url])).ok


async def test_a_paused_sandbox_has_its_network_when_it_is_resumed(client: DSecClient) -> None:
    async with client.run_container(DSecContainerRunArgs(BASE, network_rules={"pypi": True})) as sandbox:
        assert await answers(sandbox, "http://pypi/repo/simple/tinyone/")
        await sandbox.pause()
        assert (await sandbox.info()).network.mode == "proxy"
        assert await answers(sandbox, "http://pypi/repo/simple/tinyone/")
        await sandbox.pause()
        await sandbox.set_network({"pypi": False})
        assert not await answers(sandbox, "http://pypi/repo/simple/tinyone/")


async def test_a_restarted_edge_enforces_the_same(site: Site) -> None:
    """What runs inside goes on asking, and is answered by the rules of before, without a new command."""
    state = Path(tempfile.mkdtemp(prefix="dsec-", dir="/var/tmp"))
    try:
        endpoint = embedded.up(state, port=0, mirrors={"pypi": f"{site.url}/repo/simple/"})
        async with DSecClient(endpoint.url, Path(endpoint.key_file).read_text().strip()) as client:
            sandbox = await client.run(DSecContainerRunArgs(BASE, network_rules={"npm": True}))
            told = await sandbox.set_network({"pypi": True, "example.com": False})
            ask = "curl -s -o /dev/null -w '%{http_code}' $1"
            await sandbox.start(
                f"ask() {{ {ask}; }}; while :; do echo $(ask $PIP_INDEX_URL/tinyone/) $(ask http://example.com/) >/tmp/new;"
                " mv /tmp/new /tmp/last; sleep 0.05; done"
            )
            await until(lambda: last_is(sandbox, "200 403"))
            edge = next(process.pid for process in embedded.status(state).processes if process.role == "edge")
            kill(edge)
            await until(lambda: removed(sandbox, "/tmp/last"))  # when it was started again
            await until(lambda: last_is(sandbox, "200 403"))
            assert (await sandbox.info()).network == told
            changed = await sandbox.changes(include=("etc/**", "etc", "usr", "usr/**"))
            assert changed.changes == ()
    finally:
        embedded.down(state)
        shutil.rmtree(state)


async def removed(sandbox: Sandbox, path: str) -> bool:
    try:
        await sandbox.files.remove(path)
    except dsec.ConnectionLost:
        return False
    return True


async def last_is(sandbox: Sandbox, text: str) -> bool:
    try:
        return await sandbox.files.read_text("/tmp/last") == text + "\n"
    except FileNotFoundError:
        return False


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await holds():
            await asyncio.sleep(0.05)


def kill(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], 20)[0]
    finally:
        os.close(pidfd)


async def test_a_killed_proxy_is_replaced(sandbox: Sandbox, node: embedded.Endpoint) -> None:
    assert "200 OK" in (await curl(sandbox, "http://pypi/repo/simple/tinyone/"))[0]
    pid = proxy_of(node)
    kill(pid)
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
    held = {fd.name: os.readlink(fd) for fd in Path(f"/proc/{proxy_of(node)}/fd").iterdir()}
    files = {fd: what for fd, what in held.items() if not what.startswith(("socket:", "anon_inode:[eventpoll]"))}
    assert set(files) == {"2"} and files["2"].endswith("edge.log"), files
    assert len(held) < 12 and sum(what == held["0"] for what in held.values()) == 1, "nothing that the edge had"
    environment = Path(f"/proc/{proxy_of(node)}/environ").read_bytes()
    assert b"the-operators-secret" not in environment
