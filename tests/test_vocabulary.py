"""The draft vocabulary: which tokens are in it, and its maps; the ids that a tokenizer's files name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_ray.config import ConfigError, DrafterConfig
from eagle3_ray.drafter.model import Drafter
from eagle3_ray.drafter.shape import drafter_config
from eagle3_ray.drafter.vocabulary import (
    count_probability,
    count_tokens,
    coverage,
    draft_vocabulary,
    end_tokens,
    tokenizer_ids,
)
from eagle3_ray.store.filesystem import Damaged
from eagle3_ray.store.shards import Response

TARGET: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
}


def test_vocabulary_is_the_most_frequent_tokens_and_the_end_tokens():
    said = [Response("a", torch.tensor([9, 5, 5, 3], dtype=torch.int32), torch.tensor([0, 1, 1, 1]).bool(), ["stop"])]
    said.append(
        Response("b", torch.tensor([7, 7, 8, 2], dtype=torch.int32), torch.tensor([1, 1, 1, 1]).bool(), ["stop"])
    )
    counts = count_tokens(said, vocab_size=11)
    assert counts.tolist() == [0, 0, 1, 1, 0, 2, 0, 2, 1, 0, 0]  # 9 was the prompt's
    assert draft_vocabulary(counts, 4).tolist() == [2, 3, 5, 7]  # 2, 3 and 8 tie: the lowest ids go first
    assert draft_vocabulary(counts, 4, always=[10, 0]).tolist() == [0, 5, 7, 10]
    assert coverage(counts, torch.tensor([2, 3, 5, 7])) == pytest.approx(6 / 7)
    everything = draft_vocabulary(counts, 11, always=[10])
    assert everything.tolist() == list(range(11))
    config = drafter_config(DrafterConfig(), {**TARGET, "vocab_size": 11}, num_aux=2, draft_vocab_size=4)
    drafter = Drafter(config, torch.tensor([0, 5, 7, 10]))
    assert drafter.d2t.tolist() == [0, 4, 5, 7]
    assert drafter.t2d.nonzero()[:, 0].tolist() == [0, 5, 7, 10]


def test_a_response_with_a_token_that_the_target_lacks_is_refused():
    with pytest.raises(Damaged, match="response a has token 11; the target has 11 tokens"):
        count_tokens([Response("a", torch.tensor([1, 11]), torch.tensor([False, True]), ["stop"])], vocab_size=11)


def test_ids_behind_the_tokenizers_last_come_in_only_to_fill():
    counts = torch.tensor([0, 3, 0, 1, 0, 9, 2, 0, 0, 0])  # the tokenizer has 6 tokens, the target's head 10 rows
    assert draft_vocabulary(counts, 3, known=6).tolist() == [1, 3, 5]
    assert draft_vocabulary(counts, 3).tolist() == [1, 5, 6]
    assert draft_vocabulary(counts, 6, known=6).tolist() == [0, 1, 2, 3, 4, 5]
    padded = draft_vocabulary(counts, 8, known=6)
    assert padded.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    whole = draft_vocabulary(counts.double() / 9, 10, known=6)
    assert whole.tolist() == list(range(10))
    for ids in (draft_vocabulary(counts, 3, known=6), padded, whole):
        config = drafter_config(DrafterConfig(), {**TARGET, "vocab_size": 10}, num_aux=2, draft_vocab_size=len(ids))
        drafter = Drafter(config, ids)
        assert torch.equal(drafter.d2t + torch.arange(len(ids)), ids)
        assert drafter.t2d.nonzero()[:, 0].tolist() == ids.tolist()
        assert torch.equal(drafter.draft_ids, ids)


@pytest.mark.parametrize("chunk", [1, 10**6])
def test_probability_is_that_of_each_rows_likeliest_tokens(chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("eagle3_ray.drafter.vocabulary.CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr("eagle3_ray.drafter.vocabulary.LIKELIEST", 2)
    head = torch.eye(5)
    rows = torch.log(torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04], [0.1, 0.2, 0.4, 0.2, 0.1], [0.1, 0.1, 0.1, 0.3, 0.4]]))
    rows[1, 1] += 0.01  # no tie
    mass = count_probability([rows[:2], rows[2:]], head)
    shifted = 1 / (1 + 0.2 * (torch.tensor(0.01).exp().item() - 1))  # what that does to its row's other shares
    torch.testing.assert_close(
        mass, torch.tensor([0.5, 0.3 + 0.2 * 1.01005 * shifted, 0.4 * shifted, 0.3, 0.4], dtype=torch.float64),
        atol=1e-5, rtol=0,
    )  # fmt: skip


def test_the_tokenizers_size_and_special_ids_are_read_from_its_files(tmp_path: Path):
    assert tokenizer_ids(tmp_path) == (None, [])
    added = [{"id": 4, "content": "<s>", "special": True}, {"id": 5, "content": "<x>", "special": False}]
    whole = {"model": {"vocab": {"a": 0, "b": 1, "c": 3}}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    assert tokenizer_ids(tmp_path) == (6, [4])
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}))
    assert tokenizer_ids(tmp_path) == (2, [])
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tiktoken.model").write_text("YQ== 0\nYg== 1\nYw== 2\n")
    assert tokenizer_ids(tmp_path) == (3, [])
    decoder = {"3": {"content": "[BOS]", "special": True}, "9": {"content": "[EOS]", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert tokenizer_ids(tmp_path) == (10, [3, 9])


@pytest.mark.parametrize("size", [0, 1, 12])
def test_a_vocabulary_size_that_cannot_be_is_refused(size: int):
    with pytest.raises(ConfigError, match=f"drafter.draft_vocab_size: {size}"):
        draft_vocabulary(torch.ones(11, dtype=torch.int64), size, always=[1, 2])


def test_end_tokens_are_those_of_both_configs(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3, "text_config": {"eos_token_id": [5]}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 3]}))
    assert end_tokens(tmp_path) == [3, 4, 5]
