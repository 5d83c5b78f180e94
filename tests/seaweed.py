"""A real S3 server for tests: SeaweedFS in one process of ours, on free ports, gone at the end."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import s3fs


@dataclass(frozen=True)
class Server:
    endpoint: str
    bucket: str
    storage_options: dict[str, Any]  # for Filesystem and fsspec
    restart: Callable[[], None]  # killed, and started again with its data


@contextmanager
def serve(folder: Path, bucket: str = "store", start_s: float = 60) -> Iterator[Server]:
    """Run a server that keeps its data in `folder` (empty), with one bucket made."""
    keys = {"accessKey": uuid4().hex, "secretKey": uuid4().hex}
    identity = {"name": "test", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "data").mkdir(parents=True)
    (folder / "identities.json").write_text(json.dumps({"identities": [identity]}))
    master, volume, filer, s3 = _free_ports(4)
    command = [
        shutil.which("weed") or str(Path(sys.executable).parent / "weed"),
        *("-logtostderr=true", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-master.port={master}", "-master.telemetry=false", "-master.volumeSizeLimitMB=1024"),
        *(f"-volume.port={volume}", "-volume.max=32", "-volume.preStopSeconds=1", "-filer", f"-filer.port={filer}"),
        *("-s3", f"-s3.port={s3}", "-s3.ip.bind=127.0.0.1", f"-s3.config={folder / 'identities.json'}"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"),
    ]
    endpoint = f"http://127.0.0.1:{s3}"
    options = {"endpoint_url": endpoint, "key": keys["accessKey"], "secret": keys["secretKey"]}
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        with open(folder / "weed.log", "ab") as log:
            running.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=folder))
        _wait(running[-1], endpoint, options, bucket, time.monotonic() + start_s, folder / "weed.log")

    def stop() -> None:
        running[-1].kill()  # its orderly end takes longer than ten seconds
        running[-1].wait()

    try:
        start()
        yield Server(endpoint, bucket, options, lambda: (stop(), start())[1])
    finally:
        stop()


def _wait(
    process: subprocess.Popen[bytes], endpoint: str, options: dict[str, Any], bucket: str, until: float, log: Path
) -> None:
    """Return when the server answers and its bucket takes an object; a healthy answer alone comes before that."""
    error: Exception | None = None
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(f"{endpoint}/healthz", timeout=2).close()
            s3 = s3fs.S3FileSystem(**options, skip_instance_cache=True, use_listings_cache=False)
            if not s3.exists(bucket):
                s3.mkdir(bucket)
            s3.pipe_file(f"{bucket}/started", b"yes")
            s3.rm_file(f"{bucket}/started")
            return
        except Exception as seen:
            error = seen
            time.sleep(0.2)
    raise RuntimeError(f"SeaweedFS did not start (exit {process.poll()}, {error!r}):\n{log.read_text()[-3000:]}")


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, and whose gRPC twins (10000 higher) are too; all below 32768, where outgoing
    connections of others begin, one of which may take a port before the server does."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(20000, 22768)
        if port not in found and _is_free(port) and _is_free(port + 10000):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
