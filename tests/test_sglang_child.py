"""The pipe between an actor and its engine's process, on the event loop that SGLang installs."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from multiprocessing import Pipe
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3_ray.engines.sglang_child import scheduler_pids, serve

uvloop = pytest.importorskip("uvloop")


class Echo:
    """Answers with the ids that it was given, many times over: more than the pipe holds."""

    async def async_generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], rid: str | None, cache_salt: str | None
    ) -> dict[str, Any]:
        return {"output_ids": 40 * input_ids, "meta_info": {}}


def test_long_messages_come_whole_however_slowly_either_side_is_served() -> None:
    ours, theirs = Pipe()
    loop = uvloop.new_event_loop()
    child = threading.Thread(target=loop.run_until_complete, args=(serve(Echo(), theirs),), daemon=True)
    child.start()
    ids = list(range(10_000))
    with socket.socket(fileno=os.dup(ours.fileno())) as pieces:
        for number in range(2):
            message = bytes(ForkingPickler.dumps({"number": number, "ids": ids, "sampling": {}}))
            for piece in (struct.pack("!i", len(message)), message[:100], message[100:]):  # as Connection.send does
                pieces.sendall(piece)
                time.sleep(0.2)  # the sender loses its core
            assert ours.poll(10)
            time.sleep(0.2)  # the reader too
            assert ours.recv() == (number, "done", (40 * ids, {}))
    ours.close()
    child.join(10)
    assert not child.is_alive()


def test_schedulers_are_told_by_their_title_or_by_what_they_answered(tmp_path: Path) -> None:
    titles = {7: ["sglang::scheduler_TP1"], 5: ["sglang::scheduler_TP0"], 6: ["sglang::detokenizer"], 4: []}
    family: list = [SimpleNamespace(pid=pid, cmdline=lambda words=words: words) for pid, words in titles.items()]
    (tmp_path / "5.hooked").write_text("{}")
    assert scheduler_pids(family, tmp_path) == [5, 7]  # 7 did not answer, which is for `plugin_answers` to say
    assert scheduler_pids(family[2:], tmp_path) == [5]
    assert scheduler_pids(family[2:], tmp_path / "none") == []
