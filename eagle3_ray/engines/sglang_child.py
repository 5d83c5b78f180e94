"""The process that owns one `sglang.Engine`: `python -m eagle3_ray.engines.sglang_child FD`, run by engines/sglang.py.

Requests come over a pipe and are all handed to SGLang at once, on the engine's own event loop; SGLang batches them.
Answers go back in the order they finish. The pipe's end (the actor died) ends this process and its schedulers, also in
the middle of a start, and takes away what they leave. Ray must not kill it with the actor: nobody else would.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from eagle3_ray.engines.processes import kill_descendants, shared_memory
from eagle3_ray.leftovers import SHARED_MEMORY_NAMES, step_aside, sweep, unlink

# ServerArgs as SGLang resolved them from the model and the hardware: another value of one computes other numbers
RESOLVED = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "dp_size",
    "dtype",
    "enable_dp_attention",
    "ep_size",
    "fp4_gemm_runner_backend",
    "fp8_gemm_runner_backend",
    "kv_cache_dtype",
    "moe_a2a_backend",
    "moe_runner_backend",
    "page_size",
    "quantization",
    "tp_size",
)


EXIT_S = 3.0  # that a running engine may take to shut down


class Ending:
    """The end, when the actor is gone."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.serving = threading.Event()

    def __call__(self) -> None:
        if self.serving.is_set():
            time.sleep(EXIT_S)  # `main` sees the end of the pipe, too, and shuts the engine down
        kill_descendants()
        self.remove_folders()
        os._exit(1)

    def remove_folders(self) -> None:
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        sweep(*(Path(folder).parent for folder in self.folders))  # what else the actor left


def main(connection: Connection, ending: Ending) -> None:
    setup = connection.recv()
    ending.folders = [setup["capture_dir"], setup["scratch"]]
    try:
        engine, info = start(setup)
    except BaseException as error:
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        kill_descendants()  # an engine that is up, but not as it was asked for
        raise
    left = info["shared_memory"]
    Path(setup["scratch"], SHARED_MEMORY_NAMES).write_text("\n".join(left))  # for who cleans up after us
    ending.serving.set()
    try:
        connection.send(("ready", info))
        engine.loop.run_until_complete(serve(engine, connection))
    finally:
        engine.shutdown()
        unlink(left)
    ending.remove_folders()  # the actor may be gone: nobody else would clean up


