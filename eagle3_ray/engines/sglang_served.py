"""Runs inside SGLang's scheduler, of an engine that serves a drafter: writes down what the drafter really gets.

Hooks, all outside of CUDA graphs, which stay on. They act on requests whose id begins with WATCHED, and on no other:

  EagleDraftWorker._draft_extend_for_prefill   the rows of a prompt, chunk by chunk
  EagleDraftWorker._draft_extend_for_decode    the rows of the tokens that a verify step accepted
  EagleDraftWorker.draft                       what was drafted for a verify step
  ModelRunner.forward, the graph runners' execute
                                               within those: the positions that the drafter's forward batch carries, and
                                               the logits it gives
  Scheduler.get_init_info                      once, when the scheduler is up: what is in force (`facts`)

Row q of a request is what the drafter gets for slot q: the token x_{q+1}, the position q, and the states of x_q. Which
slot a row is of, the batch's lengths tell; its position is what the forward batch says, which training has to share.
Each call leaves a safetensors file <folder>/<rid>.<number>; `read` puts a request's files together, in the actor.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_ray.engines.sglang_plugin import TO_ANSWER, WATCH_VARIABLE, streams

WATCHED = "watched-"
WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
PASSES = (  # where a forward batch goes to the drafter: as it is, or into a CUDA graph
    "sglang.srt.model_executor.model_runner.ModelRunner.forward",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.execute",
    "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner.execute",
)
ROWS = 64  # of the embedding and of the head that are compared
_numbers = itertools.count()


class Pass(NamedTuple):
    """A forward pass of the drafter; a CUDA graph of several draft steps counts as one."""

    positions: Tensor  # [N], of its first step
    logits: Tensor | None  # [rows that are drafted from, Vd], where it gives them


_passes: list[Pass] | None = None  # each forward pass so far of the call that is watched


# ---------------------------------------------------------------- in the scheduler


def load() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{WORKER}._draft_extend_for_prefill", prompt_rows, HookType.AROUND)
    HookRegistry.register(f"{WORKER}._draft_extend_for_decode", accepted_rows, HookType.AROUND)
    HookRegistry.register(f"{WORKER}.draft", drafts, HookType.AROUND)
    for target in PASSES:
        HookRegistry.register(target, forward_pass, HookType.AROUND)
    HookRegistry.register(TO_ANSWER, answer, HookType.AFTER)


def forward_pass(original: Any, self: Any, forward_batch: Any, *args: Any, **options: Any) -> Any:
    if _passes is None:
        return original(self, forward_batch, *args, **options)
    positions = forward_batch.positions.clone()  # draft steps count on in the same tensor
    returned = original(self, forward_batch, *args, **options)
    logits = getattr(getattr(returned, "logits_output", returned), "next_token_logits", None)
    _passes.append(Pass(positions, None if logits is None else logits.clone()))  # SGLang may reuse it for probabilities
    return returned


@contextlib.contextmanager
def _watching(requests: list[Any]) -> Iterator[list[Pass]]:
    """The drafter's forward passes until the end; none where no request is watched."""
    global _passes
    found: list[Pass] = []
    _passes = found if any(map(_is_watched, requests)) else None
    try:
        yield found
    finally:
        _passes = None


def prompt_rows(original: Any, self: Any, batch: Any, states: Tensor, *args: Any, **options: Any) -> Any:
    """states [N, W] of the batch's requests, end to end; after the call batch.input_ids are what the drafter took."""
    with _watching(batch.reqs) as passes:
        drafted = original(self, batch, states, *args, **options)
    start = 0
    for i, (request, before, length) in enumerate(zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)):
        rows = slice(start, start + length)
        if _is_watched(request):
            _write(
                request,
                "prompt",
                before,
                batch.input_ids[rows],
                states[rows],
                **_of(passes, rows),
                **_logits(passes, i),
            )
        start += length
    return drafted


