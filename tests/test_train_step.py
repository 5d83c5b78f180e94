"""The benchmark's plain trainer computes the golden step: what we are compared with is right."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks.baselines.plain import Padded, Plain, pad

GOLDEN = Path(__file__).parent / "data" / "eagle3_ttt.safetensors"


def golden_plain() -> tuple[Plain, dict[str, torch.Tensor], int]:
    tensors = load_file(GOLDEN)
    with safe_open(GOLDEN, "pt") as file:
        shape = json.loads(file.metadata()["config"])
    names = ("hidden", "heads", "kv", "head_dim", "inter", "vocab", "draft_vocab", "theta", "eps")
    plain = Plain(*(shape[name] for name in names))
    weights = {
        name.removeprefix("weights.").removeprefix("model.").replace("layers.0", "midlayer"): tensor
        for name, tensor in tensors.items()
        if name.startswith("weights.")
    }
    plain.load_state_dict({**weights, "d2t": tensors["d2t"], "t2d": tensors["t2d"]})
    return plain, tensors, shape["steps"]


def test_the_plain_trainer_gives_the_golden_losses_and_accuracies():
    plain, tensors, steps = golden_plain()
    batch = Padded(*(tensors[name] for name in ("input_ids", "loss_mask", "aux", "last_hidden")))
    loss, losses, accuracies = plain.loss(batch, tensors["target_lm_head"], steps)
    torch.testing.assert_close(losses, tensors["expected.loss"], atol=1e-4, rtol=0)
    torch.testing.assert_close(loss, tensors["expected.loss"].mean(), atol=1e-4, rtol=0)
    torch.testing.assert_close(accuracies, tensors["expected.greedy_accuracy"], atol=1e-4, rtol=0)


def test_padding_of_the_plain_trainer_changes_nothing():
    plain, tensors, steps = golden_plain()
    rows = [tensors[name] for name in ("input_ids", "loss_mask", "aux", "last_hidden")]
    alone = pad(*([x[0]] for x in rows))
    wider = pad(*([x[0], x[1].repeat_interleave(2, 0) * 0] for x in rows))  # the second is longer and has no response
    assert wider.input_ids.shape[1] == 2 * alone.input_ids.shape[1]
    found = [plain.loss(batch, tensors["target_lm_head"], steps)[1] for batch in (alone, wider)]
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=0)
