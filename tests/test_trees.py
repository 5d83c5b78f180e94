"""Simulated draft trees against a plain one, grown token by token by a drafter with a KV cache, node by node in Python.

What SGLang drafts is in `test_served_drafts.py`: the same trees, from its scheduler.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import pytest
import reference_drafter
import torch
from test_simulate import conversation, greedy
from test_train import TARGET, counting, pieces, positions, training

from eagle3_ray.config import DrafterConfig, Drafting
from eagle3_ray.drafter.loss import walk
from eagle3_ray.drafter.model import Batch, Drafter
from eagle3_ray.drafter.shape import drafter_config
from eagle3_ray.drafter.target import initialise
from eagle3_ray.store.shards import Features
from eagle3_ray.train.features import batches
from eagle3_ray.train.simulate import simulate, totals
from eagle3_ray.train.trees import Grower, Trees, tree_hits

IDS = torch.arange(32) * 3 // 2 + 1  # the draft vocabulary: target ids 1 to 47, none equal to its draft id but two
TREES = [Drafting(3, 2, 6), Drafting(4, 3, 8), Drafting(2, 4, 21), Drafting(1, 5, 4), Drafting(3, 1, 4)]
SHAPES = {
    "plain": DrafterConfig(),
    "3.1": DrafterConfig(fc_norm=True, norm_output=True),
    "two layers": DrafterConfig(num_hidden_layers=2),
    "mla": DrafterConfig(attention="mla"),
}


class Node(NamedTuple):
    """A candidate of the plain tree."""

    probability: float  # of the whole path
    path: tuple[int, ...]  # the target's ids, from the root's first draft
    parent: int  # candidate


def noisy(shape: DrafterConfig) -> Drafter:
    """Random enough that no two beams are alike, and every beam's keys matter."""
    drafter = Drafter(drafter_config(shape, TARGET, num_aux=3, draft_vocab_size=len(IDS)), IDS)
    initialise(drafter, pieces(), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name != "embed_tokens.weight":
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return drafter


Root = tuple[reference_drafter.Cache, torch.Tensor, torch.Tensor]  # keys and values, the output, the same normed


@torch.no_grad()
def plain_roots(drafter: Drafter, ids: list[int], aux: torch.Tensor) -> list[Root]:
    """What is known at every slot of x_0..x_n before it drafts; aux [n, 3H]."""
    weights, config = drafter.state_dict(), drafter.config.to_dict()
    cache: reference_drafter.Cache = [[] for _ in range(config["num_hidden_layers"])]
    roots = []
    for slot, token in enumerate(ids[1:]):
        projected = reference_drafter.project(weights, config, aux[slot])
        out = reference_drafter.token(weights, config, cache, token, projected, slot)
        roots.append(([list(layer) for layer in cache], *out))
    return roots


@torch.no_grad()
def plain_tree(drafter: Drafter, root: Root, drafting: Drafting) -> tuple[list[Node], list[int]]:
    """All candidates behind a slot, and the numbers of those that are verified."""
    weights, config = drafter.state_dict(), drafter.config.to_dict()
    head, draft_ids = weights["lm_head.weight"], drafter.draft_ids.tolist()
    cache, hidden, normed = root
    slot = len(cache[0]) - 1
    caches = [[list(layer) for layer in cache] for _ in range(drafting.topk)]  # one for each place
    nodes: list[Node] = []
    beams = [(1.0, (), -1, hidden, normed)]
    for step in range(drafting.num_steps):
        first, parents = len(nodes), []
        for probability, path, number, hidden, normed in beams:
            shares = (head @ normed).softmax(0).tolist()
            for best in sorted(range(len(shares)), key=lambda i: -shares[i])[: drafting.topk]:
                nodes.append(Node(probability * shares[best], (*path, draft_ids[best]), number))
                parents.append(normed if config["norm_output"] else hidden)
        new = range(first, len(nodes))
        beams = []
        for place, number in enumerate(sorted(new, key=lambda i: -nodes[i].probability)[: drafting.topk]):
            node, given = nodes[number], parents[number - first]
            out = reference_drafter.token(weights, config, caches[place], node.path[-1], given, slot + 1 + step)
            beams.append((node.probability, node.path, number, *out))
    likeliest = sorted(range(len(nodes)), key=lambda i: -nodes[i].probability)
    return nodes, sorted(likeliest[: drafting.num_draft_tokens - 1])


def batch_of(*numbers: int) -> Batch:
    (batch,) = batches([counting(number) for number in numbers], 10**6, torch.float32)
    return batch


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_trees_are_those_of_a_plain_loop(name: str) -> None:
    drafter, batch = noisy(SHAPES[name]), batch_of(4, 5)
    first, end = batch.bounds()[1:].tolist()
    slots = [0, 2, 5, first, end - 2]  # of both samples
    ids, ends = batch.input_ids.tolist(), batch.bounds().tolist()
    roots = [
        root
        for start, stop in zip(ends, ends[1:], strict=False)
        for root in [*plain_roots(drafter, ids[start:stop], batch.aux[start:stop]), None]  # of the last token none
    ]
    for drafting in TREES:
        trees = Grower(drafter, batch).grow(torch.tensor(slots), drafting)
        for i, slot in enumerate(slots):
            nodes, kept = plain_tree(drafter, roots[slot], drafting)
            assert trees.tokens[i].tolist() == [node.path[-1] for node in nodes]
            assert trees.parents[i].tolist() == [node.parent for node in nodes]
            assert trees.kept[i].tolist() == kept
            assert trees.verified()[i].tolist() == [nodes[number].path[-1] for number in kept]


def followed(paths: set[tuple[int, ...]], said: list[int]) -> int:
    return max((n for n in range(len(said) + 1) if all(tuple(said[:k]) in paths for k in range(1, n + 1))), default=0)


@torch.no_grad()
def test_the_accepted_length_is_the_deepest_verified_path_that_was_said() -> None:
    drafter, drafting = noisy(DrafterConfig()), Drafting(3, 3, 7)
    sample = counting(4)
    ids = sample.input_ids.tolist()
    (batch,) = batches([sample], 10**6, torch.float32)
    roots, slots = plain_roots(drafter, ids, batch.aux), list(range(3, len(ids) - 4))
    trees, seen = Grower(drafter, batch).grow(torch.tensor(slots), drafting), set()
    for i, slot in enumerate(slots):
        nodes, kept = plain_tree(drafter, roots[slot], drafting)
        paths = {nodes[number].path for number in kept}
        row = Trees(*(tensor[i : i + 1] for tensor in trees))
        for node in nodes:  # every path there is, verified or not, and each gone astray at its end
            for said in (list(node.path), [*node.path[:-1], 0]):
                padded = (said + [-1] * 3)[:3]
                expected = followed(paths, said)
                assert int(row.accepted(torch.tensor([padded]))) == expected
                seen.add((expected, len(said)))
    assert {(0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)} <= seen


def test_a_draft_behind_one_that_is_not_verified_is_never_accepted() -> None:
    """Where scores are equal, a candidate may be kept without its parent: no list leads there."""
    trees = Trees(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-1, -1, 0, 0]]), torch.tensor([[1, 2]]))
    assert trees.accepted(torch.tensor([[5, 7], [6, 7]])[:1]).tolist() == [0]
    assert trees.accepted(torch.tensor([[6, 7]])).tolist() == [1]