def accepted_rows(original: Any, self: Any, batch: Any, result: Any, **options: Any) -> Any:
    """The verified rows [B * D, W] of result, the accepted ones of each request in front."""
    watched = [i for i, request in enumerate(batch.reqs) if _is_watched(request)]
    rows: dict[int, slice] = {}
    before: dict[int, tuple[int, Tensor, Tensor]] = {}  # before the call, which may change what batch and result hold
    for i in watched:
        start = i * self.speculative_num_draft_tokens
        rows[i] = slice(start, start + int(result.accept_lens[i]))
        got = result.logits_output.hidden_states[rows[i]].clone()
        before[i] = int(batch.seq_lens[i]), result.next_token_ids[rows[i]].clone(), got
    with _watching(batch.reqs) as passes:
        returned = original(self, batch, result, **options)
    for i in watched:
        length, ids, states = before[i]
        _write(batch.reqs[i], "verify", length, ids, states, **_of(passes, rows[i]))
    return returned


def drafts(original: Any, self: Any, batch: Any, **options: Any) -> Any:
    """The drafted tree's tokens: the root, which the target said, and D - 1 drafts; and where each draft step was.

    Of the first tree behind a prompt, where it is a chain, also the logits of the steps after the first.
    """
    watched = [(i, request) for i, request in enumerate(batch.reqs) if _is_watched(request)]
    lengths = batch.seq_lens.tolist() if watched else []  # before the call, which may change them
    with _watching(batch.reqs) as passes:
        verify = original(self, batch, **options)
    for i, request in watched:
        drafted = (verify[0] if isinstance(verify, tuple) else verify).draft_token.view(len(batch.reqs), -1)
        paths = len(batch.reqs) * self.topk
        steps = [one.positions[:paths].view(len(batch.reqs), -1)[i] for one in passes]  # [k] each
        at = torch.stack(steps) if steps else torch.empty(0, self.topk, dtype=torch.int64)
        first = self.topk == 1 and len(request.output_ids) <= 1
        _write(request, "draft", lengths[i], drafted[i], positions=at, **(_logits(passes, i) if first else {}))
    return verify


def answer(result: Any, scheduler: Any) -> None:
    """Leave <folder>/<pid>.facts. Only the first rank does: its shards of embedding and head begin at row 0."""
    from sglang.srt.runtime_context import get_parallel

    folder = os.environ[WATCH_VARIABLE]
    if get_parallel().tp_rank or not os.path.isdir(folder) or scheduler.draft_worker is None:
        return
    path = os.path.join(folder, f"{os.getpid()}.facts")
    tensors, told = facts(scheduler)
    save_file(tensors, path + ".tmp", {"told": json.dumps(told)})
    os.replace(path + ".tmp", path)


