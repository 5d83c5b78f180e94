"""Public chat formats -> conversations -> token ids.

A conversation keeps what was said to the model: an optional system message and the user's turns. The corpus's own
answers, where it has any, are dropped, since the target answers every turn itself. What the engine needs is made once,
with the target's chat template: the *segments* of ids before each answer. Segment 0 is the prompt of the first answer;
segment k is what stands between answer k-1 and answer k, and begins with the template's end-of-turn token. Joining
segments and generated ids (`join`) never tokenises an answer again.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec

from eagle3_ray.config import ConfigError, PromptsConfig
from eagle3_ray.secrets import blotted

ANSWER = "\ue000answer\ue000"  # stands where the template puts an answer; private-use characters, in no real text
SPOKEN = ("messages", "conversations", "prompt", "turns", "question", "problem")  # the first that is there counts
NAMES, DOMAINS = ("id", "question_id", "task_id"), ("domain", "category", "subject")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


class BadRecord(ValueError):
    """A record that cannot be used; the message is its reason."""


@dataclass(frozen=True)
class Conversation:
    """What is said to the target. `messages`, (role, content): at most one system message, then user messages only."""

    id: str
    domain: str
    messages: tuple[tuple[str, str], ...]


def read_records(prompts: PromptsConfig, storage_options: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the corpus's raw records, at most `prompts.limit`.

    `prompts.source` is a JSONL (optionally gzipped) or Parquet file or glob, local or on any fsspec URL, or else a
    name or folder that `datasets.load_dataset` takes. Raises ConfigError when there is nothing to read.
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


def _read_files(source: str, storage_options: dict[str, Any]) -> Iterator[dict[str, Any]]:
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
        with files.open(name, "rb") as raw:
            if name.endswith(".parquet"):
                import pyarrow.parquet

                for batch in pyarrow.parquet.ParquetFile(raw).iter_batches(batch_size=1024):
                    yield from batch.to_pylist()
                continue
            lines = gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else raw
            for number, line in enumerate(lines, 1):  # split on b"\n" alone: texts hold other line breaks
                if line.strip():
                    try:
                        yield json.loads(line)
                    except ValueError as error:
                        yield {"error": f"{blotted(os.path.basename(name))} line {number} is not JSON: {error}"}


def _read_dataset(name: str, subset: str | None, split: str) -> Iterator[dict[str, Any]]:
    import datasets

    try:
        yield from datasets.load_dataset(os.path.expanduser(name), subset, split=split, streaming=True)
    except (FileNotFoundError, ValueError, ConnectionError) as error:
        raise ConfigError(f"prompts.source: neither a file nor a readable data set: {name!r}: {error}") from None


def parse(record: Any) -> Conversation:
    """One raw record as a conversation, or BadRecord.

    A record has OpenAI's `messages`, ShareGPT's `conversations`, a `prompt`, or, as benchmarks have it, a `prompt` or
    `turns` of several user turns (MT-Bench), a `question` (GSM8K) or a `problem` (MATH).
    """
    if not isinstance(record, dict):
        raise BadRecord(f"a record must be an object, not {type(record).__name__}")
    if record.get("error"):
        raise BadRecord(str(record["error"]))
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
    digest = hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:16]
    name = next((record[key] for key in NAMES if record.get(key)), digest)
    domain = next((record[key] for key in DOMAINS if record.get(key)), "none")
    return Conversation(str(name), str(domain), tuple(messages))


def _role_and_text(turn: Any) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise BadRecord("a message is not an object")
    name = turn.get("role") or turn.get("from")
    role = ROLES.get(str(name))
    if role is None:
        raise BadRecord(f"role {name!r} is not supported")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if isinstance(content, list):  # OpenAI's content parts
        if any(not isinstance(part, dict) or part.get("type", "text") != "text" for part in content):
            raise BadRecord("content that is not text")
        content = "".join(str(part.get("text") or "") for part in content)
    if role == "assistant":
        return role, ""  # the target answers itself
    if not isinstance(content, str) or not content.strip():
        raise BadRecord(f"empty {role} message")
    return role, content


def segments(conversation: Conversation, tokenizer: Any, template_kwargs: dict[str, Any]) -> list[list[int]]:
    """The ids before each answer, by the target's chat template (`tokenizer`: a Transformers tokenizer).

    Raises BadRecord where the template writes earlier turns anew (a thinking template that drops `<think>` from the
    history): the generated ids would then not be the prefix that serving sees.
    """

    def render(messages: list[dict[str, str]]) -> str:
        try:
            return tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **template_kwargs
            )
        except Exception as error:  # templates raise their own errors
            raise BadRecord(f"chat template: {error}") from None

    history: list[dict[str, str]] = []
    texts: list[str] = []
    before = ""
    for role, content in conversation.messages:
        history.append({"role": role, "content": content})
        if role != "user":
            continue
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
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def join(ids: list[int], segment: list[int]) -> list[int]:
    """What to append to `ids`, which end with an answer: the segment, less an end-of-turn token the answer brought."""
    return segment[1:] if ids and segment and ids[-1] == segment[0] else segment
