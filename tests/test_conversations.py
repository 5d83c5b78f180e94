"""Public chat formats in, token ids out."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3_ray.config import ConfigError, PromptsConfig
from eagle3_ray.conversations import BadRecord, Conversation, join, parse, read_records, segments


def users(record: object) -> list[str]:
    return [content for role, content in parse(record).messages if role == "user"]


def test_the_three_formats_say_the_same() -> None:
    openai = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x"}]}
    sharegpt = {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "x"}]}
    assert parse(openai).messages == parse(sharegpt).messages == parse({"prompt": "one"}).messages


def test_the_corpus_own_answers_are_dropped_and_every_user_turn_is_kept() -> None:
    turns = [("assistant", "hello"), ("user", "one"), ("assistant", None), ("user", "two"), ("user", "three")]
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    assert users(record) == ["one", "two", "three"]


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert users({"messages": [{"role": "user", "content": parts}]}) == ["ab"]


# Made up, in the shape of each: the hub's copy of MT-Bench and its authors' own, GSM8K, HumanEval, MATH-500
SUITES: dict[str, tuple[dict, list[str], str]] = {
    "mt_bench": (
        {"prompt": ["Write a verse.", "Now shorter."], "prompt_id": 7, "category": "writing", "reference": []},
        ["Write a verse.", "Now shorter."],
        "writing",
    ),
    "mt_bench, question.jsonl": (
        {"question_id": 81, "category": "stem", "turns": ["What is heat?", "And cold?"], "reference": ["x", "y"]},
        ["What is heat?", "And cold?"],
        "stem",
    ),
    "gsm8k": (
        {"question": "Tom has 2 pens. How many?", "answer": "He has <<1+1=2>>2.\n#### 2"},
        ["Tom has 2 pens. How many?"],
        "none",
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/9",
            "prompt": 'def f(x: int) -> int:\n    """ Twice x.\n    """\n',
            "entry_point": "f",
            "canonical_solution": "    return 2 * x\n",
            "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        },
        ['def f(x: int) -> int:\n    """ Twice x.\n    """\n'],
        "none",
    ),
    "math500": (
        {
            "problem": "What is $1+1$?",
            "solution": "It is $\\boxed{2}$.",
            "answer": "2",
            "subject": "Prealgebra",
            "level": 1,
            "unique_id": "test/prealgebra/1.json",
        },
        ["What is $1+1$?"],
        "Prealgebra",
    ),
}


@pytest.mark.parametrize("name", SUITES)
def test_the_suites_are_read_as_they_are_published(tmp_path, name: str) -> None:
    record, turns, domain = SUITES[name]
    (tmp_path / "suite.jsonl").write_text(json.dumps(record) + "\n")
    (read,) = read_records(PromptsConfig(source=str(tmp_path / "suite.jsonl")))
    assert users(read) == turns  # and nothing of the solutions
    assert parse(read).domain == domain


def test_a_suites_own_names_tell_its_conversations_apart() -> None:
    assert [parse({key: "x/1", "prompt": "a"}).id for key in ("id", "question_id", "task_id")] == ["x/1"] * 3
    assert parse({"prompt": "a"}).id == parse({"prompt": ["a"]}).id != parse({"prompt": ["a", "b"]}).id
    assert parse({"prompt": "a", "domain": "d", "category": "c"}).domain == "d"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("text", "must be an object"),
        ({}, "no messages"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user message"),
        ({"messages": [{"role": "user", "content": None}]}, "empty user message"),
        ({"messages": [{"role": "user", "content": "  "}]}, "empty user message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "after the start"),
        ({"messages": ["a"]}, "not an object"),
        ({"conversations": ["a", "b"]}, "not an object"),
        ({"turns": ["a", ""]}, "empty user message"),
        ({"question": {"text": "a"}}, "no messages"),
    ],
)
def test_a_bad_record_says_why(record: object, reason: str) -> None:
    with pytest.raises(BadRecord, match=reason):
        parse(record)


def test_files_are_read_whatever_their_form(tmp_path) -> None:
    rows = [{"id": str(i), "prompt": f"line\u2028break {i}"} for i in range(3)]  # U+2028 is no line end in JSONL
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert list(read_records(PromptsConfig(source=str(tmp_path / name)))) == rows
    assert len(list(read_records(PromptsConfig(source=f"{tmp_path}/*.jsonl*")))) == 6
    assert len(list(read_records(PromptsConfig(source=f"file://{tmp_path}/a.jsonl", limit=2)))) == 2


def test_a_data_set_is_read_by_its_split(tmp_path, monkeypatch) -> None:
    for split, texts in (("train", ["a", "b"]), ("test", ["c"])):
        pq.write_table(pa.Table.from_pylist([{"prompt": text} for text in texts]), tmp_path / f"{split}.parquet")
    for split, texts in (("train", ["a", "b"]), ("test", ["c"])):
        records = list(read_records(PromptsConfig(source=str(tmp_path), split=split)))
        assert [record["prompt"] for record in records] == texts
    two = "configs:\n- config_name: a\n  data_files: train.parquet\n- config_name: b\n  data_files: test.parquet\n"
    (tmp_path / "README.md").write_text(f"---\n{two}---\n")
    for subset, texts in (("a", ["a", "b"]), ("b", ["c"])):
        records = list(read_records(PromptsConfig(source=str(tmp_path), subset=subset)))
        assert [record["prompt"] for record in records] == texts
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="prompts.source"):
        list(read_records(PromptsConfig(source="no-such/data-set")))


def test_a_line_that_is_not_json_is_one_bad_record(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{broken\n{"prompt": "b"}\n')
    good, bad, last = read_records(PromptsConfig(source=str(tmp_path / "a.jsonl")))
    assert (good, last) == ({"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(BadRecord, match="line 2 is not JSON"):
        parse(bad)


@pytest.mark.parametrize("name", ["missing.jsonl", "empty.jsonl", "*.parquet"])
def test_nothing_to_read_is_a_configuration_error(tmp_path, name: str) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="prompts.source"):
        list(read_records(PromptsConfig(source=str(tmp_path / name))))


def test_segments_and_answers_join_to_what_the_template_renders(smollm2_tokenizer) -> None:
    tokenizer = smollm2_tokenizer
    said = (("system", "Be brief."), ("user", "One?"), ("user", "Two?"))
    first, second = segments(Conversation("a", "none", said), tokenizer, {})
    answer = tokenizer("Yes.", add_special_tokens=False)["input_ids"]
    turns = [said[0], said[1], ("assistant", "Yes."), said[2]]
    whole = [{"role": role, "content": content} for role, content in turns]
    expected = tokenizer(
        tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True), add_special_tokens=False
    )["input_ids"]
    end = second[:1]  # the end-of-turn token
    assert first + answer + end + join(first + answer + end, second) == expected  # an answer that ended by itself
    assert first + answer + join(first + answer, second) == expected  # one that was cut by its length
    assert tokenizer.decode(end) == "<|im_end|>"


def test_a_template_that_rewrites_history_is_refused(smollm2_tokenizer) -> None:
    class Forgetful:
        def apply_chat_template(self, messages, **_):
            last = messages[-1]["content"]
            return f"[{len(messages)}]" + "".join(m["content"] for m in messages[:-1]) + last

    said = (("user", "One?"), ("user", "Two?"))
    with pytest.raises(BadRecord, match="rewrites earlier turns"):
        segments(Conversation("a", "none", said), Forgetful(), {})
