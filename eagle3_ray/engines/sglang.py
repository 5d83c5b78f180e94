"""Stock `sglang.Engine` in a child process of the caller.

The child is a process of its own because SGLang kills the process that holds its engine when a scheduler fails, and
because its environment must be set before sglang is imported. A pipe carries requests and answers; hidden states never
travel on it: the scheduler writes them to shared memory (sglang_plugin.py) and they are mapped here, not copied.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import torch

from eagle3_ray.capture import (
    CaptureSpec,
    engine_args,
    engine_version,
    model_value,
    target_config,
    target_folder,
    text_config,
)
from eagle3_ray.config import Config, HardwareConfig, SamplingConfig
from eagle3_ray.engines.base import Captured, EngineError, RequestError, Response, TargetEngine
from eagle3_ray.engines.processes import kill_tree
from eagle3_ray.engines.sglang_nodes import membership
from eagle3_ray.engines.sglang_plugin import FOLDER_VARIABLE, WATCH_VARIABLE
from eagle3_ray.engines.sglang_served import WATCHED, Watched, read, read_facts
from eagle3_ray.leftovers import is_alive, own_folder, remove, temporary_folder, unlink
from eagle3_ray.secrets import clean, known, without

PLUGIN = "eagle3_ray"
ENTRY_POINT = f"[sglang.srt.plugins]\n{PLUGIN} = eagle3_ray.engines.sglang_plugin:load\n"
LOG_TAIL_LINES, LOG_LINE_WIDTH = 40, 400
EXIT_S = 5.0  # between the end of the pipe and that of the process
RESERVED = 6  # positions that SGLang 0.5.23 keeps free of a prompt (managers/utils.py)


class SGLangEngine(TargetEngine):
    """One `sglang.Engine`. With `spec` it captures as well as generates; with `drafter_args` it serves a drafter, and
    with `watched` too it can tell what that drafter gets."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        spec: CaptureSpec | None,
        drafter_args: dict[str, Any] | None = None,
        watched: bool = False,
    ) -> None:
        self.watched = watched
        self.spec, self.stall_timeout_s = spec, config.hardware.stall_timeout_s
        self.capture_bytes, self._waiting_bytes = config.hardware.capture_bytes, 0
        self._room = threading.Condition()  # for rows in capture_dir
        free = shutil.disk_usage(config.hardware.capture_dir).free
        if spec and free < self.capture_bytes:
            raise EngineError(
                f"hardware.capture_bytes: {self.capture_bytes}, and {free} are free in {config.hardware.capture_dir}; "
                f"a container's /dev/shm has 64 MB unless it is given more"
            )
        self.dtype = getattr(torch, config.engine.dtype)
        self.scratch, _ = own_folder(Path(tempfile.gettempdir()))
        self.capture_dir, _ = own_folder(Path(config.hardware.capture_dir))
        self.log = self.scratch / "engine.log"
        self._numbers, self._sending, self._closing = itertools.count(), threading.Lock(), False
        self._pending: dict[int, Future[Any]] = {}
        self._failure: str | None = None
        self._schedulers: list[psutil.Process] = []
        self._shared_memory: list[str] = []  # SGLang's own, which it leaves when it is killed
        args = (drafter_args or {}) | server_args(config, folder, "capture" if spec else "serve")  # the user's win
        self._secrets = known({**args, **config.hardware.env})
        self._start(config.hardware, args, config, folder)

    def _start(self, hardware: HardwareConfig, args: dict[str, Any], config: Config, folder: Path) -> None:
        self.connection, theirs = Pipe()
        with self.log.open("wb") as log, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "eagle3_ray.engines.sglang_child", str(theirs.fileno())],
                env=engine_environment(hardware, self.scratch, self._folders()),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.info: dict[str, Any] = {}
        try:
            self._send(
                {
                    "args": args,
                    "folder": str(folder),
                    "boundaries": list(self.spec.boundaries) if self.spec else None,
                    "version": engine_version(config),
                    "capture_dir": str(self.capture_dir),
                    "scratch": str(self.scratch),
                    "cluster": membership(hardware, self.capture_dir if self.spec else None),
                }
            )
            if not self.connection.poll(hardware.start_timeout_s):
                raise EOFError(f"not up after hardware.start_timeout_s={hardware.start_timeout_s}")
            state, answer = self.connection.recv()
            if state == "ready":
                self._schedulers = [psutil.Process(pid) for pid in answer["scheduler_pids"]]
        except (EOFError, OSError, psutil.NoSuchProcess) as error:
            state, answer = "failed", str(error) or "the engine's process ended"
        if state != "ready":
            message = f"the engine did not start: {self._shown(answer)}\n{self._log_tail()}"
            self.close(grace_s=0.0)
            raise EngineError(message)
        self._shared_memory = answer.pop("shared_memory")
        self.info = answer
        self._heard = time.monotonic()
        self._listener = threading.Thread(target=self._listen, name="sglang-answers", daemon=True)
        self._listener.start()

    def _folders(self) -> dict[str, str]:
        """The plugin's environment: where it is to write what."""
        wanted = {FOLDER_VARIABLE: self.spec is not None, WATCH_VARIABLE: self.watched}
        return {name: str(self.capture_dir) for name, is_wanted in wanted.items() if is_wanted}

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingConfig) -> list[Response]:
        return self._generate([{"ids": list(prompt)} for prompt in prompts], sampling)

    def watch(
        self, prompts: Sequence[list[int]], sampling: SamplingConfig, salt: str | None = None
    ) -> list[tuple[Response, Watched]]:
        """Answer each prompt, and tell what the drafter got on the way. Prompts of one `salt` share a prefix's cache,
        which leaves out what was there; without one nothing is left out."""
        rids = [WATCHED + uuid.uuid4().hex for _ in prompts]
        requests = [
            {"ids": list(prompt), "rid": rid, "salt": salt or rid} for prompt, rid in zip(prompts, rids, strict=True)
        ]
        responses = self._generate(requests, sampling)
        return [(response, read(self.capture_dir, rid)) for response, rid in zip(responses, rids, strict=True)]

    def drafter_facts(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What is in force in the scheduler of a watched drafter: `sglang_served.facts`."""
        return read_facts(self.capture_dir)

    def _generate(self, requests: list[dict[str, Any]], sampling: SamplingConfig) -> list[Response]:
        parameters = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
        futures = [self._submit({**request, "sampling": parameters}) for request in requests]
        responses = []
        for future in futures:
            ids, meta = future.result()
            reason = meta["finish_reason"]
            if reason["type"] not in ("stop", "length"):
                raise RequestError(f"aborted: {self._shown(str(reason))}")
            if reason["type"] == "length" and len(ids) < sampling.max_new_tokens:  # SGLang clips in silence
                raise RequestError(
                    f"cut at {len(ids)} tokens, before sampling.max_new_tokens={sampling.max_new_tokens}"
                )
            speculation = {name: value for name, value in meta.items() if name.startswith("spec_")}
            responses.append(Response(list(ids), reason["type"], speculation))
        return responses

    def capture(self, sequences: Sequence[list[int]]) -> list[Captured]:
        """Rows lie in shared memory until the Captured is dropped, at most hardware.capture_bytes of them: a call that
        needs room waits for it, so a caller must drop what it got before it asks for more."""
        return self._capture(sequences)

    def capture_in_two(self, ids: list[int]) -> Captured:
        """`capture` of one sequence of two tokens or more, whose second half is computed on the cache of the first: the
        same rows, by other arithmetic. An engine without a prefix cache computes the second half's rows as ever."""
        salt, half = uuid.uuid4().hex, len(ids) // 2
        (first,) = self._capture([ids[:half]], salt)
        first = Captured(first.aux.clone(), first.last_hidden.clone())  # the rows in shared memory make room
        (second,) = self._capture([ids], salt)
        missing = len(ids) - len(second.aux)
        if missing > half:
            raise RequestError(f"a capture of {len(ids)} tokens behind {half} came back with {len(second.aux)} rows")
        return Captured(
            torch.cat([first.aux[:missing], second.aux]), torch.cat([first.last_hidden[:missing], second.last_hidden])
        )

    def _capture(self, sequences: Sequence[list[int]], salt: str | None = None) -> list[Captured]:
        """With a `salt`, what another request of it has cached of a prefix is left out."""
        sizes = [len(ids) * self._row_bytes for ids in sequences]
        self._reserve(sum(sizes))
        rids = [uuid.uuid4().hex for _ in sequences]  # new at each attempt: what a failed one wrote is never read
        captured: list[Captured] = []
        try:
            requests = [{"ids": list(ids), "rid": rid} for ids, rid in zip(sequences, rids, strict=True)]
            futures = [self._submit({**request, "salt": salt or request["rid"]}) for request in requests]
            for future, rid, ids, size in zip(futures, rids, sequences, sizes, strict=True):
                reason = future.result()
                if reason["type"] not in ("stop", "length"):
                    raise RequestError(f"aborted: {self._shown(str(reason))}")
                captured.append(self._rows(rid, len(ids), whole=salt is None))
                weakref.finalize(captured[-1], self._release, size)
        finally:
            for rid in rids[len(captured) :]:
                (self.capture_dir / f"{rid}.rows").unlink(missing_ok=True)
            self._release(sum(sizes[len(captured) :]))
        return captured

    def _rows(self, rid: str, tokens: int, whole: bool) -> Captured:
        """Map the rows of one capture; the file's memory is freed with the tensors."""
        assert self.spec is not None
        path = self.capture_dir / f"{rid}.rows"
        size = path.stat().st_size if path.exists() else 0
        came, rest = divmod(size, self._row_bytes)
        if rest or not (tokens if whole else 1) <= came <= tokens:
            raise RequestError(f"a capture of {tokens} tokens came back with {size} bytes, not {self._row_bytes} each")
        width = self._row_bytes // self.dtype.itemsize
        rows = torch.from_file(str(path), shared=True, size=came * width, dtype=self.dtype).view(came, width)
        path.unlink()
        split = width - self.spec.hidden_size
        return Captured(aux=rows[:, :split], last_hidden=rows[:, split:])  # [T, A*H], [T, H]

    @property
    def _row_bytes(self) -> int:
        assert self.spec is not None
        return (len(self.spec.boundaries) + 1) * self.spec.hidden_size * self.dtype.itemsize

    def _reserve(self, size: int) -> None:
        if size > self.capture_bytes:
            raise RequestError(f"the states need {size} bytes, more than hardware.capture_bytes={self.capture_bytes}")
        with self._room:
            self._room.wait_for(
                lambda: self._failure or self._closing or self._waiting_bytes + size <= self.capture_bytes
            )
            self._waiting_bytes += size

    def _release(self, size: int) -> None:
        with self._room:
            self._waiting_bytes -= size
            self._room.notify_all()

    def next_tokens(self, ids: list[int]) -> list[tuple[float, int]]:
        return [(float(logprob), int(token)) for logprob, token in self._submit({"ids": list(ids)}).result()]

    def close(self, grace_s: float = 20.0) -> None:
        """End the engine's processes, the child first; then its files."""
        self._closing = True
        self.connection.close()  # the child sees the end of the pipe and shuts its engine down
        kill_tree(self.process, self._schedulers, grace_s)
        unlink(self._shared_memory)
        remove(self.capture_dir)
        remove(self.scratch)

    # ------------------------------------------------------------ the pipe

    def _submit(self, request: dict[str, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        number = next(self._numbers)
        if not self._pending:
            self._heard = time.monotonic()  # the time without work is no stall
        self._pending[number] = future
        try:
            self._send({"number": number, **request})
        except (OSError, TypeError):  # TypeError: closed by close() meanwhile
            self._fail(self._ended())
        if self._failure or self._closing:  # it may have failed between two calls
            self._fail(self._failure or "closed")
        return future

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self.connection.send(message)

    def _listen(self) -> None:
        """Hand answers to their futures until the engine ends or stalls."""
        watched = time.monotonic()
        while not self._closing:
            try:
                if time.monotonic() - watched > 1.0:  # also while other schedulers answer
                    watched = time.monotonic()
                    reason = self._watch()
                    if reason:
                        return self._fail(reason)
                if not self.connection.poll(1.0):
                    continue
                number, state, answer = self.connection.recv()
            except (EOFError, OSError, TypeError):  # TypeError: closed by close() while polling
                return self._fail(self._ended())
            self._heard = time.monotonic()
            future = self._pending.pop(number, None)
            if future is None:  # failed meanwhile, by another thread
                continue
            if state == "done":
                future.set_result(answer)
            else:
                kind = RequestError if state == "refused" else EngineError
                future.set_exception(kind(self._shown(answer)))
        self._fail("closed")  # close() came between two answers

    def _watch(self) -> str | None:
        """Why the engine counts as dead, if it does. SGLang says nothing when a scheduler is killed from outside."""
        for scheduler in self._schedulers:
            if not is_alive(scheduler):
                return f"scheduler {scheduler.pid} died"
        if self._pending and time.monotonic() - self._heard > self.stall_timeout_s:
            return f"no answer for hardware.stall_timeout_s={self.stall_timeout_s}"
        return None

    def _ended(self) -> str:
        """What is known when the pipe has ended."""
        if self._closing:
            return "closed"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"the engine's process ended with exit code {self.process.wait(EXIT_S)}"
        return "the engine's process closed its pipe"

    def _fail(self, reason: str) -> None:
        reason = self._failure or ("closed" if self._closing else reason)
        if self._failure is None and not self._closing:
            self._failure = reason
            kill_tree(self.process, self._schedulers, grace_s=0.0)
            unlink(self._shared_memory)
        with self._room:
            self._room.notify_all()
        message = f"the engine failed: {reason}\n{self._log_tail()}"
        for number in list(self._pending):
            future = self._pending.pop(number, None)
            if future is not None:
                future.set_exception(EngineError(message))

    def _log_tail(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            return "\n".join(line[:LOG_LINE_WIDTH] for line in self._shown("\n".join(lines)).splitlines())
        except OSError:
            return ""

    def _shown(self, said: str) -> str:
        """What SGLang said, without secrets; whole, since half of one is not known again."""
        return without(said, self._secrets)


def server_args(config: Config, folder: Path, purpose: str) -> dict[str, Any]:
    """All ServerArgs of an engine that shall "capture" or "serve", but for layer ids and drafter."""
    local = Path(config.target.path).expanduser().is_dir()
    return {
        "model_path": str(folder) if local else config.target.path,
        "revision": config.target.revision,
        "trust_remote_code": config.target.trust_remote_code,
        "skip_tokenizer_init": True,
        "dtype": config.engine.dtype,  # never "auto", which makes fp16 of fp32
        "random_seed": config.sampling.seed,
        "log_level": "info",
        **engine_args(config, purpose),
    }


def engine_environment(hardware: HardwareConfig, scratch: Path, plugin: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of the engine's processes: the plugin can be found, also from a mere working directory.

    `ray job submit` gives a folder on PYTHONPATH, not an installed package, and SGLang finds plugins by package
    metadata alone; so a `.dist-info` with our entry point is written to `scratch` and put on PYTHONPATH.
    """
    info = scratch / "eagle3_ray_plugin-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eagle3-ray-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    package = Path(__file__).resolve().parents[2]
    environment = {**os.environ, **hardware.env}
    if hardware.nodes_per_engine == 1:
        environment = {**_on_this_node(hardware, scratch), **environment}
    paths = [str(package), str(scratch), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if environment.get("SGLANG_PLUGINS"):
        environment["SGLANG_PLUGINS"] += f",{PLUGIN}"
    environment |= plugin or {}
    environment["TMPDIR"] = str(scratch)  # SGLang leaves temporary files
    if hardware.device == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    # What torch compiles shall be found again. Last: torch sets it anew, and setproctitle, by which SGLang names its
    # schedulers, has the room of the variables before the first that was
    environment["TORCHINDUCTOR_CACHE_DIR"] = environment.pop(
        "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    )
    return environment


def _on_this_node(hardware: HardwareConfig, scratch: Path) -> dict[str, str]:
    """The variables by which ranks of one node meet in a file and talk over the loopback interface: torch's own store
    would listen on every interface."""
    variables = {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/meeting",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if hardware.device == "cpu":  # SGLang names the shared memory of its ranks by these, which TCP would have set
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid())}
    return variables


def ask_layer_ids(config: Config, boundaries: Sequence[int]) -> list[int]:
    """`capture.sglang_layer_ids`, asked in a process with the engine's environment."""
    folder = target_folder(config.target)
    with temporary_folder() as scratch:
        asked = subprocess.run(
            [sys.executable, "-m", "eagle3_ray.engines.layer_ids", str(folder), *map(str, boundaries)]
            + (["--trust-remote-code"] if config.target.trust_remote_code else []),
            env=engine_environment(config.hardware, scratch),
            capture_output=True,
            text=True,
        )
    if asked.returncode:
        said = clean(asked.stderr.strip(), config.hardware.env)
        raise EngineError(f"SGLang could not be asked for layer ids: {said[-2000:]}")
    return [int(word) for word in asked.stdout.split()[-len(boundaries) :]]


def context_length(config: Config, folder: Path) -> int:
    """Tokens that prompt and answer may have together, so that SGLang also takes them as a prompt."""
    model = text_config(target_config(folder))
    room = engine_args(config, "capture").get("context_length") or model_value(model, "max_position_embeddings")
    return int(room) - RESERVED