def facts(scheduler: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What is in force: some rows of embedding and head (this rank's share of them), the draft vocabulary, and more."""
    drafting = scheduler.draft_worker.draft_worker
    target, drafter = scheduler.tp_worker.model_runner.model, drafting.draft_runner.model
    tensors: dict[str, Tensor] = {}
    for name, end in (("embedding", "embed_tokens.weight"), ("head", "lm_head.weight")):
        found = [p for key, p in drafter.named_parameters(remove_duplicate=False) if key.endswith(end)]
        if found and found[0].is_floating_point() and found[0].dim() == 2:
            at = torch.linspace(0, len(found[0]) - 1, min(ROWS, len(found[0]))).long()
            tensors |= {f"{name}.at": at, name: found[0].detach()[at.to(found[0].device)].cpu()}  # [n], [n, H]
    if drafting.hot_token_id is not None:
        tensors["draft_ids"] = drafting.hot_token_id.cpu().clone()  # [Vd]
    layers = [getattr(module, "layers_to_capture", None) for module in target.modules()]
    return tensors, {
        "algorithm": scheduler.spec_algorithm.name,
        "layers_to_capture": next((list(found) for found in layers if found), []),
        "target": type(target).__name__,
        "target_dtype": str(scheduler.tp_worker.model_runner.dtype).removeprefix("torch."),
        "drafter": type(drafter).__name__,
        "drafter_dtype": str(drafting.draft_runner.dtype).removeprefix("torch."),
    }


def _is_watched(request: Any) -> bool:
    return str(request.rid).startswith(WATCHED) and streams()


def _of(passes: list[Pass], rows: slice) -> dict[str, Tensor]:
    """The positions of rows in the one pass there is; nothing where it was not seen, which `read` says."""
    return {"positions": passes[0].positions[rows]} if passes else {}


def _logits(passes: list[Pass], request: int) -> dict[str, Tensor]:
    """The logits [steps, Vd] of passes that give a row for each request; nothing where one gives none."""
    rows = [one.logits[request] for one in passes if one.logits is not None]
    return {"logits": torch.stack(rows).float()} if rows and len(rows) == len(passes) else {}


def _write(request: Any, kind: str, start: int, ids: Tensor, states: Tensor | None = None, **more: Tensor) -> None:
    tensors = {"ids": ids, "start": torch.tensor([start]), **more} | ({} if states is None else {"states": states})
    path = os.path.join(os.environ[WATCH_VARIABLE], f"{request.rid}.{next(_numbers):08d}")
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, path, {"kind": kind})


# ---------------------------------------------------------------- in the actor


class NothingWritten(RuntimeError):
    """The engine drafts in a way that the hooks do not see."""


class Drafted(NamedTuple):
    """What was drafted for one verify step."""

    length: int  # of the sequence before it
    ids: list[int]  # the root, and the drafts
    positions: list[list[int]]  # of each draft step that was seen, one a path: [steps, k]
    logits: Tensor | None  # [steps, Vd] of those steps, of the first chain behind a prompt


@dataclass
class Watched:
    """What the drafter got for one request. Slots that came out of a prefix cache are missing."""

    at: Tensor  # [n] int64, ascending: the slots
    positions: Tensor  # [n] int64: where RoPE puts each
    ids: Tensor  # [n] int64: the token of each, which is the next one of the sequence
    states: Tensor  # [n, W]
    verified: Tensor  # [n] bool: the row came from a verify step, not from the prompt
    drafted: list[Drafted]
    logits: Tensor | None  # [1, Vd] of the first draft behind the prompt


def read(folder: Path, rid: str) -> Watched:
    """A request's files, which are then deleted. NothingWritten where they do not say what is wanted."""
    rows: dict[int, tuple[Tensor, Tensor, Tensor, bool]] = {}
    drafted, logits = list[Drafted](), None
    for path in sorted(folder.glob(f"{rid}.*")):
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            kind = file.metadata()["kind"]
        path.unlink()
        start, ids = int(tensors["start"]), tensors["ids"].long()
        if "positions" not in tensors:
            raise NothingWritten(f"a {kind} of request {rid} has no positions: the drafter is run by none of {PASSES}")
        positions = tensors["positions"].long()
        if kind == "draft":
            drafted.append(Drafted(start, ids.tolist(), positions.tolist(), tensors.get("logits")))
            continue
        if kind == "prompt":
            logits = tensors.get("logits")
        for i, (token, state, position) in enumerate(zip(ids, tensors["states"], positions, strict=True)):
            rows[start + i] = token, state, position, kind == "verify"
    if not rows:
        raise NothingWritten(f"nothing of request {rid} was written down: the engine drafts with no EagleDraftWorker")
    at = sorted(rows)
    return Watched(
        at=torch.tensor(at),
        positions=torch.stack([rows[slot][2] for slot in at]),
        ids=torch.stack([rows[slot][0] for slot in at]),
        states=torch.stack([rows[slot][1] for slot in at]),
        verified=torch.tensor([rows[slot][3] for slot in at]),
        drafted=drafted,
        logits=logits,
    )


def read_facts(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What one scheduler left of `facts`; NothingWritten where none did."""
    for path in sorted(folder.glob("*.facts")):
        with safe_open(path, "pt") as file:
            return load_file(path), json.loads(file.metadata()["told"])
    raise NothingWritten("no scheduler says what its drafter is: SGLang loaded no plugin, or serves no drafter")
