"""The process that owns one `sglang.Engine`: `python -m eagle3_ray.engines.sglang_child FD`, run by engines/sglang.py.

Requests come over a pipe and are all handed to SGLang at once, on the engine's own event loop; SGLang batches them.
Answers go back in the order they finish. The pipe's end (the actor died) ends this process and its schedulers.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil


def main(connection: Connection) -> None:
    setup = connection.recv()
    try:
        engine, info = start(setup)
    except BaseException as error:
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        raise
    connection.send(("ready", info))
    try:
        engine.loop.run_until_complete(serve(engine, connection))
    finally:  # also when the actor is gone: nobody else would clean up
        engine.shutdown()
        shutil.rmtree(setup["capture_dir"], ignore_errors=True)
        shutil.rmtree(setup["scratch"], ignore_errors=True)


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
        pids = [int(path.stem) for path in capture_dir.glob("*.hooked")]  # those on this node; Ray watches them all
    else:
        engine = sglang.Engine(**args)
        pids = [pid for pid in engine.get_all_child_pids() if "scheduler" in "".join(psutil.Process(pid).cmdline())]
    info = {
        "engine": f"{type(engine).__module__}.{type(engine).__qualname__}",
        "version": sglang.__version__,
        "scheduler_pids": pids,
        "layer_ids": ids,
        "hooked": _plugin_answers(capture_dir, pids) if setup["boundaries"] else {},
    }
    if not pids and not (cluster and not setup["boundaries"]):
        raise RuntimeError("sglang names no scheduler process")
    return engine, info


def _plugin_answers(folder: Path, pids: list[int]) -> dict[str, list[str]]:
    """What the plugin in each scheduler hooked; RuntimeError unless every scheduler hooked everything.

    A scheduler answers before it says that it is up, so all answers are there.
    """
    from eagle3_ray.engines.sglang_plugin import HOOKS

    paths = {str(pid): folder / f"{pid}.hooked" for pid in pids}
    answers = {pid: json.loads(path.read_text()) for pid, path in paths.items() if path.exists()}
    for pid in pids:
        missing = [hook for hook in HOOKS if hook not in answers.get(str(pid), [])]
        if missing:
            raise RuntimeError(f"the capture plugin did not hook {', '.join(missing)} in scheduler {pid}")
    return answers


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
    await ended.wait()


async def respond(engine: Any, connection: Connection, request: dict[str, Any]) -> None:
    """Answer one request: {number, ids, sampling} generates, {number, ids, rid} captures into <rid>.rows."""
    try:
        if "rid" in request:
            await engine.async_generate(
                input_ids=request["ids"],
                sampling_params={"temperature": 0.0, "max_new_tokens": 0},
                return_hidden_states=True,
                rid=request["rid"],
                cache_salt=request["rid"],  # a prefix-cache hit would bring no rows; a salt of its own never hits
            )
            answer: Any = request["rid"]
        else:
            output = await engine.async_generate(input_ids=request["ids"], sampling_params=request["sampling"])
            answer = (output["output_ids"], output["meta_info"])
    except ValueError as error:  # SGLang's word for a request it will not take
        connection.send((request["number"], "refused", str(error)))
    except Exception as error:
        connection.send((request["number"], "failed", f"{type(error).__name__}: {error}"))
    else:
        connection.send((request["number"], "done", answer))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
    os._exit(0)  # SGLang's threads would keep a finished process alive
