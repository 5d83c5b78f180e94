"""Attention's fast paths against the dense definition: values, gradients, packed samples, what is kept."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module

from eagle3_ray.drafter import attention
from eagle3_ray.drafter.attention import attend, eager

LENGTHS = [10, 4, 7]


def inputs(slots: list[int], steps: int, kv: int = 2, dv: int = 8) -> tuple[list[Any], list[Tensor]]:
    """Of `attend`, in fp64, for three samples end to end; and those of them that have a gradient."""
    n, heads, d = len(slots), 6, 8
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)

    query, key, value = random(n, heads, d), random(sum(LENGTHS), kv, d), random(sum(LENGTHS), kv, dv)
    own = [(random(n, kv, d), random(n, kv, dv)) for _ in range(steps)]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    given = [query, torch.tensor(slots, dtype=torch.int64), key, value, own, bounds]
    return given, [query, key, value, *(tensor for pair in own for tensor in pair)]


def values_and_gradients(function: Any, given: list[Any], leaves: list[Tensor], **more: Any) -> list[Tensor]:
    out = function(*given, **more)
    weigh = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad((out * weigh).sum(), leaves, allow_unused=True)
    return [out, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]


def assert_equal(fast: list[Tensor], slow: list[Tensor]) -> None:
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


def test_the_definition_by_hand():
    """One head of one dimension, in numbers: a sample of two tokens behind one of one; slot 2 at step 1."""
    query, slots = torch.tensor([[[2.0]]]), torch.tensor([2])
    key, value = torch.tensor([[[9.0]], [[0.5]], [[1.0]]]), torch.tensor([[[9.0]], [[10.0]], [[20.0]]])
    own = [(torch.tensor([[[-1.0]]]), torch.tensor([[[40.0]]]))]
    weights = [math.exp(2 * 0.5), math.exp(2 * 1.0), math.exp(2 * -1.0)]
    expected = sum(w * v for w, v in zip(weights, [10, 20, 40], strict=True)) / sum(weights)
    for function in (eager, attend):
        assert function(query, slots, key, value, own, torch.tensor([0, 1, 3])).item() == pytest.approx(expected)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("slots", [[0, 3, 4, 9, 11, 15, 20], [2], [13, 14], []], ids=str)
@pytest.mark.parametrize("chunk", [1, 80, 2**19])
def test_attention_equals_the_dense_definition(
    slots: list[int], steps: int, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention, "CHUNK_ELEMENTS", chunk)
    given, leaves = inputs(slots, steps)
    assert_equal(values_and_gradients(attend, given, leaves), values_and_gradients(eager, given, leaves))


@pytest.mark.parametrize(("kv", "dv", "scale"), [(6, 8, None), (1, 8, 0.7), (2, 5, None), (6, 12, 0.1)])
def test_any_grouping_value_width_and_scale(kv: int, dv: int, scale: float | None):
    given, leaves = inputs([1, 2, 8, 12, 19], 2, kv, dv)
    fast = values_and_gradients(attend, given, leaves, scale=scale)
    assert fast[0].shape == (5, 6 * dv)
    assert_equal(fast, values_and_gradients(eager, given, leaves, scale=scale))


def test_scores_of_own_keys_are_not_rounded_to_bfloat16():
    """Autocast would: raw scores in the hundreds then stand in steps of 1 or 2. The output alone is rounded."""
    n, heads, d = 40, 6, 64
    generator = torch.Generator().manual_seed(0)
    query, *rest = (4 * torch.randn(n, heads, d, generator=generator).bfloat16() for _ in range(6))
    out, own, lse = rest[0], [(rest[1], rest[2]), (rest[3], rest[4])], torch.full((n, heads), 20.0)
    with torch.autocast("cpu", torch.bfloat16):
        merged = attention._merge(out, lse, query, own, d**-0.5)
    exact = (x.double() for x in (out, lse, query))
    exact_own = [(k.double(), v.double()) for k, v in own]
    expected = attention._merge(*exact, exact_own, d**-0.5)
    assert (merged - expected).abs().max() < 0.006 * expected.abs().max()  # rounded, they are 0.010 off


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("kv", "dv"), [(2, 8), (6, 8), (1, 5)])
def test_flex_attention_equals_the_dense_definition(kv: int, dv: int, steps: int, monkeypatch: pytest.MonkeyPatch):
    """The GPU's path on FlexAttention's own dense fallback, which has a gradient; its CPU kernels have none."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention._Causal, "apply", lambda *given: attention._flex(*given))
    given, leaves = inputs([0, 3, 4, 9, 11, 15, 20], steps, kv, dv)
    assert_equal(values_and_gradients(attend, given, leaves), values_and_gradients(eager, given, leaves))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("kv", "dv"), [(2, 64), (6, 64), (1, 32)])
def test_compiled_flex_attention_on_a_gpu(kv: int, dv: int):
    generator = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0, 300, 301, 900])
    for stride in (1, 2, 7, 100):  # no two steps have the same shape
        slots = torch.arange(5, 900, stride)
        n = len(slots)
        shapes = [(n, 6, 64), (900, kv, 64), (900, kv, dv), (n, kv, 64), (n, kv, dv)]
        leaves = [torch.randn(shape, generator=generator) for shape in shapes]
        results = []
        for function, device, dtype in ((attend, "cuda", torch.float32), (eager, "cpu", torch.float64)):
            moved = [x.to(device, dtype).requires_grad_() for x in leaves]
            own = [(moved[3], moved[4])] * 2
            given = [moved[0], slots.to(device), moved[1], moved[2], own, bounds.to(device)]
            out = function(*given)
            results.append([out, *torch.autograd.grad((out**2).sum(), moved)])
        for fast, slow in zip(*results, strict=True):
            torch.testing.assert_close(fast.cpu().double(), slow, atol=2e-2, rtol=2e-2)  # TF32


def test_bfloat16_is_as_near_as_its_rounding():
    given, leaves = inputs([0, 3, 4, 9, 11, 15, 20], 3)
    slow = values_and_gradients(eager, given, leaves)
    half = [x.detach().bfloat16().requires_grad_() for x in leaves]
    own = [(half[i], half[i + 1]) for i in range(3, len(half), 2)]
    out = values_and_gradients(attend, [half[0], given[1], half[1], half[2], own, given[5]], half)
    for a, b in zip(out, slow, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b, atol=0.08, rtol=0.05)


def test_no_scores_are_kept_for_the_backward_pass():
    n, heads, d = 3000, 2, 4
    query, key = torch.randn(n, heads, d, requires_grad=True), torch.randn(n, 1, d, requires_grad=True)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(query, torch.arange(n), key, key, [(key, key)], torch.tensor([0, n]))
    assert kept and max(kept) <= n * heads * d  # all scores would be n * n * heads
