"""start.json: what a drafter is made from, frozen by the first run that trains it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import DESCRIPTION, TARGET, V, pieces, sample, stage

from eagle3_ray.config import ConfigError
from eagle3_ray.store.shards import Features
from eagle3_ray.train import start as start_module
from eagle3_ray.train.features import heldout
from eagle3_ray.train.start import frozen_start


def test_start_names_what_the_drafter_is_made_from(tmp_path: Path):
    config, features = stage(tmp_path, heldout=5)
    config.drafter.draft_vocab_size = 12
    start = frozen_start(config, features, DESCRIPTION, "drafters/d")
    units = [f"u{first:04}" for first in range(0, 30, 3)]
    assert start["units"] == units
    assert [(units.index(unit), i) for unit, i in start["heldout"]] == heldout(0, [3] * 10, 5)
    ids = torch.tensor(start["draft_ids"])
    assert (len(ids), start["drafter"]["draft_vocab_size"], start["samples"]) == (12, 12, 30)
    for domain, parity in (("even", 0), ("odd", 1)):
        said = torch.cat([s.input_ids[s.loss_mask] for s in map(sample, range(parity, 30, 2))])
        assert start["coverage_by_domain"][domain] == pytest.approx(torch.isin(said, ids).double().mean().item())
    low, high = sorted(start["coverage_by_domain"].values())
    assert low < start["coverage"] < high


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_vocab_size": 20}, "drafter.draft_vocab_size: 20, but .* began with 32"),
        ({"vocabulary": "probability"}, "drafter.vocabulary: 'probability', but .* began with 'tokens'"),
        ({"heldout": 3}, "train.heldout: 3, but .* began with 0"),
        ({"responses": "other"}, "features.responses: 'other', but .* began with 'rr'"),
    ],
)
def test_a_start_of_other_settings_or_another_corpus_is_refused(tmp_path: Path, change: dict[str, Any], message: str):
    config, features = stage(tmp_path)
    description = dict(DESCRIPTION)
    frozen_start(config, features, description, "drafters/d")
    for settings in (vars(config.drafter), vars(config.train), description):
        settings.update({name: value for name, value in change.items() if name in settings})
    with pytest.raises(ConfigError, match=message):
        frozen_start(config, features, description, "drafters/d")


def test_special_tokens_that_were_said_are_in_the_vocabulary(tmp_path: Path):
    config, features = stage(tmp_path)
    config.drafter.draft_vocab_size = 4
    rare = [29, 45]  # 45 was never said
    tokens = {str(number): {"content": f"<{number}>", "special": True} for number in rare}
    (tmp_path / "target" / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    start = frozen_start(config, features, DESCRIPTION, "drafters/d")
    assert {1, 29} < set(start["draft_ids"])  # 1 ends an answer
    assert 45 not in start["draft_ids"]


def test_a_token_that_the_target_has_no_row_for_is_in_no_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Such as a [PAD] that was added to the tokenizer alone; here an end token, too. RoPE is of a kind told of."""
    config, features = stage(tmp_path)
    tokens = {str(V + 3): {"content": "[PAD]", "special": True}}
    folder = tmp_path / "target"
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    rope = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(TARGET | {"eos_token_id": [1, V + 3]} | rope))
    start = frozen_start(config, features, DESCRIPTION, "drafters/d")
    assert 1 in start["draft_ids"] and max(start["draft_ids"]) < V
    assert start["target_rope"] == "dynamic"
    assert "plain RoPE, not the target's dynamic" in capsys.readouterr().out


def test_probability_is_counted_on_target_rows_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, features = stage(tmp_path)
    commits = features.commits()
    rows = torch.cat([sample(number).last_hidden for number in range(30)])  # [R, H]
    mass, counted = start_module._count_probability(config, features, commits)
    assert counted == len(rows)
    torch.testing.assert_close(mass, (rows @ pieces().head.T).softmax(-1).double().sum(0), atol=1e-4, rtol=0)
    monkeypatch.setattr(start_module, "COUNTED_ROWS", 40)
    _, counted = start_module._count_probability(config, features, commits)
    assert 40 <= counted < 60  # whole samples


def test_no_vocabulary_is_counted_on_states_that_are_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(number: int) -> Features:
        made = sample(number)
        if number == 14:
            made.last_hidden[1, 3] = torch.nan
        return made

    with monkeypatch.context() as older:  # a shard of before states were checked
        older.setattr("eagle3_ray.store.shards.finite", lambda states: True)
        config, features = stage(tmp_path, make=broken)
    with pytest.raises(ConfigError, match="drafter.vocabulary: .* states of sample s14 of unit u0012 .* not finite"):
        start_module._count_probability(config, features, features.commits())
