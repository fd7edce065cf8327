"""S3 services for the tests, as processes of their own: moto's server and rclone; and a peer that fails."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import boto3

from ebft_core.config import StorageConfig

KEY, SECRET = "test-key", "test-secret"
BUCKET = "bucket"
_SMALL = 1 << 20  # parts of a large upload carry no digest that rclone compares
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
RCLONE = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """The address of a fresh moto server."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    with _serving(command, port) as url:
        yield url


@contextlib.contextmanager
def rclone(folder: Path) -> Iterator[str]:
    """The address of rclone serving `folder`, whose sub-folders are the buckets; it checks signatures."""
    assert RCLONE is not None
    port = free_port()
    command = [RCLONE, "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}", "--vfs-cache-mode", "off"]
    with _serving([*command, "--auth-key", f"{KEY},{SECRET}", "--config", os.devnull], port) as url:
        yield url


@contextlib.contextmanager
def _serving(command: Sequence[str], port: int) -> Iterator[str]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            assert process.poll() is None, "the peer ended"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert time.monotonic() < deadline, "the peer does not answer"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=20)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def client(url: str):
    return boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id=KEY, aws_secret_access_key=SECRET
    )


def storage(url: str, **values: object) -> StorageConfig:
    return StorageConfig(endpoint_url=url, **values)  # type: ignore[arg-type]


class Faults:
    """A proxy in front of a peer that harms a share of the requests, each in one of these ways.

    503 without asking the peer; a reset; silence until the client gives up; the answer's body cut in the
    middle; one byte of it flipped, or of what is sent; where there is no body to harm, 500 although the peer
    has done what it was asked. `harmed` counts them by kind.

    Args:
        url: the peer.
        share: of the requests that are harmed.
        seed: of the choice.
        silence: seconds without an answer.
        checked: whether the peer notices a flipped byte in what is sent.
    """

    def __init__(self, url: str, share: float, seed: int, *, silence: float, checked: bool) -> None:
        self._peer = url.removeprefix("http://")
        self._share = share
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        kinds = ["503", "reset", "cut", "flip", "500 after the work", "stall"]
        self.harmed = dict.fromkeys([*kinds, "flip of what is sent"] if checked else kinds, 0)
        self._weights = [0.2 if kind == "stall" else 1.0 for kind in self.harmed]  # each costs its silence
        self.silence = silence
        self.requests = 0

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        faults = self

        class Handler(_Handler):
            owner = faults

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

        with Server(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}"
            finally:
                server.shutdown()

    def draw(self) -> str | None:
        with self._lock:
            self.requests += 1
            harm = self._random.random() < self._share
            return self._random.choices(list(self.harmed), self._weights)[0] if harm else None

    def count(self, kind: str) -> None:
        with self._lock:
            self.harmed[kind] += 1

    def ask(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """Hand a request on as it is: its signature covers the host it was sent to, so that stays too."""
        connection = http.client.HTTPConnection(self._peer, timeout=30)
        connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
        for name, value in handler.headers.items():
            if name.lower() not in ("connection", "expect"):
                connection.putheader(name, value)
        connection.endheaders(body or None)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, answer.getheaders(), content


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Faults

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that lost its patience
            super().handle()

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = self.owner.draw()
        if kind == "503":
            self.owner.count(kind)
            self._answer(503, [], b"")
            return
        if kind == "reset":
            self.owner.count(kind)
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            self.connection.close()
            return
        if kind == "stall":
            self.owner.count(kind)
            time.sleep(self.owner.silence)
            self.close_connection = True
            return
        if kind == "flip of what is sent" and 0 < len(body) < _SMALL:
            self.owner.count(kind)
            status, headers, content = self.owner.ask(self, _flipped(body))
            self._answer(status, headers, content)
            return
        status, headers, content = self.owner.ask(self, body)
        # A HEAD has no body, and an error's body is no data: there is nothing to harm.
        harmless = self.command != "GET" or status >= 300 or not content
        if kind == "cut" and not harmless:
            self.owner.count(kind)
            self._answer(status, headers, content, cut=len(content) // 2)
        elif kind == "flip" and not harmless:
            self.owner.count(kind)
            self._answer(status, headers, _flipped(content))
        elif kind is not None:
            self.owner.count("500 after the work")
            self._answer(500, [], b"")
        else:
            self._answer(status, headers, content)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

    def _answer(
        self, status: int, headers: Sequence[tuple[str, str]], content: bytes, cut: int | None = None
    ) -> None:
        lines = [f"HTTP/1.1 {status} X"]
        names = {name.lower() for name, _ in headers}
        lines += [f"{n}: {v}" for n, v in headers if n.lower() not in ("connection", "transfer-encoding")]
        if "content-length" not in names:
            lines.append(f"Content-Length: {len(content)}")
        lines.append("Connection: close")
        self.wfile.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        self.wfile.write(content if cut is None else content[:cut])
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        """Quiet."""
