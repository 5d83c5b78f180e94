"""The losses: right values by hand, the fused form against its definition in fp64, and weights of slots and steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from eagle3_ray.config import LOSSES
from eagle3_ray.drafter.loss import FusedLoss, eager_loss, target_argmax


def given() -> tuple[Tensor, ...]:
    """hidden, weight, target_hidden, target_head, row, scale: 23 slots on 9 of 30 target rows."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(30, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    target, head = torch.randn(2, 30, 8, dtype=torch.float64, generator=generator)
    row = torch.randint(0, 9, (23,), generator=generator)
    scale = torch.rand(23, dtype=torch.float64, generator=generator)
    return hidden, weight, target, head, row, scale


def of_distributions(kind: str, target: list[float], draft: list[float]) -> tuple[float, list[float]]:
    """The loss of one slot, and its gradient by the drafter's logits, by both forms."""
    found = []
    for function in (FusedLoss.apply, eager_loss):
        logits = torch.tensor([draft], dtype=torch.float64).log().requires_grad_()
        goal = torch.tensor([target], dtype=torch.float64).log()
        one = torch.eye(len(draft), dtype=torch.float64)
        row, scale = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
        loss, _, greedy = function(logits, one.clone().requires_grad_(), goal, one, row, scale, kind)
        loss.backward()
        assert logits.grad is not None
        assert greedy.item() == draft.index(max(draft))
        found.append((loss.item(), logits.grad[0].tolist()))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-12)
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-12)
    return found[0]


def test_losses_by_hand():
    target, draft = [0.5, 0.3, 0.2], [0.2, 0.7, 0.1]
    overlap = 0.2 + 0.3 + 0.1
    loss, grad = of_distributions("soft_ce", target, draft)
    assert loss == pytest.approx(-(0.5 * math.log(0.2) + 0.3 * math.log(0.7) + 0.2 * math.log(0.1)))
    assert grad == pytest.approx([0.2 - 0.5, 0.7 - 0.3, 0.1 - 0.2])
    # Of tokens 0 and 2 q is the less, 0.3 in all. By logit z_j the overlap rises by q_j (1 or 0, less that 0.3).
    rise = [0.2 * 0.7, 0.7 * -0.3, 0.1 * 0.7]
    loss, grad = of_distributions("lk_alpha", target, draft)
    assert loss == pytest.approx(-math.log(overlap))
    assert grad == pytest.approx([-r / overlap for r in rise])
    divergence = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.7) + 0.2 * math.log(0.2 / 0.1)
    w = math.exp(-3 * overlap)
    loss, grad = of_distributions("lk_lambda", target, draft)
    assert loss == pytest.approx(w * divergence + (1 - w) * (1 - overlap))
    expected = [w * (q - p) - (1 - w) * r for p, q, r in zip(target, draft, rise, strict=True)]
    assert grad == pytest.approx(expected)


def test_lk_losses_of_a_perfect_and_a_hopeless_drafter():
    for kind in ("lk_alpha", "lk_lambda"):
        loss, grad = of_distributions(kind, [0.6, 0.4], [0.6, 0.4])
        assert loss == pytest.approx(0, abs=1e-12)
    far = torch.tensor([[-200.0, 200.0]], requires_grad=True)  # in float32 the overlap is 0
    row, scale = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    loss, _, _ = FusedLoss.apply(
        far, torch.eye(2).requires_grad_(), -far.detach(), torch.eye(2), row, scale, "lk_alpha"
    )
    loss.backward()
    assert far.grad is not None and torch.isfinite(far.grad).all() and torch.isfinite(loss)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("chunk", [1, 300, 2000, 10**6])
def test_loss_and_gradients_equal_the_definition_whatever_the_chunk(
    kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("eagle3_ray.drafter.loss.CHUNK_ELEMENTS", chunk)
    hidden, weight, *rest = given()
    results = []
    for function in (FusedLoss.apply, eager_loss):
        loss, each, greedy = function(hidden, weight, *rest, kind)
        results.append([loss, each, greedy, *torch.autograd.grad(2 * loss, [hidden, weight])])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, atol=1e-12, rtol=1e-10)
    target, head = rest[:2]
    assert torch.equal(target_argmax(target, head), (target @ head.T).argmax(-1))


def test_of_equal_targets_the_first_wins_also_across_chunks(monkeypatch: pytest.MonkeyPatch):
    head = torch.tensor([[0.0], [2.0], [1.0], [2.0], [2.0]])
    for chunk in (1, 2 * 2 * 8, 10**6):  # one row of the head at a time, two, all
        monkeypatch.setattr("eagle3_ray.drafter.loss.CHUNK_ELEMENTS", chunk)
        assert target_argmax(torch.tensor([[1.0], [-1.0]]), head).tolist() == [1, 0]
        assert target_argmax(torch.empty(0, 1), head).tolist() == []


def test_a_frozen_head_or_state_leaves_the_others_gradient():
    hidden, weight, *rest = given()
    frozen = weight.detach()
    loss, _, _ = FusedLoss.apply(hidden, frozen, *rest, "soft_ce")
    expected, _, _ = eager_loss(hidden, frozen, *rest, "soft_ce")
    (fast,), (slow,) = (torch.autograd.grad(of, [hidden]) for of in (loss, expected))
    torch.testing.assert_close(fast, slow, atol=1e-12, rtol=1e-10)
    loss, _, _ = FusedLoss.apply(hidden.detach(), weight, *rest, "soft_ce")
    expected, _, _ = eager_loss(hidden.detach(), weight, *rest, "soft_ce")
    (fast,), (slow,) = (torch.autograd.grad(of, [weight]) for of in (loss, expected))
    torch.testing.assert_close(fast, slow, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize(
    "kind", ["soft_ce", "lk_alpha"]
)  # lk_lambda holds its weight fixed: not the loss's own gradient
def test_gradients_equal_finite_differences(kind: str):
    hidden, weight, *rest = given()
    assert gradcheck(lambda h, w: FusedLoss.apply(h, w, *rest, kind)[0], (hidden, weight))


def test_logits_never_exceed_the_chunk(monkeypatch: pytest.MonkeyPatch):
    """Seven slots on one target row count as seven, not as one."""
    seen: list[int] = []
    monkeypatch.setattr("eagle3_ray.drafter.loss.CHUNK_ELEMENTS", 30 * 14)
    hidden, weight, target, head, _, _ = given()
    row, hidden = torch.arange(8).repeat(7), hidden[torch.arange(56) % 23]

    def losses(_kind: str, goal: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(len(logits))
        return goal[:, 0], torch.zeros(len(goal), dtype=torch.int64), logits

    monkeypatch.setattr("eagle3_ray.drafter.loss._slot_losses", losses)
    FusedLoss.apply(hidden, weight, target, head, row, torch.ones(56, dtype=torch.float64), "soft_ce")
    assert seen == [14, 14, 14, 14]
