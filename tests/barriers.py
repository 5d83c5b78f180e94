"""A proxy before an S3 server that sees what moment a job is in, by the objects that it puts.

It holds a request at the moment asked for until the caller has done what it wants, and cuts the connection if that was
a kill: what a dead process had begun to send never arrives. The job knows nothing of it.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

REQUEST = re.compile(rb"^(PUT|POST) (/\S+) HTTP")
MOMENTS = {  # of a put object's key: what the job is about to do
    "generation": re.compile(r"/responses/\w+/attempts/"),
    "capture": re.compile(r"/features/\w+/attempts/"),
    "upload": re.compile(r"/features/\w+/shards/"),
    "before commit": re.compile(r"/features/\w+/commits/"),
    "checkpoint": re.compile(r"/state/\d+\.safetensors"),
}


class Barriers:
    """Forwards connections to `endpoint`; calls `cut(moment, key)` while a request of that moment is held.

    "upload" and "checkpoint" are held with half of what has come of them sent on. "after commit" is held with the
    object there and the answer not yet given.
    """

    def __init__(self, endpoint: str, cut: Callable[[str, str], bool]) -> None:
        server = urlsplit(endpoint)
        self.server, self.cut = (server.hostname, server.port), cut
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self.server)
            except OSError:  # it is down
                client.close()
                continue
            committing: list[str] = []  # the key of the request that is on its way
            for source, sink, way in ((client, server, self._ask), (server, client, self._answer)):
                threading.Thread(target=self._pump, args=(source, sink, way, committing), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, way: Callable, committing: list[str]) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                way(data, sink, committing)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _ask(self, data: bytes, sink: socket.socket, committing: list[str]) -> None:
        if request := REQUEST.match(data):
            key = request[2].decode()
            for moment, pattern in MOMENTS.items():
                if pattern.search(key):
                    if moment == "before commit":
                        committing.append(key)
                    if moment in ("upload", "checkpoint"):
                        sink.sendall(data[: len(data) // 2])
                        data = data[len(data) // 2 :]
                    if self.cut(moment, key):
                        raise ConnectionError
        sink.sendall(data)

    def _answer(self, data: bytes, sink: socket.socket, committing: list[str]) -> None:
        if committing and data.startswith(b"HTTP/1.1 200") and self.cut("after commit", committing.pop()):
            raise ConnectionError
        sink.sendall(data)
