"""The hooks of a served drafter, on batches made by hand: rows, tokens, RoPE positions, and what is wrong with them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_ray.engines import sglang_served
from eagle3_ray.engines.base import Response
from eagle3_ray.engines.sglang_plugin import WATCH_VARIABLE
from eagle3_ray.engines.sglang_served import WATCHED, Watched, accepted_rows, drafts, forward_pass, prompt_rows, read
from eagle3_ray.proof import as_stored, beside, compare
from eagle3_ray.store.shards import Features

X = list(range(100, 120))  # one sequence; the state of x_q is filled with q
REQUESTS = [SimpleNamespace(rid=rid, output_ids=[X[6]]) for rid in ("someone else's", f"{WATCHED}a")]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(WATCH_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sglang_served, "streams", lambda: True)
    return tmp_path


def run(positions: Tensor, logits: Tensor | None = None) -> None:
    """The drafter's forward pass, which counts on in its own tensor, and whose logits become probabilities later."""
    output = SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits))

    def forward(_: Any, batch: Any) -> Any:
        batch.positions.add_(1)
        return output

    forward_pass(forward, None, SimpleNamespace(positions=positions))
    if logits is not None:
        logits.zero_()


def states(slots: range) -> Tensor:
    return torch.tensor(slots).float()[:, None].expand(-1, 4)  # [n, W]


