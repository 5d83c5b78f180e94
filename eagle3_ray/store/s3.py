"""Objects of an S3 bucket through s3fs, request by request: each has a time limit, a checksum and tries of its own.

A large object goes up in parts and comes down in ranges, several at a time, and no more of it than those is in memory.
s3fs's own transfers hold ten parts of 50 MB, start the next ten when the last of them is done, and give up all of an
object for one part.
"""

from __future__ import annotations

import hashlib
import logging
import os
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import botocore.exceptions as botocore
import fsspec
from botocore.parsers import ResponseParserError
from fsspec.asyn import sync
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

PART_BYTES = 8 * 2**20
PARTS_AT_ONCE = 8
PIECE_BYTES = 2**18
MOST_PARTS = 10_000  # that S3 allows
CONNECT_S = 10.0
SILENCE_S = 30.0  # between two bytes of an answer
REQUEST_S = 120.0  # a request in all: nothing else ends one that the server stops reading. 0.6 MB/s suffice
WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # between tries: random, up to this; the first and any
FULL = {"InsufficientStorage", "XMinioStorageFull", "QuotaExceeded"}
AGAIN = {
    *("SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded"),
    *("RequestTimeout", "InternalError", "ServiceUnavailable"),
    *("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"),  # damaged on the way
    *("ConditionalRequestConflict", "OperationAborted"),  # two creations at once: neither is there yet
}
BROKEN = (
    *(ConnectionError, TimeoutError, aiohttp.ClientError, botocore.ConnectionError, botocore.HTTPClientError),
    *(botocore.FlexibleChecksumError, ResponseParserError),
)

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class S3:
    """A connection, opened at the first request. `patience_s`: how long a request is tried again after its first try.

    Only tenacity tries again, for botocore's own retries (off here, as are s3fs's) end with the answer's headers: they
    see neither a body that breaks off nor a server that stops reading, and each layer would multiply the other's tries.
    """

    def __init__(self, options: dict[str, Any], patience_s: float, told: Callable[[BaseException], str]) -> None:
        # Content-MD5 is the one checksum that every S3 knows and verifies; botocore's default, a CRC32 that follows the
        # body in chunks, is refused by some.
        config = {
            "connect_timeout": CONNECT_S,
            "read_timeout": SILENCE_S,
            "max_pool_connections": 4 * PARTS_AT_ONCE,
            "retries": {"total_max_attempts": 1},
            "request_checksum_calculation": "when_required",
            **options.get("config_kwargs", {}),
        }
        # Both caches off: a listing must be true now, and a second connection must read its own credentials.
        options = {"skip_instance_cache": True, "use_listings_cache": False, **options, "config_kwargs": config}
        self.fs = fsspec.filesystem("s3", **options)
        self.fs.retries = 1
        self.patience_s, self.told = patience_s, told

    def get(self, url: str, start: int | None = None, end: int | None = None) -> bytes:
        """The object, or a range of it; one request."""
        return self._tried(lambda: self.fs.cat_file(url, start=start, end=end, max_concurrency=1, timeout=REQUEST_S))

    def put(self, url: str, data: bytes, create: bool = False) -> None:
        """The object as one request; with `create`, OSError where there is one already."""
        self._put("put_object", url, data, **({"IfNoneMatch": "*"} if create else {}))

    def send(self, url: str, size: int, read: Callable[[int, int], bytes]) -> None:
        """The object from `read(start, end)`, in parts if it is large. It appears whole or not at all."""
        part = max(PART_BYTES, -(-size // MOST_PARTS))
        if size <= part:
            return self.put(url, read(0, size))
        upload = self._begin(url)

        def send_part(number: int) -> dict[str, Any]:
            data = read(number * part, min((number + 1) * part, size))
            sent = self._put("upload_part", url, data, UploadId=upload, PartNumber=number + 1)
            return {"PartNumber": number + 1, "ETag": sent["ETag"]}

        try:
            with ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
                parts = list(pool.map(send_part, range(-(-size // part))))
            try:
                self._call("complete_multipart_upload", url, UploadId=upload, MultipartUpload={"Parts": parts})
            except FileNotFoundError:  # no such upload: an earlier try may have arrived, its answer lost
                if self.size(url) != size:
                    raise
        except BaseException:
            with suppress(Exception):  # after the last part has ended: one that came later would stay for ever
                self._call("abort_multipart_upload", url, UploadId=upload)
            raise

    def _begin(self, url: str) -> str:
        """The id of a new upload in parts. One whose answer was lost has an id that nobody knows: it is given up."""
        began = 0

        def begin() -> str:
            nonlocal began
            began += 1
            return self.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key, timeout=REQUEST_S)["UploadId"]

        bucket, key, _ = self.fs.split_path(url)
        upload = self._tried(begin)
        if began > 1:
            with suppress(Exception):  # listing them needs a right of its own
                found = self.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads", [])
                for other in found:
                    if other["Key"] == key and other["UploadId"] != upload:
                        self._call("abort_multipart_upload", url, UploadId=other["UploadId"])
        return upload

    def download(self, url: str, path: Path) -> None:
        """The object into a local file, in ranges, at its size from the start."""
        size = self.size(url)
        with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(PARTS_AT_ONCE) as pool:
            file.truncate(size)

            def fetch(start: int) -> None:
                given = (self._fetch, url, file.fileno(), start, min(start + PART_BYTES, size))
                self._tried(lambda: sync(self.fs.loop, *given, timeout=REQUEST_S))

            for _ in pool.map(fetch, range(0, size, PART_BYTES)):
                pass

    async def _fetch(self, url: str, file: int, start: int, end: int) -> None:
        """A range into an open file, piece by piece: joined in memory first, it takes twice the CPU time."""
        bucket, key, _ = self.fs.split_path(url)
        answer = await self.fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
        async with answer["Body"] as body:
            while start < end and (piece := await body.read(PIECE_BYTES)):
                while piece:  # a write to a disk that is nearly full may be short
                    written = os.pwrite(file, piece, start)
                    piece, start = piece[written:], start + written
        if start != end:
            raise OSError(f"the range ends {end - start} bytes early or late")

    def size(self, url: str) -> int:
        return self._call("head_object", url)["ContentLength"]

    def find(self, url: str) -> dict[str, dict[str, Any]]:
        """What lies below, at any depth, by its name from the bucket's on."""
        return self._tried(lambda: self.fs.find(url, detail=True))

    def delete(self, url: str) -> None:
        self._call("delete_object", url)

    def _put(self, method: str, url: str, data: bytes, **more: Any) -> dict[str, Any]:
        """`data` with its checksum, which is made here: in a thread of the caller's, not in the one of all requests."""
        md5 = b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        return self._call(method, url, Body=data, ContentMD5=md5, **more)

    def _call(self, method: str, url: str, **arguments: Any) -> dict[str, Any]:
        bucket, key, _ = self.fs.split_path(url)
        return self._tried(lambda: self.fs.call_s3(method, Bucket=bucket, Key=key, timeout=REQUEST_S, **arguments))

    def _tried(self, call: Callable[[], Result]) -> Result:
        tries = Retrying(
            retry=retry_if_exception(is_transient),
            stop=stop_after_delay(self.patience_s),
            wait=wait_random_exponential(WAIT_S, max=LONGEST_WAIT_S),
            before_sleep=self._say,
            reraise=True,
        )
        return tries(call)

    def _say(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if error and state.attempt_number > 1:  # once is nothing
            logger.warning("the store failed %d times, trying again: %s", state.attempt_number, self.told(error))


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: not for a wrong secret, a missing bucket, no access, a full disk."""
    cause = error.__cause__  # s3fs makes an OSError of what the server answered
    if isinstance(cause, botocore.ClientError):
        code = cause.response["Error"].get("Code", "")
        status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return code in AGAIN or status == 429 or (status >= 500 and status not in (501, 507) and code not in FULL)
    if isinstance(error, botocore.SSLError):  # a certificate
        return False
    return isinstance(error, BROKEN)
