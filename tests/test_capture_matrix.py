"""What SGLang captures is what Transformers computes, for every family of targets, length, batch and cache.

The rule, in fp32: every number of a state (one boundary, or the last hidden state, of one sequence) lies within
TOLERANCE of the reference, times the largest absolute value of that reference state. Every row is compared, and there
are as many as tokens. An engine starts once for each row of ENGINES, and all tests run on it."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import compose
from test_engines import assert_same_states
from tiny_targets import tiny_deepseek_v3, tiny_kimi_k25, tiny_llama, tiny_qwen3

from eagle3_ray.config import SamplingConfig
from eagle3_ray.engines.base import Captured
from eagle3_ray.engines.sglang import SGLangEngine
from eagle3_ray.engines.transformers import TransformersEngine
from eagle3_ray.run import open_run

pytestmark = pytest.mark.engine
CHUNK = 16
LENGTHS = (1, 15, 16, 17, 33, 100)  # around one chunk, and several
SEQUENCES = [random.Random(seed).choices(range(3, 500), k=100) for seed in range(5)]
BATCH = [SEQUENCES[i % 5][: LENGTHS[i % 6]] for i in range(16)]  # some begin alike
GREEDY = SamplingConfig(max_new_tokens=24)
LAYERS = 8
REFERENCE = {"kimi_k25": "deepseek_v3"}  # Transformers has no Kimi-K2.5; its language model is this one
SETTINGS = {"kimi_k25": ["+engine.args.enable_multimodal=false"]}  # the tiny folder holds no image processor
TWO_GROUPS = ["+engine.args.dp_size=2", "+engine.args.enable_dp_attention=true"]  # each rank has its own requests
TWO_RANKS = ["hardware.tp_size=2", '+hardware.env.SGLANG_CPU_OMP_THREADS_BIND="0|1"']


def row(target: str, boundaries: list[int] | None = None, *settings: str, full: bool = True):
    name = "-".join(
        [
            target,
            *map(str, boundaries or ["default"]),
            *(["tp2"] if settings else []),
            *(["dp2"] if len(settings) > 2 else []),
        ]
    )
    return pytest.param((target, boundaries, settings), id=name, marks=[pytest.mark.full] if full else [])


# Each family with the default boundaries (2, 4, 5), and with the first and the last that its class can capture. An id
# is a boundary less 1 for a Llama, so 0 cannot be had; the boundary itself for a DeepSeek, unless the first id is 1
ENGINES = [
    row("llama", full=False),
    row("kimi_k25", full=False),
    row("llama", [1, 4, 7]),
    row("llama", None, *TWO_RANKS),
    row("qwen3"),
    row("qwen3", [1, 4, 7]),
    row("deepseek_v3"),
    row("deepseek_v3", [0, 3, 7]),
    row("deepseek_v3", None, *TWO_RANKS, *TWO_GROUPS),
    row("kimi_k25", [3, 4, 7]),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    made = {"llama": tiny_llama, "qwen3": tiny_qwen3, "deepseek_v3": tiny_deepseek_v3}
    folders = {name: make(root / name, layers=LAYERS) for name, make in made.items()}
    return folders | {"kimi_k25": tiny_kimi_k25(root / "kimi_k25", folders["deepseek_v3"])}


class Pair:
    """A target in SGLang and in Transformers."""

    def __init__(self, target: str, boundaries: list[int] | None, settings: tuple[str, ...], folders, store: Path):
        common = [f"store.root={store}", "drafter.draft_vocab_size=64"]
        common += [f"capture.boundaries={boundaries}"] if boundaries else []
        args = [f"+engine.args.chunked_prefill_size={CHUNK}", *SETTINGS.get(target, []), *settings]
        same = folders[REFERENCE.get(target, target)]
        plain = open_run(compose("engine=transformers", f"target.path={same}", *common))
        run = open_run(compose(f"target.path={folders[target]}", *common, *args))
        self.boundaries = len(run.spec.boundaries)
        self.reference = TransformersEngine(plain.config, plain.folder, plain.spec)
        self.engine = SGLangEngine(run.config, run.folder, run.spec)
        self.expected: Callable[[tuple[int, ...]], Captured] = functools.cache(
            lambda ids: self.reference.capture([list(ids)])[0]
        )

    def assert_equal(self, *sequences: list[int]) -> None:
        """Capture sequences together; each must be what the reference makes of it alone."""
        for ids, captured in zip(sequences, self.engine.capture(sequences), strict=True):
            assert len(captured.aux) == len(captured.last_hidden) == len(ids)
            assert_same_states(captured, self.expected(tuple(ids)), self.boundaries)


@pytest.fixture(scope="module", params=ENGINES)
def pair(request: pytest.FixtureRequest, folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(*request.param, folders=folders, store=tmp_path_factory.mktemp("store"))
    yield pair
    pair.engine.close()


def test_a_sequence_alone_is_captured_whole_whatever_its_length(pair: Pair) -> None:
    for length in LENGTHS * 2:
        pair.assert_equal(SEQUENCES[0][:length])


def test_a_batch_is_captured_whole_in_either_order(pair: Pair) -> None:
    for batch in [BATCH, BATCH[::-1]] * 2:
        pair.assert_equal(*batch)
    steps = re.findall(r"Prefill batch.*?#new-seq: (\d+), #new-token: (\d+)", pair.engine.log.read_text())
    sequences, tokens = ([int(number) for number in numbers] for numbers in zip(*steps, strict=True))
    groups = pair.engine.info["resolved"]["dp_size"]
    assert max(tokens) == CHUNK // groups  # so the long ones did come in chunks,
    assert max(sequences) > 2  # and several sequences shared a step


def test_a_warm_prefix_cache_takes_no_row_away(pair: Pair) -> None:
    prompt = SEQUENCES[1][:33]
    (answer,) = pair.engine.generate([prompt], GREEDY)
    assert [answer] == pair.reference.generate([prompt], GREEDY)
    whole = prompt + answer.token_ids
    for _ in range(2):  # behind its own generation, then behind its own capture too
        pair.assert_equal(whole)
    pair.assert_equal(whole + SEQUENCES[2][:20], whole[:-1])
    assert pair.engine.generate([prompt], GREEDY) == [answer]
