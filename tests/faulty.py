"""An HTTP proxy on loopback that does to chosen requests what networks and servers do to some."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

CODES = {503: "SlowDown", 500: "InternalError", 429: "TooManyRequests", 409: "ConditionalRequestConflict"} | {
    403: "AccessDenied",
    507: "XMinioStorageFull",
}
HOP = {"connection", "expect", "transfer-encoding", "keep-alive"}  # headers that go no further than one connection


@dataclass
class Fault:
    """What happens to the next `times` requests whose 'METHOD /path?query' holds `match`, after `skip` of them.

    kind: a status to answer with, or reset | deaf (never reads) | half-request | lost (served, but not answered) |
    half-answer | stall (half an answer, then silence) | flip-request | flip-answer, or a function called before.
    """

    kind: int | str | Callable[[], None]
    match: str = ""
    times: int = 1
    skip: int = 0


@dataclass
class Proxy:
    target: str
    endpoint: str = ""
    faults: list[Fault] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)  # every request, as 'METHOD /path?query'
    headers: list[dict[str, str]] = field(default_factory=list)  # of each
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, kind: int | str | Callable[[], None], match: str = "", times: int = 1, skip: int = 0) -> None:
        self.faults.append(Fault(kind, match, times, skip))

    def next(self, request: str, headers: dict[str, str]) -> int | str | Callable[[], None]:
        with self.lock:
            self.seen.append(request)
            self.headers.append(headers)
            for fault in self.faults:
                if fault.match in request and fault.times:
                    if not fault.skip:
                        fault.times -= 1
                        return fault.kind
                    fault.skip -= 1
        return ""


@contextmanager
def faulty(target: str) -> Iterator[Proxy]:
    proxy = Proxy(target)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": proxy}))
    server.daemon_threads, server.block_on_close = True, False
    proxy.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.over.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None: ...

    def handle_expect_100(self) -> bool:
        return True  # answered below, where the body is read

    def serve(self) -> None:
        kind = self.proxy.next(f"{self.command} {self.path}", dict(self.headers))
        if kind == "reset":
            return self._close()
        if kind == "deaf":
            self.proxy.over.wait()
            return self._close()
        if "Expect" in self.headers:
            self.send_response_only(100)
            self.end_headers()
        body = bytearray(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if isinstance(kind, int):
            xml = f"<Error><Code>{CODES[kind]}</Code><Message>a fault of the test</Message></Error>".encode()
            return self._answer(kind, {"Content-Length": str(len(xml))}, b"" if self.command == "HEAD" else xml)
        if callable(kind):
            kind()
        if kind == "flip-request":
            body[len(body) // 2] ^= 1
        try:
            status, headers, answer = self._forward(body, half=kind == "half-request")
        except (OSError, http.client.HTTPException):  # half a request was sent, or the server is away
            return self._close()
        if kind == "lost":
            return self._close()
        if kind in ("half-answer", "stall"):
            self._answer(status, headers, answer[: len(answer) // 2])
            if kind == "stall":
                self.proxy.over.wait()
            return self._close()
        if kind == "flip-answer":
            answer[len(answer) // 2] ^= 1
        self._answer(status, headers, answer)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = serve  # noqa: N815

    def _forward(self, body: bytearray, half: bool) -> tuple[int, dict[str, str], bytearray]:
        connection = http.client.HTTPConnection(urlsplit(self.proxy.target).netloc, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in HOP:
                    connection.putheader(name, value)
            connection.endheaders(bytes(body[: len(body) // 2] if half else body))
            if half:
                raise ConnectionError
            response = connection.getresponse()
            headers = {name: value for name, value in response.getheaders() if name.lower() not in HOP}
            answer = bytearray(response.read())
        finally:
            connection.close()
        if self.command != "HEAD" and response.status not in (204, 304):
            headers = {n: v for n, v in headers.items() if n.lower() != "content-length"}
            headers["Content-Length"] = str(len(answer))
        return response.status, headers, answer

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def _close(self) -> None:
        """By a reset: nothing more comes, and what was not read is lost."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
