"""Runs inside a sandbox: one server of each kind that the tests of ports need, with the standard library alone."""

from __future__ import annotations

import base64
import hashlib
import http.server
import socket
import socketserver
import struct
import threading

HTTP, ECHO, EARLY, DEAF, POUR, POURED, WEBSOCKET = range(8000, 8007)
poured = 0


class Web(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        self.answer(f"GET {self.path}")

    def do_POST(self) -> None:
        size = len(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(f"POST {self.path} {size}")

    def log_message(self, format: str, *args: object) -> None:
        pass


def echo(sock: socket.socket) -> None:
    while data := sock.recv(65536):
        sock.sendall(data)


def early(sock: socket.socket) -> None:
    sock.recv(1)
    sock.sendall(b"early")


def deaf(sock: socket.socket) -> None:
    threading.Event().wait()


def pour(sock: socket.socket) -> None:
    global poured
    poured = 0
    while True:
        poured += sock.send(bytes(65536))


def count(sock: socket.socket) -> None:
    sock.sendall(str(poured).encode())


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def websocket(sock: socket.socket) -> None:
    """Echoes binary messages that come in one frame."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += sock.recv(4096)
    key = next(line.split(b": ")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key"))
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    sock.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                 b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n")  # fmt: skip
    while True:
        first, size = exactly(sock, 2)
        size &= 127
        if size >= 126:
            size = struct.unpack(">H" if size == 126 else ">Q", exactly(sock, 2 if size == 126 else 8))[0]
        mask, data = exactly(sock, 4), exactly(sock, size)
        data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
        length = struct.pack("B", size) if size < 126 else struct.pack(">BH" if size < 65536 else ">BQ",
                                                                      126 if size < 65536 else 127, size)  # fmt: skip
        sock.sendall(bytes((first,)) + length + data)
        if first & 15 == 8:
            return


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 512


def serve(port: int, work: object) -> None:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            try:
                work(self.request)  # type: ignore[operator]
            except (OSError, EOFError) as error:
                with open("/srv/log", "a") as log:
                    log.write(f"{port}: {type(error).__name__}\n")

    threading.Thread(target=Server(("", port), Handler).serve_forever, daemon=True).start()


with open("/srv/log", "w"):
    pass
for port, work in ((ECHO, echo), (EARLY, early), (DEAF, deaf), (POUR, pour), (POURED, count), (WEBSOCKET, websocket)):
    serve(port, work)
web = http.server.ThreadingHTTPServer(("", HTTP), Web)
print("ready", flush=True)
web.serve_forever()
