"""A bad row never ends a stage: it is counted with its reason, and the rows around it come through."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import compose

from eagle3_ray import conversations
from eagle3_ray.config import ConfigError, PromptsConfig
from eagle3_ray.conversations import LONGEST_REASON, BadRecord, Conversation, parse, read_records, segments
from eagle3_ray.evaluate import heldout
from eagle3_ray.prepare import MOST_REASONS, OTHERS, Corpus, prepare
from eagle3_ray.run import Run, open_run
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Damaged, Filesystem

SURROGATE = "\\ud800"  # as JSON spells it; alone it is no character
USER = '{"role": "user", "content": "a"}'
MANY = ", ".join([USER] * 1001)

# Each row, and how its reason begins
BAD: list[tuple[bytes | str, str]] = [
    (f'{{"prompt": "{SURROGATE} x"}}', "text with a lone surrogate"),
    (f'{{"id": "{SURROGATE}", "prompt": "surrogate id"}}', "text with a lone surrogate"),
    (f'{{"domain": "a{SURROGATE}", "prompt": "surrogate domain"}}', "text with a lone surrogate"),
    (f'{{"messages": [{{"role": "system", "content": "{SURROGATE}"}}, {USER}]}}', "text with a lone surrogate"),
    (f'{{"turns": ["a", "\\udfff"], "id": "{SURROGATE}"}}', "text with a lone surrogate"),
    (b'{"prompt": "\xed\xa0\x80"}', "text with a lone surrogate"),  # one that was written as UTF-8 all the same
    (b'{"prompt": "\xff\xfe"}', "p.jsonl line 0 is not JSON: 'utf-8' codec can't decode byte"),
    (b"\x00\x01\x02\x03", "p.jsonl line 0 is not JSON: "),
    (b'{"prompt": "a\x00b"}', "p.jsonl line 0 is not JSON: Invalid control character at"),
    ("{broken", "p.jsonl line 0 is not JSON: Expecting property name"),
    ('{"prompt": "cut', "p.jsonl line 0 is not JSON: Unterminated string"),
    ('{"prompt": "a"} {"prompt": "b"}', "p.jsonl line 0 is not JSON: Extra data"),
    ("[" * 100_000, "p.jsonl line 0 is nested too deep"),
    ('{"prompt": ' * 100_000 + "1" + "}" * 100_000, "p.jsonl line 0 is nested too deep"),
    ('{"prompt": "a", "n": ' + "1" * 5000 + "}", "p.jsonl line 0 is not JSON: Exceeds the limit (4300 digits)"),
    ("[]", "a record must be an object, not list"),
    ("null", "a record must be an object, not NoneType"),
    ("3", "a record must be an object, not int"),
    ("NaN", "a record must be an object, not float"),
    ('"text"', "a record must be an object, not str"),
    ("{}", "no messages,"),
    ('{"prompt": NaN}', "no messages,"),
    ('{"prompt": {"text": "a"}}', "no messages,"),
    ('{"prompt": 7}', "no messages,"),
    ('{"prompt": [[]]}', "a message is not an object"),
    ('{"prompt": " "}', "empty user message"),
    ('{"id": ["x"], "prompt": "list id"}', "id is neither text nor a number"),
    ('{"id": {"x": 1}, "prompt": "dict id"}', "id is neither text nor a number"),
    ('{"id": NaN, "prompt": "nan id"}', "id is neither text nor a number"),
    ('{"category": ["x"], "prompt": "list domain"}', "category is neither text nor a number"),
    ('{"id": "' + "x" * 10_000 + '", "prompt": "long id"}', "id has more than 1000 characters"),
    ('{"messages": [{"role": {"a": 1}, "content": "x"}]}', "role <class 'dict'> is not supported"),
    ('{"messages": [{"role": "' + "tool" * 10_000 + '", "content": "x"}]}', "role 'tooltooltool"),
    ('{"messages": [{"role": "user", "content": [{"text": {"a": 1}}]}]}', "content that is not text"),
    ('{"messages": [' + '{"role": "user", "content": ' + "[" * 300 + "]" * 300 + "}]}", "content that is not text"),
    (f'{{"messages": [{MANY}]}}', "more than 1000 user messages"),
    ('{"prompt": "' + "a" * 10_000_000 + '"}', "a message of more than 100 characters a token of prompts.max_prompt"),
    ('{"prompt": "' + "word and " * 5000 + '"}', "a prompt of more than prompts.max_prompt_tokens=1024 tokens"),
    ('{"prompt": "boom"}', "chat template: boom"),
]
GOOD = [
    '{"id": "%d", "domain": "d", "prompt": "Good row %d"}',
    '{"id": %d, "prompt": "Null \\u0000 inside, row %d"}',
    '{"id": "Köln \\u2028 %d", "prompt": "Paired \\ud83d\\ude00, row %d"}',
    '{"id": "x%d", "prompt": "Fields that nobody reads, row %d", "score": NaN, "rating": Infinity, "error": "none"}',
    '{"id": "y%d", "messages": [{"role": "user", "content": "Row %d"}, {"role": "assistant", "content": "\\ud800"}]}',
]


def hostile(folder: Path) -> Path:
    """All bad rows in one corpus, a good one before each and behind the last."""
    lines = []
    for i in range(len(BAD) + 1):
        lines.append((GOOD[i % len(GOOD)] % (i, i)).encode())
        if i < len(BAD):
            row = BAD[i][0]
            lines.append(row.encode() if isinstance(row, str) else row)
    path = folder / "p.jsonl"
    path.write_bytes(b"\n".join(lines))
    return path


@pytest.fixture(scope="module")
def target(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's target with a template that raises for one prompt, and says nothing for another."""
    folder = tmp_path_factory.mktemp("target")
    for path in smollm2.iterdir():
        (folder / path.name).symlink_to(path)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    config = json.loads((smollm2 / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.content == 'boom' %}{{ raise_exception(m.content * 1000) }}{% endif %}"
        "{% if m.content != 'silence' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    return folder


def opened(target: Path, tmp_path: Path, *overrides: str) -> Run:
    return open_run(compose(f"target.path={target}", f"store.root={tmp_path}/store", *overrides))


def prepared(target: Path, tmp_path: Path, source: Path, bad: float = 1.0) -> Corpus:
    run = opened(target, tmp_path, f"prompts.source={source}", f"prompts.max_bad_share={bad}")
    return prepare(run, run.config.prompts)


def kinds(reasons: Iterable[str]) -> list[str]:
    """Without the numbers of lines."""
    return [re.sub(r"line \d+", "line 0", reason) for reason in reasons]


@pytest.mark.parametrize(("row", "reason"), BAD[:-3], ids=[reason for _, reason in BAD[:-3]])  # the others need tokens
def test_a_bad_row_has_its_reason(tmp_path: Path, row: bytes | str, reason: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(row.encode() if isinstance(row, str) else row)
    (record,) = read_records(PromptsConfig(source=str(tmp_path / "p.jsonl")))
    with pytest.raises(BadRecord) as bad:
        parse(record)
    assert kinds([str(bad.value)])[0].startswith(reason)


def test_every_good_row_of_a_hostile_corpus_comes_through(target: Path, tmp_path: Path) -> None:
    corpus = prepared(target, tmp_path, hostile(tmp_path))
    summary = corpus.summary
    assert (summary["records"], summary["bad"]) == (2 * len(BAD) + 1, len(BAD))
    assert (summary["prompts"], summary["duplicates"]) == (len(BAD) + 1, 0)
    told = kinds(summary["reasons"])
    for _, reason in BAD:
        assert any(one.startswith(reason) for one in told), f"{reason} is not among {told}"
    assert sum(summary["reasons"].values()) == len(BAD)
    assert all(len(reason) <= LONGEST_REASON and reason.isprintable() for reason in summary["reasons"])
    ids = [prompt.id for unit in corpus.units for prompt in corpus.read(unit)]
    assert len(set(ids)) == len(BAD) + 1 and ids[2] == "Köln \u2028 2"


def test_prepared_prompts_that_were_changed_are_refused(target: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    corpus = prepared(target, tmp_path, tmp_path / "p.jsonl")
    (unit,) = corpus.units
    key = f"prompts/{corpus.fingerprint}/units/{unit}.jsonl"
    assert [prompt.domain for prompt in corpus.read(unit)] == ["none", "none"]
    corpus.files.write(key, corpus.files.read(key).replace(b"none", b"nine", 1))
    again = prepared(target, tmp_path, tmp_path / "p.jsonl")
    with pytest.raises(Damaged, match=f"{unit}.jsonl is not what was prepared; delete .*summary.json to prepare"):
        again.read(unit)
    corpus.files.delete(f"prompts/{corpus.fingerprint}/summary.json")
    assert [prompt.domain for prompt in prepared(target, tmp_path, tmp_path / "p.jsonl").read(unit)] == ["none"] * 2


def test_what_comes_through_can_be_committed_and_told(target: Path, tmp_path: Path) -> None:
    corpus = prepared(target, tmp_path, hostile(tmp_path))
    (tmp_path / "shard").write_bytes(b"x")
    units = Units(Filesystem(str(tmp_path / "other")), "responses", "f")
    told = {"tokens": 1, "generated": 0, "finish_reasons": []}
    samples = [{"id": p.id, "domain": p.domain, **told} for unit in corpus.units for p in corpus.read(unit)]
    units.commit("000000", tmp_path / "shard", samples, reasons=list(corpus.summary["reasons"]))
    assert units.read_commit("000000").samples == samples
    "".join(corpus.summary["reasons"]).encode()  # a terminal and a report take them


def test_held_out_prompts_are_read_in_the_same_way(target: Path, tmp_path: Path) -> None:
    source = hostile(tmp_path)
    run = opened(target, tmp_path, "prompts.max_bad_share=1", f"evaluate.source={source}")
    (corpus,) = heldout(run).values()
    assert (corpus.summary["prompts"], corpus.summary["bad"]) == (len(BAD) + 1, len(BAD))
    with pytest.raises(ConfigError, match="^evaluate.source: .* cannot be used"):
        heldout(opened(target, tmp_path, "prompts.max_bad_share=0", f"evaluate.source={source}"))


def test_a_prompt_that_the_template_says_nothing_of_is_bad(target: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "silence"}\n{"prompt": "a"}\n')
    assert prepared(target, tmp_path, tmp_path / "p.jsonl").summary["reasons"] == {"a prompt of no tokens": 1}


def test_reasons_neither_carry_the_record_nor_grow_without_bound(target: Path, tmp_path: Path) -> None:
    many = [json.dumps({"messages": [{"role": chr(0x4E00 + i) * 500, "content": "a"}]}) for i in range(300)]
    broken = ["{broken"] * 700
    (tmp_path / "p.jsonl").write_text("\n".join([*broken, *many, '{"prompt": "a"}']))
    summary = prepared(target, tmp_path, tmp_path / "p.jsonl").summary
    assert summary["bad"] == 1000 and len(summary["reasons"]) == MOST_REASONS + 1
    (first, count), *others = summary["reasons"].items()
    assert first.startswith("p.jsonl line 1 is not JSON") and count == 700  # of one kind, whatever their lines
    assert others[0] == (OTHERS, 251)
    assert max(map(len, summary["reasons"])) == LONGEST_REASON


def test_no_two_prompts_share_an_id(target: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": "x", "prompt": "a", "domain": domain} for domain in "pqrs"]
    rows += [{"id": "x", "prompt": "b"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = prepared(target, tmp_path, tmp_path / "p.jsonl")
    first = [prompt.id for prompt in corpus.read(corpus.units[0])]
    assert len(set(first)) == 5
    taken = [{"id": first[-1], "prompt": "before it"}, *rows]  # an id that another would have been given
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, taken)))
    corpus = prepared(target, tmp_path, tmp_path / "q.jsonl")
    assert len({prompt.id for prompt in corpus.read(corpus.units[0])}) == 6


def test_a_line_is_not_held_whatever_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "LONGEST_LINE", 100)
    fits = json.dumps({"prompt": "x" * 84}) + "\n"
    assert len(fits) == 99
    text = "\n" + fits + "y" * 1000 + "\n" + fits[:-1] + " \n" + "z" * 250 + "\n" + fits + "z" * 100
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.jsonl", "b.jsonl.gz"):
        read = list(read_records(PromptsConfig(source=str(tmp_path / name))))
        good = [record for record in read if isinstance(record, dict)]
        assert good == [json.loads(fits)] * 3
        told = [str(record) for record in read if isinstance(record, BadRecord)]
        assert told == [f"{name} line {line} is longer than 100 bytes" for line in (3, 5, 7)]


def test_a_parquet_row_that_cannot_be_read_is_one_bad_record(tmp_path: Path) -> None:
    texts = pa.array([b"a", b"b\xff", b"c"] * 1000, pa.binary())
    broken = pa.Array.from_buffers(pa.string(), len(texts), texts.buffers())  # text that is not UTF-8
    pq.write_table(pa.table({"prompt": broken}), tmp_path / "a.parquet")
    read = list(read_records(PromptsConfig(source=str(tmp_path / "a.parquet"))))
    assert [record["prompt"] for record in read if isinstance(record, dict)] == ["a", "c"] * 1000
    bad = [str(record) for record in read if isinstance(record, BadRecord)]
    assert len(bad) == 1000 and bad[-1].startswith("a.parquet row 2999 cannot be read: 'utf-8' codec")


def damaged(path: Path) -> None:
    """A quarter of it overwritten, from its middle on: headers of pages, and what they hold."""
    data = bytearray(path.read_bytes())
    middle, end = len(data) // 2, len(data) * 3 // 4
    data[middle:end] = random.Random(0).randbytes(end - middle)
    path.write_bytes(data)


@pytest.mark.parametrize("fault", ["cut", "changed", "no such file"])
@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.parquet"])
def test_a_damaged_file_is_named_with_its_setting(tmp_path: Path, name: str, fault: str) -> None:
    chosen = random.Random(1)
    rows = [{"prompt": f"{i} {chosen.getrandbits(300)}"} for i in range(20_000)]
    (tmp_path / "a.jsonl").write_text('{"prompt": "before"}\n')
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd", row_group_size=1000)
    if fault == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif fault == "changed":
        damaged(path)
    else:
        path.write_bytes(b"none of its kind")
    with pytest.raises(ConfigError) as refused:
        list(read_records(PromptsConfig(source=f"{tmp_path}/*.*")))
    assert str(refused.value).startswith(f"prompts.source: '{path}' cannot be read to its end: ")


def test_a_data_set_that_breaks_off_is_named_with_its_setting(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    pq.write_table(pa.table({"prompt": [f"{i} {'x' * 50}" for i in range(20_000)]}), folder / "train.parquet")
    damaged(folder / "train.parquet")
    with pytest.raises(ConfigError, match=f"^prompts.source: neither a file nor a readable data set: '{folder}': "):
        list(read_records(PromptsConfig(source=str(folder))))


class Panic(BaseException):
    """As pyo3 raises it when Rust code panics: no Exception."""


Panic.__name__ = "PanicException"


@pytest.mark.parametrize("error", [TypeError("no text"), RecursionError("deep"), MemoryError(), Panic("in Rust")])
def test_whatever_a_tokenizer_or_template_raises_is_the_records_reason(error: BaseException) -> None:
    class Raising:
        def __init__(self, at: str) -> None:
            self.at = at

        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            if self.at == "chat template":
                raise error
            return "a"

        def __call__(self, *_: Any, **__: Any) -> Any:
            raise error

    for part in ("chat template", "tokenizer"):
        with pytest.raises(BadRecord, match=f"{part}: {str(error) or 'MemoryError'}"):
            segments(Conversation("a", "none", (("user", "a"),)), Raising(part), {})


def test_an_interruption_is_no_records_reason() -> None:
    class Interrupted:
        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        segments(Conversation("a", "none", (("user", "a"),)), Interrupted(), {})


def value(chosen: random.Random, depth: int = 0) -> Any:
    """A random JSON value, of the words that parse looks for."""
    words = ["messages", "conversations", "prompt", "turns", "role", "from", "content", "value", "text", "type", "id"]
    words += ["domain", "user", "human", "system", "assistant", "", " ", "\ud800", "\0", "a" * 2000]
    plain: list[Any] = [None, True, False, 0, -1, 1e308, float("nan"), float("inf"), 10**400, *words]
    kind = chosen.random()
    if depth > 4 or kind < 0.3:
        return chosen.choice(plain)
    if kind < 0.6:
        return [value(chosen, depth + 1) for _ in range(chosen.randrange(4))]
    return {chosen.choice(words): value(chosen, depth + 1) for _ in range(chosen.randrange(5))}


def test_any_json_value_is_a_conversation_or_a_bad_record() -> None:
    chosen = random.Random(0)
    found = []
    for _ in range(20_000):
        try:
            found.append(parse(value(chosen)))
        except BadRecord as bad:
            str(bad).encode()
    assert found  # some are conversations
    for conversation in found:
        json.dumps([conversation.id, conversation.domain, conversation.messages], ensure_ascii=False).encode()
