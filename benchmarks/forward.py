"""`dsec bench forward`: an HTTP request to a server in a sandbox, and 100 MB from it, through a forwarded port."""

from __future__ import annotations

import asyncio
import hashlib
import time

import aiohttp

from benchmarks import machine
from benchmarks.report import Promise, Report, percentile, result, show
from benchmarks.stage import run, stage
from dsec import LocalUrl, Sandbox

COUNT = 1000
PORT = 8000
SIZE = 100_000_000
_WARM_UP = 50
_RUNS = 5  # of the large download; the median counts

# A server that answers in one write, on kept connections; `/big` is as many bytes as it is asked for, made once.
SERVER = """
import hashlib, http.server, random, sys
big = random.Random(7).randbytes({size})
class Web(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    def do_GET(self):
        body = big if self.path == "/big" else b"hello"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", {port}), Web)
print(hashlib.sha256(big).hexdigest(), flush=True)
server.serve_forever()
"""


def main(*, count: int | None, against: tuple[str, ...], json: bool) -> bool:
    report, samples = run(_measure(count or COUNT))
    return show(report, json_output=json, pictures=(("request", samples),))


async def _measure(count: int) -> tuple[Report, list[float]]:
    described = machine.describe()
    async with stage(max_sandboxes=8) as place:
        floor, floor_speed = await _on_this_machine(count)
        async with place.client.run_container(place.environments.next().args()) as sandbox:
            digest = await _serve(sandbox)
            async with sandbox.forward(PORT) as url:
                samples = await _requests(url, count)
                speed = await _download(url, digest)
    results = (
        result("request_p50_ms", percentile(samples, 50), "ms", floor=percentile(floor, 50)),
        result("request_p99_ms", percentile(samples, 99), "ms", floor=percentile(floor, 99)),
        result("mb_per_s", speed, "MB/s", floor=floor_speed, promise=Promise("value", "least", 100)),
    )
    notes = (
        "requests one after another on one kept connection to a server of Python's http.server",
        f"{SIZE // 1_000_000} MB, compared by hash, median of {_RUNS}",
        "the floor is the same server on this machine, asked directly",
    )
    return Report("forward", described, results, notes), samples


async def _serve(sandbox: Sandbox) -> str:
    process = await sandbox.start(["python3", "-c", SERVER.format(size=SIZE, port=PORT)])
    async for event in process.events():
        return str(getattr(event, "data", b"").decode().strip())
    raise AssertionError("the server did not start")


async def _on_this_machine(count: int) -> tuple[list[float], float]:
    process = await asyncio.create_subprocess_exec(
        "python3", "-c", SERVER.format(size=SIZE, port=0).replace("print(", "print(server.server_port, ", 1),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port, digest = (await process.stdout.readline()).decode().split()
        url = LocalUrl.of("127.0.0.1", int(port))
        return await _requests(url, count), await _download(url, digest)
    finally:
        process.kill()
        await process.wait()


async def _requests(url: LocalUrl, count: int) -> list[float]:
    samples: list[float] = []
    async with aiohttp.ClientSession() as session:
        for number in range(-_WARM_UP, count):
            started = time.perf_counter()
            async with session.get(f"{url}/") as answer:
                if await answer.read() != b"hello":
                    raise AssertionError(f"HTTP {answer.status}")
            if number >= 0:
                samples.append((time.perf_counter() - started) * 1e3)
    return samples


async def _download(url: LocalUrl, digest: str) -> float:
    """MB/s of a client that does nothing but read; one more run is compared by hash."""
    speeds: list[float] = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        size = await _read(url, None)
        speeds.append(size / 1e6 / (time.perf_counter() - started))
        if size != SIZE:
            raise AssertionError(f"{size} bytes instead of {SIZE}")
    found = hashlib.sha256()
    await _read(url, found)
    if found.hexdigest() != digest:
        raise AssertionError("what came is not what was sent")
    return percentile(speeds, 50)


async def _read(url: LocalUrl, into: hashlib._Hash | None) -> int:
    reader, writer = await asyncio.open_connection(url.host, url.port, limit=1 << 20)
    writer.write(b"GET /big HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    size = 0
    while data := await reader.read(1 << 20):
        size += len(data)
        if into is not None:
            into.update(data)
    writer.close()
    return size