def serve(drafter: Drafter, sample: Features, drafting: Drafting) -> tuple[int, int]:
    """Completion tokens and verify steps, each step with a plain tree of its own."""
    ids, mask = sample.input_ids.tolist(), [*sample.loss_mask.tolist(), False]
    roots = plain_roots(drafter, ids, sample.aux)
    tokens = verified = 0
    for start in range(1, len(ids)):
        if not mask[start] or mask[start - 1]:
            continue
        end = mask.index(False, start)
        tokens, last = tokens + end - start, start  # the first comes from prefill
        while last + 1 < end:
            nodes, kept = plain_tree(drafter, roots[last - 1], drafting)
            last += followed({nodes[number].path for number in kept}, ids[last + 1 : end]) + 1
            verified += 1
    return tokens, verified


@pytest.fixture(scope="module")
def trained() -> tuple[Drafter, list[Features]]:
    """A drafter that is right now and then, and greedy answers of one and of two turns."""
    trainer = training(steps=25)
    for share in islice(positions(trainer.config, [24], 0, 1, 0), 25):
        trainer.step([counting(i) for _, i in share])
    made = [counting(number) for number in range(24, 44) if number % 7 != 3]
    made += [conversation(number) for number in range(64, 84) if number % 7 != 3]
    return trainer.drafter, [sample for sample in made if greedy(sample)]


def test_the_walk_over_trees_takes_the_steps_that_serving_takes(trained: tuple[Drafter, list[Features]]) -> None:
    drafter, samples = trained
    lengths = []
    for drafting in (Drafting(3, 1, 4), Drafting(3, 2, 4), Drafting(3, 3, 12)):
        walked = simulate(drafter, iter(samples[::3]), pieces().head, drafting)
        counts = [(one.completion_tokens, one.verify_steps) for one in walked]
        assert counts == [serve(drafter, sample, drafting) for sample in samples[::3]]
        lengths.append(totals(walked)["accept_length"])
    assert 1.2 < lengths[0] < lengths[2] < 4
    assert lengths[1] != lengths[0]


def test_a_tree_of_one_branch_is_the_chain(trained: tuple[Drafter, list[Features]]) -> None:
    drafter, samples = trained
    for steps in (1, 3, 5):
        chain = Drafting(steps, 1, steps + 1)
        for sample, one in zip(samples, simulate(drafter, samples, pieces().head, chain), strict=True):
            (batch,) = batches([sample], 10**6, torch.float32)
            counts = walk(tree_hits(drafter, batch, chain), batch.loss_mask, steps)
            assert counts == (one.completion_tokens, one.verify_steps)
