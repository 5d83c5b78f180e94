"""An HTTP proxy on loopback that does to chosen requests what networks and servers do to some."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

CODES = {403: "AccessDenied", 404: "NoSuchUpload", 409: "ConditionalRequestConflict", 429: "TooManyRequests"}
CODES |= {500: "InternalError", 503: "SlowDown", 507: "XMinioStorageFull"}
HOP = {"connection", "expect", "transfer-encoding", "keep-alive"}  # headers that go no further than one connection


@dataclass
class Proxy:
    target: str
    endpoint: str = ""
    faults: list[dict[str, Any]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)  # every request, as 'METHOD /path?query'
    headers: list[dict[str, str]] = field(default_factory=list)  # of each
    over: threading.Event = field(default_factory=threading.Event)

    def fail(self, kind: int | str | Callable[[], None], match: str = "", times: int = 1, skip: int = 0) -> None:
        """Do it to `times` of the requests in whose 'METHOD /path?query' the expression `match` is found, after `skip`
        of them.

        kind: a status to answer with, or expired (403 as of old credentials) | reset | deaf (never reads) |
        half-request | lost (served, not answered) | half-answer | stall (half an answer, then silence) | flip-request |
        flip-answer | wrong-etag, or a function called first.
        """
        self.faults.append({"kind": kind, "match": match, "times": times, "skip": skip})

    def left(self) -> int:
        return sum(fault["times"] for fault in self.faults)

    def next(self, request: str, headers: dict[str, str]) -> Any:
        self.seen.append(request)
        self.headers.append(headers)
        for fault in self.faults:
            if re.search(fault["match"], request) and fault["times"]:
                counted = "skip" if fault["skip"] else "times"
                fault[counted] -= 1
                if counted == "times":
                    return fault["kind"]


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


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"
    log_message = lambda *args: None  # noqa: E731

    def serve(self) -> None:
        kind = self.proxy.next(f"{self.command} {self.path}", dict(self.headers))
        if kind in ("reset", "deaf"):
            return self._close(wait=kind == "deaf")
        body = bytearray(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if isinstance(kind, int) or kind == "expired":
            kind, code = (403, "ExpiredToken") if kind == "expired" else (kind, CODES[kind])
            xml = f"<Error><Code>{code}</Code><Message>a fault of the test</Message></Error>".encode()
            return self._answer(kind, {"Content-Length": str(len(xml))}, b"" if self.command == "HEAD" else xml)
        if callable(kind):
            kind()
        if kind == "flip-request":
            body[len(body) // 2] ^= 1
        try:
            status, headers, answer = self._forward(bytes(body), half=kind == "half-request")
        except (OSError, http.client.HTTPException):  # half a request was sent, or the server is away
            return self._close()
        if kind == "lost":
            return self._close()
        if kind == "flip-answer":
            answer[len(answer) // 2] ^= 1
        if kind == "wrong-etag":
            headers = {name: value for name, value in headers.items() if name.lower() != "etag"}
            headers["ETag"] = '"' + 32 * "0" + '"'
        if kind not in ("half-answer", "stall"):
            return self._answer(status, headers, answer)
        self._answer(status, headers, answer[: len(answer) // 2])
        self._close(wait=kind == "stall")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = serve

    def _forward(self, body: bytes, half: bool) -> tuple[int, dict[str, str], bytearray]:
        connection = http.client.HTTPConnection(urlsplit(self.proxy.target).netloc, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
        connection.request(self.command, self.path, body[: len(body) // 2] if half else body, headers)
        if half:
            connection.close()
        response = connection.getresponse()
        answer = bytearray(response.read())
        headers = {name: value for name, value in response.getheaders() if name.lower() not in HOP}
        connection.close()
        return response.status, headers if "Content-Length" in headers else headers | {"Content-Length": "0"}, answer

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _close(self, wait: bool = False) -> None:
        """By a reset: nothing more comes, and what was not read is lost."""
        if wait:
            self.proxy.over.wait()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
