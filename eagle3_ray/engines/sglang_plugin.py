"""Runs inside SGLang's scheduler: hands every token's hidden states to the actor as raw bytes in shared memory.

SGLang finds `load` as a plugin (entry point group `sglang.srt.plugins`). Without an environment variable below it does
nothing, since an entry point loads in every SGLang of its environment. Two hooks capture:

  LogitsProcessor._get_hidden_states_to_store   puts the post-norm last state beside the aux states, so that both ride
                                                SGLang's own device-to-host copy; a device tensor that is read later,
                                                in result processing, would race with the next batch. Ranks that hand
                                                nothing over drop the states here, before that copy
  SchedulerBatchResultProcessor._append_prefill_hidden_states
                                                appends a request's rows to <folder>/<rid>.rows, chunk by chunk; the
                                                stock code would make nested Python lists of them

A row is [A*H + H] numbers of the engine's dtype. SGLang only logs a plugin's errors, so a third hook, on the report of
the scheduler that it is up, answers in <folder>/<pid>.hooked with the targets that really hold our hooks and with the
layers that the model really captures; without it, or with one missing, the engine refuses to start.
"""

from __future__ import annotations

import json
import os
from typing import Any

FOLDER_VARIABLE = "EAGLE3_RAY_CAPTURE"  # the folder for rows and answers
WATCH_VARIABLE = "EAGLE3_RAY_WATCH"  # the folder for what a served drafter gets (sglang_served.py)
TO_STORE = "sglang.srt.layers.logits_processor.LogitsProcessor._get_hidden_states_to_store"
TO_APPEND = (
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ".SchedulerBatchResultProcessor._append_prefill_hidden_states"
)
TO_ANSWER = "sglang.srt.managers.scheduler.Scheduler.get_init_info"
HOOKS = (TO_STORE, TO_APPEND)


def load() -> None:
    """The entry point. SGLang applies the hooks when all plugins are loaded."""
    if os.environ.get(WATCH_VARIABLE):
        from eagle3_ray.engines import sglang_served

        sglang_served.load()
    if not os.environ.get(FOLDER_VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TO_STORE, with_last_hidden, HookType.AROUND)
    HookRegistry.register(TO_APPEND, rows_to_file, HookType.AROUND)
    HookRegistry.register(TO_ANSWER, answer, HookType.AFTER)


def load_in_worker() -> None:
    """For a Ray worker that may become a scheduler. Raises where a hook is missing: Ray then starts nothing in it."""
    load()
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    missing = [target for target in HOOKS if target not in _hooked()]
    if missing:
        raise RuntimeError(f"the capture plugin did not hook {', '.join(missing)}")


def answer(result: Any, scheduler: Any) -> None:
    """Write down, when the scheduler says that it is up, which targets hold our hooks and which layers are captured."""
    hooked, folder = _hooked(), os.environ[FOLDER_VARIABLE]
    if not os.path.isdir(folder):  # a rank on another node: `load_in_worker` has looked
        return
    model = scheduler.tp_worker.model_runner.model
    layers = [getattr(module, "layers_to_capture", None) for module in model.modules()]
    path = os.path.join(folder, f"{os.getpid()}.hooked")
    with open(path + ".tmp", "w") as file:
        json.dump({"hooked": hooked, "layers_to_capture": [list(found) for found in layers if found]}, file)
    os.replace(path + ".tmp", path)


def _hooked() -> list[str]:
    """The targets that hold our hooks."""
    return [
        target for target, hook in zip(HOOKS, (with_last_hidden, rows_to_file), strict=True) if _holds(target, hook)
    ]


def _holds(target: str, hook: Any) -> bool:
    """Whether a wrapper of the function at `target`, however deep, calls `hook`."""
    import pkgutil

    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    while function is not None:
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def streams() -> bool:
    """Whether this rank hands rows over: one of each data-parallel group, the one that SGLang streams answers from."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0


def with_last_hidden(original: Any, self: Any, hidden_states: Any, *args: Any) -> Any:
    """[N, A*H] aux states -> [N, A*H + H], the last hidden state behind them, where whole sequences are captured."""
    import torch

    aux = original(self, hidden_states, *args)
    mode = args[-1].forward_mode  # of the LogitsMetadata
    if aux is None or not self.keep_last_hidden_states or not mode.is_extend():
        return aux
    if not streams():
        return None  # result processing passes over it, and nothing is copied to the host
    return torch.cat([aux, hidden_states], dim=-1)  # [N, A*H + H]


def rows_to_file(
    original: Any,
    self: Any,
    *,
    req: Any,
    logits_output: Any,
    hidden_state_offset: int,
    capture_hidden_mode: Any,
    extend_input_len: int,
    store: bool = True,
) -> int:
    """Append one request's rows of this prefill chunk to its file; return the offset of the next request's rows.

    A middle chunk comes with store=False, which the stock code drops; a retracted request starts again from nothing.
    """
    if req.return_hidden_states is not True or not capture_hidden_mode.is_full():
        return original(
            self,
            req=req,
            logits_output=logits_output,
            hidden_state_offset=hidden_state_offset,
            capture_hidden_mode=capture_hidden_mode,
            extend_input_len=extend_input_len,
            store=store,
        )
    import torch

    end = hidden_state_offset + extend_input_len
    path = os.path.join(os.environ[FOLDER_VARIABLE], f"{req.rid}.rows")
    middle_chunk = req.inflight_middle_chunks > 0 and not req.finished()
    if req.is_retracted:
        if os.path.exists(path):
            os.unlink(path)
    elif store or middle_chunk:
        rows = logits_output.hidden_states[hidden_state_offset:end].cpu().contiguous()  # [n, A*H + H]
        with open(path, "ab") as file:
            file.write(memoryview(rows.view(torch.uint8).numpy()))
        if store:
            req.hidden_states.append([])  # SGLang expects an entry
    return end
