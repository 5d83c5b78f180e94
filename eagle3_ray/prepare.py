"""The first stage: a corpus as token ids, cut into response units.

prompts/<fingerprint>/ holds one JSONL file a unit, {id, domain, segments}, where `segments` are the ids before each
answer (conversations.py), and summary.json, written last: a folder without one is not whole and is made again.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from eagle3_ray import strict_json
from eagle3_ray.capture import TOKENIZER_FILES
from eagle3_ray.config import ConfigError, PromptsConfig
from eagle3_ray.conversations import BadRecord, Conversation, parse, read_records, segments
from eagle3_ray.run import Run
from eagle3_ray.store.filesystem import Damaged, Filesystem
from eagle3_ray.strict_json import fingerprint

CHARACTERS = 100  # of a message for each token that a prompt may have; a token has about four, seldom over twenty
MOST_REASONS, OTHERS = 50, "other reasons"
_MOST = "prompts.max_prompt_tokens"


@dataclass(frozen=True)
class Prompt:
    """One prepared conversation."""

    id: str
    domain: str
    segments: list[list[int]]  # token ids before each answer


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus."""

    files: Filesystem
    fingerprint: str
    units: list[str]
    summary: dict[str, Any]

    def read(self, unit: str) -> list[Prompt]:
        """The prompts of one unit; Damaged where they are not those that were prepared."""
        key = f"prompts/{self.fingerprint}/units/{unit}.jsonl"
        data, written = self.files.read(key), self.summary.get("sha256", {}).get(unit)
        if written not in (None, hashlib.sha256(data).hexdigest()):  # none was kept before 0.2
            raise Damaged(
                f"{self.files.url(key)} is not what was prepared; delete "
                f"{self.files.url(f'prompts/{self.fingerprint}/summary.json')} to prepare the corpus again"
            )
        return [Prompt(**strict_json.loads(line)) for line in data.split(b"\n") if line]


def prepare(run: Run, prompts: PromptsConfig) -> Corpus:
    """Read, check and tokenise a corpus, or find it prepared. ConfigError when it is empty or too much of it is bad."""
    start = time.monotonic()
    records = [_parsed(record) for record in read_records(prompts, run.config.store.storage_options)]
    key = fingerprint(
        {
            "records": [record if isinstance(record, str) else asdict(record) for record in records],
            "tokenizer": {
                name: digest
                for name, digest in run.target["files"].items()
                if name in TOKENIZER_FILES or name.endswith(".py")
            },
            "chat_template_kwargs": run.target["chat_template_kwargs"],
            "max_prompt_tokens": prompts.max_prompt_tokens,
            "unit_size": prompts.unit_size,
        }
    )
    summary = run.read_json(f"prompts/{key}/summary.json")
    if summary is None:
        summary = _write(run, prompts, key, records) | {"seconds": round(time.monotonic() - start, 1)}
        run.write_json(f"prompts/{key}/summary.json", summary)
    bad, records_read = summary["bad"], summary["records"]
    if not summary["prompts"] or bad > prompts.max_bad_share * records_read:
        worst = "; ".join(f"{count} x {reason}" for reason, count in list(summary["reasons"].items())[:5])
        raise ConfigError(
            f"prompts.source: {bad} of {records_read} records of {prompts.source!r} cannot be used "
            f"(prompts.max_bad_share={prompts.max_bad_share}): {worst}"
        )
    print(f"prepare: {summary['prompts']} prompts, {bad} bad records, {summary['units']} units", flush=True)
    return Corpus(run.files, key, [_unit(i) for i in range(summary["units"])], summary)


def _parsed(record: Any) -> Conversation | str:
    """The record's conversation, or the reason why it has none."""
    try:
        return parse(record)
    except BadRecord as error:
        return str(error)


def _write(run: Run, prompts: PromptsConfig, key: str, records: list[Conversation | str]) -> dict[str, Any]:
    conversations = dict.fromkeys(record for record in records if not isinstance(record, str))  # each once, in order
    bad = [record for record in records if isinstance(record, str)]
    repeated = len(records) - len(conversations) - len(bad)
    good = list(_tokenised(run, prompts, conversations, bad))
    digests = {}
    for i, first in enumerate(range(0, len(good), prompts.unit_size)):
        unit = good[first : first + prompts.unit_size]
        data = "".join(strict_json.dumps(asdict(prompt)) + "\n" for prompt in unit).encode()
        run.files.write(f"prompts/{key}/units/{_unit(i)}.jsonl", data)
        digests[_unit(i)] = hashlib.sha256(data).hexdigest()
    return {
        "source": prompts.source,
        "fingerprint": key,
        "records": len(records),
        "duplicates": repeated,
        "prompts": len(good),
        "answers": sum(len(prompt.segments) for prompt in good),
        "domains": dict(sorted(Counter(prompt.domain for prompt in good).items())),
        "prompt_tokens": sum(len(ids) for prompt in good for ids in prompt.segments),
        "bad": len(bad),
        "reasons": _counted(bad),
        "units": len(digests),
        "sha256": digests,
    }


def _tokenised(run: Run, prompts: PromptsConfig, records: Iterable[Conversation], bad: list[str]) -> Iterator[Prompt]:
    """The conversations as ids; the reason why one cannot be is added to `bad`."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        run.folder, trust_remote_code=run.config.target.trust_remote_code
    )
    if not tokenizer.chat_template:
        raise ConfigError(f"target.path: the tokenizer in {run.folder} has no chat template")
    seen: set[str] = set()
    most = prompts.max_prompt_tokens
    for record in records:
        try:
            if any(len(text) > CHARACTERS * most for _, text in record.messages):  # a tokenizer would take gigabytes
                raise BadRecord(f"a message of more than {CHARACTERS} characters a token of {_MOST}={most}")
            ids = segments(record, tokenizer, run.target["chat_template_kwargs"])
            if len(ids[0]) > most:
                raise BadRecord(f"a prompt of more than {_MOST}={most} tokens")
            if not ids[0]:
                raise BadRecord("a prompt of no tokens")
        except BadRecord as error:
            bad.append(str(error))
            continue
        name = _free(record, seen)
        seen.add(name)
        yield Prompt(name, record.domain, ids)


def _free(record: Conversation, taken: set[str]) -> str:
    """An id that no other conversation has: two of one id would be one sample."""
    name = record.id
    if name in taken:
        name = f"{record.id}-{fingerprint({'messages': record.messages})}"
    while name in taken:  # the same messages in another domain
        name = f"{record.id}-{fingerprint({'messages': record.messages, 'domain': record.domain, 'not': name})}"
    return name


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    """How many there are of each, the most first. Those that differ in digits alone (lines, positions) are told as the
    first of them, and those of too many kinds together."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason in reasons:
        kind = re.sub(r"\d+", "0", reason)
        if kind not in first and len(first) == MOST_REASONS:
            counts[OTHERS] += 1
        else:
            counts[first.setdefault(kind, reason)] += 1
    return dict(counts.most_common())


def _unit(i: int) -> str:
    return f"{i:06d}"