def start(setup: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Start the engine; with `setup["boundaries"]`, as one that captures. Returns it and what it says of itself."""
    import sglang

    from eagle3_ray.capture import sglang_layer_ids
    from eagle3_ray.engines.sglang_nodes import start_over_nodes

    if sglang.__version__ != setup["version"]:
        raise RuntimeError(f"engine.version is {setup['version']}, this node has sglang {sglang.__version__}")
    args, ids = dict(setup["args"]), None
    if setup["boundaries"]:
        ids = sglang_layer_ids(Path(setup["folder"]), tuple(setup["boundaries"]), args.get("trust_remote_code", False))
        args |= {
            "speculative_algorithm": "EAGLE3",  # names the capture convention; nothing speculates
            "enable_return_aux_hidden_states": True,
            "return_aux_hidden_state_layer_ids": ids,
        }
    capture_dir, cluster = Path(setup["capture_dir"]), setup["cluster"]
    if cluster:
        engine: Any = start_over_nodes(args, cluster, [setup["capture_dir"], setup["scratch"]])
    else:
        engine = sglang.Engine(**args)
    family = psutil.Process().children(recursive=True)
    pids = scheduler_pids(
        [] if cluster else family, capture_dir
    )  # of several nodes those on this; Ray watches them all
    if not pids and not (cluster and not setup["boundaries"]):
        names = [" ".join(process.cmdline())[:60] for process in family]
        raise RuntimeError(f"sglang names no scheduler process; its children are {names}")
    captures: dict[str, Any] = {"hooked": {}, "layers_to_capture": []}
    if setup["boundaries"]:
        captures = plugin_answers(capture_dir, pids, setup["boundaries"])
    resolved = engine.server_args
    return engine, {
        "engine": f"{type(engine).__module__}.{type(engine).__qualname__}",
        "version": sglang.__version__,
        "child_pid": os.getpid(),
        "scheduler_pids": pids,
        "layer_ids": ids,
        **captures,
        "resolved": {name: getattr(resolved, name) for name in RESOLVED if hasattr(resolved, name)},
        "shared_memory": sorted(shared_memory([os.getpid(), *(process.pid for process in family)])),
    }


def scheduler_pids(family: list[psutil.Process], folder: Path) -> list[int]:
    """The processes that SGLang titled as schedulers; where none is, those that answered from the plugin.

    A scheduler that is up may show no title: seen once, in three starts in a row of one actor, for no reason found.
    """
    titled = [process.pid for process in family if "sglang::scheduler" in "".join(process.cmdline())]
    return sorted(titled or [int(path.stem) for path in folder.glob("*.hooked")])


def plugin_answers(folder: Path, pids: list[int], boundaries: list[int]) -> dict[str, Any]:
    """What the plugin hooked in each scheduler, and the boundaries that its model captures.

    RuntimeError unless every scheduler hooked everything and captures exactly `boundaries`. A scheduler answers before
    it says that it is up, so all answers are there.
    """
    from eagle3_ray.engines.sglang_plugin import HOOKS

    hooked = {}
    for pid in pids:
        path = folder / f"{pid}.hooked"
        answer = json.loads(path.read_text()) if path.exists() else {"hooked": [], "layers_to_capture": []}
        missing = [hook for hook in HOOKS if hook not in answer["hooked"]]
        if missing:
            raise RuntimeError(f"the capture plugin did not hook {', '.join(missing)} in scheduler {pid}")
        if answer["layers_to_capture"] != [boundaries]:
            raise RuntimeError(
                f"the boundaries {boundaries} were asked for, the model of scheduler {pid} captures "
                f"{answer['layers_to_capture']}"
            )
        hooked[str(pid)] = answer["hooked"]
    return {"hooked": hooked, "layers_to_capture": boundaries}


async def serve(engine: Any, connection: Connection) -> None:
    """Answer requests until the pipe ends."""
    loop, ended, tasks = asyncio.get_running_loop(), asyncio.Event(), set()

    def on_request() -> None:
        try:
            while connection.poll():
                task = loop.create_task(respond(engine, connection, connection.recv()))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except (EOFError, OSError):
            loop.remove_reader(connection.fileno())
            ended.set()

    loop.add_reader(connection.fileno(), on_request)
    # uvloop, which SGLang installs, has just made it non-blocking: a long message that comes in two pieces would be an
    # error, and so would an answer that does not go out in one
    os.set_blocking(connection.fileno(), True)
    await ended.wait()


async def respond(engine: Any, connection: Connection, request: dict[str, Any]) -> None:
    """Answer one request: {number, ids, sampling} generates, {number, ids, rid, salt} captures into <rid>.rows, and
    {number, ids} alone asks for the likeliest token after each. With a `salt`, only requests of the same one share
    what is cached of a prefix."""
    from fastapi import HTTPException

    try:
        if "sampling" in request:
            named = {"rid": request.get("rid"), "cache_salt": request.get("salt")}
            output = await engine.async_generate(input_ids=request["ids"], sampling_params=request["sampling"], **named)
            answer: Any = (output["output_ids"], output["meta_info"])
        elif "rid" in request:
            output = await engine.async_generate(
                input_ids=request["ids"],
                sampling_params={"temperature": 0.0, "max_new_tokens": 0},
                return_hidden_states=True,
                rid=request["rid"],
                cache_salt=request["salt"],  # a prefix-cache hit would bring no rows; a salt of its own never hits
            )
            answer = output["meta_info"]["finish_reason"]
        else:
            output = await engine.async_generate(
                input_ids=request["ids"],
                sampling_params={"temperature": 0.0, "max_new_tokens": 1},
                return_logprob=True,
                logprob_start_len=0,
                top_logprobs_num=1,
            )
            first = output["meta_info"]["input_top_logprobs"][1:]  # nothing is in front of the first token
            answer = [best[0][:2] for best in [*first, output["meta_info"]["output_top_logprobs"][0]]]
    except (ValueError, HTTPException) as error:  # SGLang's words for a request that it will not take, or gives up
        connection.send((request["number"], "refused", str(error)))
    except Exception as error:
        connection.send((request["number"], "failed", f"{type(error).__name__}: {error}"))
    else:
        connection.send((request["number"], "done", answer))


if __name__ == "__main__":
    pipe, ending = Connection(int(sys.argv[1])), Ending()
    step_aside(pipe.fileno(), ending)
    try:
        main(pipe, ending)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # SGLang's threads would keep a finished process alive
