"""What the real SGLang makes of ServerArgs on a machine that is not here: `python resolve_presets.py CASES RESULTS`.

A case has `args`, the `platform` that SGLang shall take the machine for, `memory` (MiB a GPU) and `boundaries`. Its
result has the resolved `settings` and the `layer_ids`, or an `error`. A process of its own: SGLang keeps global state.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs

from eagle3_ray.capture import sglang_layer_ids

MEMORY = "sglang.srt.arg_groups.memory_hook.get_device_memory_capacity"
PREFILL_GRAPH = "sglang.srt.model_executor.cuda_graph_config.default_prefill_backend"
SETTINGS = ("moe_runner_backend", "quantization", "kv_cache_dtype", "chunked_prefill_size", "mem_fraction_static")


def resolve(case: dict[str, Any]) -> dict[str, Any]:
    ids = sglang_layer_ids(Path(case["args"]["model_path"]), tuple(case["boundaries"]))
    args = case["args"] | {
        "speculative_algorithm": "EAGLE3",
        "enable_return_aux_hidden_states": True,
        "return_aux_hidden_state_layer_ids": ids,
    }
    check_choices(args)
    with (
        override_platform(**case["platform"]),
        mock.patch(MEMORY, return_value=case["memory"]),
        mock.patch(PREFILL_GRAPH, return_value="breakable"),  # what it is on any GPU
    ):
        given = ServerArgs(**args)  # an unknown name is a TypeError
        given.resolve_once()
        given.check_server_args()
        view = resolved_view(given)
        settings = {name: getattr(view, name) for name in SETTINGS}
        settings["prefill"], settings["decode"] = attention_backends_of(view)
        settings["prefill_graph"] = view.cuda_graph_config.prefill.backend
    return {"settings": settings, "layer_ids": ids}


def check_choices(args: dict[str, Any]) -> None:
    """ValueError where the command line would not take a value; ServerArgs itself does not look."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    choices = {action.dest: action.choices for action in parser._actions if action.choices}
    for name, value in args.items():
        if name in choices and value not in choices[name]:
            raise ValueError(f"{name}: {value!r} is none of {list(choices[name])}")


def attempt(case: dict[str, Any]) -> dict[str, Any]:
    try:
        return resolve(case)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({name: attempt(case) for name, case in cases.items()}))