def serve(prompt: int, accepted: int, shift: int = 0, topk: int = 2) -> None:
    """A prompt in two chunks beside another request, a verify step of 3 tokens, and two draft steps of `topk` paths."""

    def extend(_: Any, batch: Any, __: Tensor) -> Any:
        run(
            torch.cat(
                [torch.arange(2), torch.arange(batch.prefix_lens[1], batch.prefix_lens[1] + batch.extend_lens[1])]
            )
            + shift,
            torch.tensor([[1.0, 2.0], [batch.prefix_lens[1], 4.0]]),
        )

    for start, end in ((0, prompt // 2), (prompt // 2, prompt)):
        ids = torch.tensor([0, 0, *X[start + 1 : end + 1]])
        batch = SimpleNamespace(reqs=REQUESTS, prefix_lens=[0, start], extend_lens=[2, end - start], input_ids=ids)
        prompt_rows(extend, None, batch, torch.cat([torch.zeros(2, 4), states(range(start, end))]))
    worker = SimpleNamespace(speculative_num_draft_tokens=3, topk=topk)
    batch = SimpleNamespace(reqs=REQUESTS, seq_lens=torch.tensor([5, prompt]))
    tree = SimpleNamespace(draft_token=torch.arange(6))

    def draft(*_: Any) -> Any:
        at = batch.seq_lens.repeat_interleave(topk) + shift
        for step in (5.0, 6.0):
            run(at, torch.stack([torch.zeros(2), torch.full([2], step)]).repeat_interleave(topk, 0))
        return tree

    drafts(draft, worker, batch)
    result = SimpleNamespace(
        accept_lens=torch.tensor([1, accepted]),
        next_token_ids=torch.tensor([0, 0, 0, *X[prompt + 1 : prompt + 4]]),
        logits_output=SimpleNamespace(hidden_states=torch.cat([torch.zeros(3, 4), states(range(prompt, prompt + 3))])),
    )

    def decode(_: Any, batch: Any, result: Any) -> None:
        batch.seq_lens = result.next_token_ids = None
        run(torch.cat([torch.arange(5, 8), torch.arange(prompt, prompt + 3)]) + shift)

    accepted_rows(decode, worker, batch, result)


def test_each_row_has_its_slot_its_token_and_its_position(folder: Path) -> None:
    serve(prompt=6, accepted=2)
    assert {path.name.split(".")[0] for path in folder.iterdir()} == {f"{WATCHED}a"}
    seen = read(folder, f"{WATCHED}a")
    assert seen.at.tolist() == seen.positions.tolist() == seen.states[:, 0].tolist() == list(range(8))
    assert seen.ids.tolist() == X[1:9]
    assert seen.verified.tolist() == [False] * 6 + [True] * 2
    assert seen.drafted == [(6, [3, 4, 5], [[6, 6], [7, 7]], None)]
    assert seen.logits.tolist() == [[3.0, 4.0]]
    assert list(folder.iterdir()) == []
    told = beside([(X, seen)])
    assert told["prompt"] == {"rows": 6, "wrong_tokens": 0, "shifts": {"0": 6}}
    assert told["verify"] == {"rows": 2, "wrong_tokens": 0, "shifts": {"0": 2}}
    assert told["draft"] == {"rows": 4, "wrong_tokens": 0, "shifts": {"0": 4}}


def test_the_first_chain_has_the_logits_of_its_steps(folder: Path) -> None:
    serve(prompt=6, accepted=2, topk=1)
    ((*_, logits),) = read(folder, f"{WATCHED}a").drafted
    assert logits.tolist() == [[5.0, 5.0], [6.0, 6.0]]


def test_positions_are_the_forward_passs_own(folder: Path) -> None:
    serve(prompt=6, accepted=3, shift=1)
    told = beside([(X, read(folder, f"{WATCHED}a"))])
    assert [told[kind]["shifts"] for kind in ("prompt", "verify", "draft")] == [{"1": 6}, {"1": 3}, {"1": 4}]
    assert [told[kind]["wrong_tokens"] for kind in ("prompt", "verify")] == [0, 0]


def test_tokens_are_compared_as_far_as_the_sequence_is_known() -> None:
    at = torch.arange(4)
    seen = Watched(at, at, torch.tensor([101, 7, 103, 104]), states(range(4)), at > 2, [], None)
    assert beside([(X[:4], seen)])["prompt"] == {"rows": 3, "wrong_tokens": 1, "shifts": {"0": 3}}
    assert beside([(X[:4], seen)])["verify"]["wrong_tokens"] == 0  # x_4 is not known


def test_a_drafter_that_runs_by_another_way_is_an_error(folder: Path) -> None:
    batch = SimpleNamespace(reqs=REQUESTS, seq_lens=torch.tensor([5, 6]))
    result = SimpleNamespace(
        accept_lens=torch.ones(2).int(),
        next_token_ids=torch.arange(2),
        logits_output=SimpleNamespace(hidden_states=torch.zeros(2, 4)),
    )
    accepted_rows(lambda *_: None, SimpleNamespace(speculative_num_draft_tokens=1), batch, result)
    with pytest.raises(RuntimeError, match="a verify of request watched-a has no positions"):
        read(folder, f"{WATCHED}a")


def test_a_verify_step_is_held_against_the_store_and_then_against_the_same_answer_as_a_prompt() -> None:
    def watched(ids: list[int], first: int, offset: int = 0) -> Watched:
        """Of a sequence whose tokens from `first` on a verify step accepted: the state of slot q is filled with q."""
        at = torch.arange(len(ids) - 1)
        seen = states(range(offset, offset + len(ids) - 1))
        return Watched(at, at, torch.tensor(ids[1:]), seen, at >= first, [], None)

    stored, said = X[:8], [*X[:6], 1, 2, 3]  # the answer, from token 4 on, leaves the stored one at token 6
    sample = Features("a", torch.tensor(stored), torch.zeros(8), states(range(8)), torch.empty(0, 4), torch.empty(0))
    kept = partial(as_stored, dtype="float32", boundaries=1)
    whole, again = watched([*stored, 0], 8), watched([*stored, 0], 8)
    answer, other = Response(said[4:8], "length", {}), watched([*said[:7], 9, 9], 4)
    given = [(0, X[:4])], kept, [whole], [again], [(answer, watched(said, 4))], [(answer, other)]
    found = compare([sample], *given, [watched([*said, 0], 9, offset=100)])
    assert found["rows"] == {"prompt": 8, "verify": 4, "verify_stored": 2}  # slots 4 to 7, of which 4 and 5
    wrong = [100 / 106, 100 / 107]  # slots 6 and 7, against those of the prompt
    assert found["errors"]["verify"]["median"] == [pytest.approx((0 + min(wrong)) / 2, abs=0.02)]
    assert found["errors"]["verify"]["p95"] == [pytest.approx(max(wrong), abs=0.02)]
    assert found["errors"]["prompt"] == {"median": [0.0], "p95": [0.0]}
    assert found["floor"]["verify"] == {"median": [0.0], "p95": [0.0]}  # slots 4 to 6, before the other one's own token
    assert found["by_sample"] == [{"id": "a", "error": 0.0}]
