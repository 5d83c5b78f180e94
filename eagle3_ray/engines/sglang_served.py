"""Runs inside SGLang's scheduler, of an engine that serves a drafter: writes down what the drafter really gets.

Hooks, all outside of CUDA graphs, which stay on. They act on requests whose id begins with WATCHED, and on no other:

  EagleDraftWorker._draft_extend_for_prefill   the rows of a prompt, chunk by chunk
  EagleDraftWorker._draft_extend_for_decode    the rows of the tokens that a verify step accepted
  EagleDraftWorker.draft                       what was drafted for a verify step
  Scheduler.get_init_info                      once, when the scheduler is up: what is in force (`facts`)

Row q of a request is what the drafter gets for slot q: the token x_{q+1}, the position q, and the states of x_q. Each
call leaves a safetensors file <folder>/<rid>.<number>; `read` puts a request's files together, in the actor.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_ray.engines.sglang_plugin import TO_ANSWER, WATCH_VARIABLE, streams

WATCHED = "watched-"
WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
ROWS = 64  # of the embedding and of the head that are compared
_numbers = itertools.count()


# ---------------------------------------------------------------- in the scheduler


def load() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{WORKER}._draft_extend_for_prefill", prompt_rows, HookType.AROUND)
    HookRegistry.register(f"{WORKER}._draft_extend_for_decode", accepted_rows, HookType.AROUND)
    HookRegistry.register(f"{WORKER}.draft", drafts, HookType.AROUND)
    HookRegistry.register(TO_ANSWER, answer, HookType.AFTER)


def prompt_rows(original: Any, self: Any, batch: Any, states: Tensor, *args: Any, **options: Any) -> Any:
    """states [N, W] of the batch's requests, end to end; after the call batch.input_ids are what the drafter took."""
    drafted = original(self, batch, states, *args, **options)
    start = 0
    for i, (request, before, length) in enumerate(zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)):
        end = start + length
        if _is_watched(request):
            best = {"id": drafted.topk_index[i, :1], "probability": drafted.topk_p[i, :1].float()}  # of the last row
            _write(request, "prompt", before, batch.input_ids[start:end], states[start:end], **best)
        start = end
    return drafted


def accepted_rows(original: Any, self: Any, batch: Any, result: Any, **options: Any) -> Any:
    """The verified rows [B * D, W] of result, the accepted ones of each request in front."""
    watched = [i for i, request in enumerate(batch.reqs) if _is_watched(request)]
    if watched:
        starts, accepted = batch.seq_lens.tolist(), result.accept_lens.tolist()
        width = self.speculative_num_draft_tokens
        for i in watched:
            rows = slice(i * width, i * width + accepted[i])
            states = result.logits_output.hidden_states[rows]
            _write(batch.reqs[i], "verify", starts[i], result.next_token_ids[rows], states)
    return original(self, batch, result, **options)


def drafts(original: Any, self: Any, batch: Any, **options: Any) -> Any:
    """The drafted tree's tokens: the root, which the target said, and D - 1 drafts."""
    watched = [(i, request) for i, request in enumerate(batch.reqs) if _is_watched(request)]
    lengths = batch.seq_lens.tolist() if watched else []  # before the call, which may change them
    verify = original(self, batch, **options)
    for i, request in watched:
        drafted = (verify[0] if isinstance(verify, tuple) else verify).draft_token.view(len(batch.reqs), -1)
        _write(request, "draft", lengths[i], drafted[i])
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


def _write(request: Any, kind: str, start: int, ids: Tensor, states: Tensor | None = None, **more: Tensor) -> None:
    tensors = {"ids": ids, "start": torch.tensor([start]), **more} | ({} if states is None else {"states": states})
    path = os.path.join(os.environ[WATCH_VARIABLE], f"{request.rid}.{next(_numbers):08d}")
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, path, {"kind": kind})


# ---------------------------------------------------------------- in the actor


@dataclass
class Watched:
    """What the drafter got for one request. Slots that came out of a prefix cache are missing."""

    at: Tensor  # [n] int64, ascending: the slots
    ids: Tensor  # [n] int64: the token of each, which is the next one of the sequence
    states: Tensor  # [n, W]
    verified: Tensor  # [n] bool: the row came from a verify step, not from the prompt
    drafted: list[tuple[int, list[int]]]  # length of the sequence, and root and drafts behind it
    first: tuple[int, float]  # the likeliest draft id behind the prompt, and its probability


def read(folder: Path, rid: str) -> Watched:
    """A request's files, which are then deleted."""
    rows: dict[int, tuple[Tensor, Tensor, bool]] = {}
    drafted, first = [], (-1, 0.0)
    for path in sorted(folder.glob(f"{rid}.*")):
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            kind = file.metadata()["kind"]
        path.unlink()
        start, ids = int(tensors["start"]), tensors["ids"].long()
        if kind == "draft":
            drafted.append((start, ids.tolist()))
            continue
        if kind == "prompt":
            first = int(tensors["id"]), float(tensors["probability"])
        for i, (token, state) in enumerate(zip(ids, tensors["states"], strict=True)):
            rows[start + i] = token, state, kind == "verify"
    if not rows:
        raise RuntimeError(f"nothing of request {rid} was written down: the engine drafts with no EagleDraftWorker")
    at = sorted(rows)
    return Watched(
        at=torch.tensor(at),
        ids=torch.stack([rows[slot][0] for slot in at]),
        states=torch.stack([rows[slot][1] for slot in at]),
        verified=torch.tensor([rows[slot][2] for slot in at]),
        drafted=drafted,
        first=first,
    )


def read_facts(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What one scheduler left of `facts`; RuntimeError where none did."""
    for path in sorted(folder.glob("*.facts")):
        with safe_open(path, "pt") as file:
            return load_file(path), json.loads(file.metadata()["told"])
    raise RuntimeError("no scheduler says what its drafter is: SGLang loaded no plugin, or serves no drafter")
