"""The store's transfers on S3 against boto3's, and against more of themselves: a part of `benchmarks/store.py`.

A real server, SeaweedFS on loopback, takes and gives one file. Each side moves it in parts of one size, as many at a
time, in turns; both sign and both send checksums. Server and client share the machine, so on few cores the numbers say
what a byte costs them together. A ratio above 1: ours is the faster.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import boto3
import psutil
from boto3.s3.transfer import TransferConfig

from eagle3_ray.store import s3
from eagle3_ray.store.filesystem import Filesystem

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from seaweed import Server, serve  # noqa: E402


class Boto3:
    """One file by boto3's transfer manager."""

    def __init__(self, server: Server) -> None:
        options = server.storage_options
        self.bucket = server.bucket
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=options["endpoint_url"],
            aws_access_key_id=options["key"],
            aws_secret_access_key=options["secret"],
        )
        part = s3.PART_BYTES
        self.config = TransferConfig(
            multipart_threshold=part, multipart_chunksize=part, max_concurrency=s3.PARTS_AT_ONCE
        )

    def upload(self, path: Path, key: str) -> None:
        self.client.upload_file(str(path), self.bucket, key, Config=self.config)

    def download(self, key: str, path: Path) -> None:
        self.client.download_file(self.bucket, key, str(path), Config=self.config)


def s3_put_vs_boto3(server: Server, file: Path, repeats: int) -> dict[str, Any]:
    ours, theirs = Filesystem(f"s3://{server.bucket}", server.storage_options), Boto3(server)
    return _compare("put", file, repeats, lambda: ours.upload(file, "a"), lambda: theirs.upload(file, "b"))


def s3_get_vs_boto3(server: Server, file: Path, repeats: int) -> dict[str, Any]:
    ours, theirs = Filesystem(f"s3://{server.bucket}", server.storage_options), Boto3(server)
    ours.upload(file, "a")
    back = file.with_suffix(".back")
    result = _compare("get", file, repeats, lambda: ours.download("a", back), lambda: theirs.download("a", back))
    assert back.stat().st_size == file.stat().st_size
    back.unlink()
    return result


def put_scaling(server: Server, file: Path, repeats: int, processes: int = 4) -> dict[str, Any]:
    """Bytes a second of `processes` uploaders over one, and how busy the machine was with each."""
    rates: dict[int, list[float]] = {1: [], processes: []}
    busy: dict[int, list[float]] = {1: [], processes: []}
    for _ in range(repeats):
        for count in rates:
            with _uploaders(server, file, count) as (begin, end):
                psutil.cpu_percent()
                begin.wait()
                start = time.monotonic()
                end.wait()
                rates[count].append(count * file.stat().st_size / (time.monotonic() - start))
                busy[count].append(psutil.cpu_percent())
    medians = {count: statistics.median(values) for count, values in rates.items()}
    loads = {count: round(statistics.median(values)) for count, values in busy.items()}
    print(f"put by processes: { ({c: f'{m / 1e6:.0f} MB/s, CPUs {loads[c]}% busy' for c, m in medians.items()}) }")
    bound = f"{os.cpu_count()} CPUs with the server on them: {loads[1]}% busy with one, {loads[processes]}% with all"
    return {"put_scaling": round(medians[processes] / medians[1], 2), "put_scaling_bound": bound}


@contextmanager
def _uploaders(server: Server, file: Path, count: int) -> Iterator[tuple[Barrier, Barrier]]:
    """Processes that are connected, begin together, and say when all have ended."""
    context = multiprocessing.get_context("spawn")
    begin, end = context.Barrier(count + 1), context.Barrier(count + 1)
    given = (f"s3://{server.bucket}", server.storage_options, file, begin, end)
    started = [context.Process(target=_upload, args=(*given, f"scale/{i}")) for i in range(count)]
    for process in started:
        process.start()
    yield begin, end
    for process in started:
        process.join()


def _upload(root: str, options: dict[str, Any], file: Path, begin: Barrier, end: Barrier, key: str) -> None:
    files = Filesystem(root, options)
    files.write(f"{key}.warm", b"x")
    begin.wait()
    files.upload(file, key)
    end.wait()


def _compare(
    name: str, file: Path, repeats: int, ours: Callable[[], None], theirs: Callable[[], None]
) -> dict[str, Any]:
    """boto3's time over ours, of `repeats` in turns after one of each that is not counted."""
    times: dict[str, list[float]] = {"ours": [], "boto3": []}
    for i in range(repeats + 1):
        for side, move in sorted({"ours": ours, "boto3": theirs}.items(), reverse=bool(i % 2)):
            start = time.monotonic()
            move()
            if i:
                times[side].append(time.monotonic() - start)
    rates = {side: [round(file.stat().st_size / seconds / 1e6) for seconds in found] for side, found in times.items()}
    print(f"{name}: MB/s {rates}")
    return {f"s3_{name}_vs_boto3": round(statistics.median(times["boto3"]) / statistics.median(times["ours"]), 2)}


def transfers(mib: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="eagle3-ray-") as folder, serve(Path(folder, "server")) as server:
        file = Path(folder, "shard")
        with file.open("wb") as out:
            for _ in range(mib):
                out.write(os.urandom(2**20))
        return {
            **s3_put_vs_boto3(server, file, repeats),
            **s3_get_vs_boto3(server, file, repeats),
            **put_scaling(server, file, max(3, repeats // 2)),
        }
