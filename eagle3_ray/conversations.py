"""Public chat formats -> conversations -> token ids.

A conversation keeps what was said to the model: an optional system message and the user's turns. The corpus's own
answers, where it has any, are dropped, since the target answers every turn itself. What the engine needs is made once,
with the target's chat template: the *segments* of ids before each answer. Segment 0 is the prompt of the first answer;
segment k is what stands between answer k-1 and answer k, and begins with the template's end-of-turn token. Joining
segments and generated ids (`join`) never tokenises an answer again.

Whatever one record holds, it becomes a conversation or a BadRecord; only a file that cannot be read ends the corpus.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import fsspec

from eagle3_ray.config import ConfigError, PromptsConfig
from eagle3_ray.secrets import blotted

ANSWER = "\ue000answer\ue000"  # stands where the template puts an answer; private-use characters, in no real text
SPOKEN = ("messages", "conversations", "prompt", "turns", "question", "problem")  # the first that is there counts
NAMES, DOMAINS = ("id", "question_id", "task_id"), ("domain", "category", "subject")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
LONGEST_LINE = 64 * 2**20  # bytes of a JSONL file that are held at a time
LONGEST_NAME = 1000  # characters of an id or a domain, which every commit repeats
LONGEST_REASON = 200  # characters
MOST_TURNS = 1000  # of the user: the template renders the whole history for each


class BadRecord(ValueError):
    """A record that cannot be used; the message is its reason, as one short line that can be printed and stored."""

    def __init__(self, reason: str) -> None:
        text = reason[: LONGEST_REASON + 1].encode(errors="backslashreplace").decode()
        line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        super().__init__(line if len(line) <= LONGEST_REASON else f"{line[: LONGEST_REASON - 1]}…")


@dataclass(frozen=True)
class Conversation:
    """What is said to the target. `messages`, (role, content): at most one system message, then user messages only."""

    id: str
    domain: str
    messages: tuple[tuple[str, str], ...]


def read_records(prompts: PromptsConfig, storage_options: dict[str, Any] | None = None) -> Iterator[Any]:
    """Yield the corpus's raw records, at most `prompts.limit`; a BadRecord in place of one that cannot be read.

    `prompts.source` is a JSONL (optionally gzipped) or Parquet file or glob, local or on any fsspec URL, or else a
    name or folder that `datasets.load_dataset` takes. Raises ConfigError when there is nothing to read, and for a file
    that is damaged.
    """
    source, count = prompts.source, 0
    file = source.startswith(("~", "/", ".")) or source.endswith((".jsonl", ".jsonl.gz", ".parquet")) or "://" in source
    if file and not os.path.isdir(os.path.expanduser(source)):
        records = _read_files(source, storage_options or {})
    else:
        records = _read_dataset(source, prompts.subset, prompts.split)
    for record in records:
        if prompts.limit is not None and count >= prompts.limit:
            break
        count += 1
        yield record
    if count == 0:
        raise ConfigError(f"prompts.source: no record in {source!r}")


def _read_files(source: str, storage_options: dict[str, Any]) -> Iterator[Any]:
    from pyarrow import ArrowException

    if "://" in source:
        files, root = fsspec.core.url_to_fs(source, use_listings_cache=False, **storage_options)
        names = sorted(files.glob(root)) if glob.has_magic(root) else [root]
    else:
        files, root = fsspec.filesystem("file"), os.path.expanduser(source)
        names = sorted(glob.glob(root)) if glob.has_magic(root) else [root]
    names = [name for name in names if files.isfile(name)]
    if not names:
        raise ConfigError(f"prompts.source: no file at {source!r}")
    for name in names:
        try:
            with files.open(name, "rb") as raw:
                yield from _read_parquet(raw, name) if name.endswith(".parquet") else _read_lines(raw, name)
        except (OSError, EOFError, zlib.error, ArrowException) as error:
            raise ConfigError(f"prompts.source: {name!r} cannot be read to its end: {error}") from None


def _read_lines(raw: Any, name: str) -> Iterator[Any]:
    file: Any = gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else io.BufferedReader(raw)
    number = 0
    while line := file.readline(LONGEST_LINE):  # split on b"\n" alone: texts hold other line breaks
        number += 1
        where = f"{blotted(os.path.basename(name))} line {number}"
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)
            yield BadRecord(f"{where} is longer than {LONGEST_LINE} bytes")
        elif line.strip():
            try:
                yield json.loads(line.rstrip(b"\r\n"))
            except RecursionError:
                yield BadRecord(f"{where} is nested too deep")
            except ValueError as error:
                yield BadRecord(f"{where} is not JSON: {error}")


def _read_parquet(raw: Any, name: str) -> Iterator[Any]:
    import pyarrow.parquet

    number = 0
    for batch in pyarrow.parquet.ParquetFile(raw).iter_batches(batch_size=1024):
        try:
            yield from batch.to_pylist()
        except Exception:  # of one value, e.g. of text that is not UTF-8
            for i in range(len(batch)):
                yield _row(batch.slice(i, 1), f"{os.path.basename(name)} row {number + i + 1}")
        number += len(batch)


def _row(batch: Any, where: str) -> Any:
    try:
        return batch.to_pylist()[0]
    except Exception as error:
        return BadRecord(f"{where} cannot be read: {error}")


def _read_dataset(name: str, subset: str | None, split: str) -> Iterator[Any]:
    import datasets

    try:
        yield from datasets.load_dataset(os.path.expanduser(name), subset, split=split, streaming=True)
    except Exception as error:  # of its readers and of the hub, each with errors of its own
        raise ConfigError(f"prompts.source: neither a file nor a readable data set: {name!r}: {error}") from None


def parse(record: Any) -> Conversation:
    """One raw record as a conversation, or BadRecord.

    A record has OpenAI's `messages`, ShareGPT's `conversations`, a `prompt`, or, as benchmarks have it, a `prompt` or
    `turns` of several user turns (MT-Bench), a `question` (GSM8K) or a `problem` (MATH).
    """
    if isinstance(record, BadRecord):
        raise record
    if not isinstance(record, dict):
        raise BadRecord(f"a record must be an object, not {type(record).__name__}")
    said = next((name for name in SPOKEN if record.get(name)), "")
    turns = record.get(said)
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    if not isinstance(turns, list):
        raise BadRecord(f"no {', '.join(SPOKEN[:-1])} or {SPOKEN[-1]}")
    if said not in ("messages", "conversations"):  # where a mere string has no speaker
        turns = [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in turns]
    messages: list[tuple[str, str]] = []
    for turn in turns:
        role, text = _role_and_text(turn)
        if role == "system" and messages:
            raise BadRecord("a system message after the start")
        if role != "assistant":
            messages.append((role, text))
    if not any(role == "user" for role, _ in messages):
        raise BadRecord("no user message")
    if sum(role == "user" for role, _ in messages) > MOST_TURNS:
        raise BadRecord(f"more than {MOST_TURNS} user messages")
    digest = hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]
    name, domain = _label(record, NAMES) or digest, _label(record, DOMAINS) or "none"
    for text in (name, domain, *(content for _, content in messages)):
        _encodable(text)
    return Conversation(name, domain, tuple(messages))


def _label(record: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    """The first that the record has, as text."""
    key = next((key for key in keys if record.get(key)), None)
    if key is None:
        return None
    value = record[key]
    if isinstance(value, (list, dict, bytes)) or value != value:  # nan is not itself
        raise BadRecord(f"{key} is neither text nor a number")
    if len(text := str(value)) > LONGEST_NAME:
        raise BadRecord(f"{key} has more than {LONGEST_NAME} characters")
    return text


def _encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRecord("text with a lone surrogate, which is no character") from None


def _role_and_text(turn: Any) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise BadRecord("a message is not an object")
    name = turn.get("role") or turn.get("from")
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRecord(f"role {type(name) if isinstance(name, (list, dict)) else repr(name)} is not supported")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if isinstance(content, list):  # OpenAI's content parts
        if any(not isinstance(part, dict) or part.get("type", "text") != "text" for part in content):
            raise BadRecord("content that is not text")
        texts = [part.get("text") or "" for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise BadRecord("content that is not text")
        content = "".join(texts)
    if role == "assistant":
        return role, ""  # the target answers itself
    if not isinstance(content, str) or not content.strip():
        raise BadRecord(f"empty {role} message")
    return role, content


def segments(conversation: Conversation, tokenizer: Any, template_kwargs: dict[str, Any]) -> list[list[int]]:
    """The ids before each answer, by the target's chat template (`tokenizer`: a Transformers tokenizer).

    Raises BadRecord where template or tokenizer fails, and where the template writes earlier turns anew (a thinking
    template that drops `<think>` from the history): the generated ids would then not be the prefix that serving sees.
    """

    def render(messages: list[dict[str, str]]) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template_kwargs)

    history: list[dict[str, str]] = []
    texts: list[str] = []
    before = ""
    for role, content in conversation.messages:
        history.append({"role": role, "content": content})
        if role != "user":
            continue
        with _blamed("chat template"):
            text = render(history)
        if not texts:
            texts.append(text)
        else:
            head, found, tail = text.rpartition(ANSWER)
            if not found or head != before:
                raise BadRecord("the chat template rewrites earlier turns")
            texts.append(tail)
        before = text
        history.append({"role": "assistant", "content": ANSWER})
    with _blamed("tokenizer"):
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@contextmanager
def _blamed(part: str) -> Iterator[None]:
    """Whatever this part of a target raises is the reason why a record cannot be used."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of a tokenizer in Rust
            raise
        raise BadRecord(f"{part}: {str(error) or type(error).__name__}") from None


def join(ids: list[int], segment: list[int]) -> list[int]:
    """What to append to `ids`, which end with an answer: the segment, less an end-of-turn token the answer brought."""
    return segment[1:] if ids and segment and ids[-1] == segment[0] else segment
