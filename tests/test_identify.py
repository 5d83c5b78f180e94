"""Whose states are these: dumps in each layout, with faults made by hand, against a target made by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import compose
from safetensors.torch import save_file

from eagle3_ray import identify as identification
from eagle3_ray.config import ConfigError, FeaturesConfig, VerifyConfig
from eagle3_ray.drafter.target import load_norm
from eagle3_ray.engines.base import Captured, EngineError
from eagle3_ray.engines.sglang import SGLangEngine
from eagle3_ray.engines.transformers import TransformersEngine
from eagle3_ray.identify import Taken, _boundaries, _last, _last_causes, identify, nearest, read_dump
from eagle3_ray.run import Run, open_run
from eagle3_ray.verify import elsewhere

T, L, H = 9, 7, 16
EVERY = torch.randn(T, L, H, generator=torch.Generator().manual_seed(0))
NORM = torch.rand(H, generator=torch.Generator().manual_seed(1)) + 0.5
BEFORE = torch.randn(T, H, generator=torch.Generator().manual_seed(2)) * 30
LAST = torch.nn.functional.rms_norm(BEFORE, [H], NORM, 1e-6)


def found(states: torch.Tensor, names: list[int]) -> list[str]:
    return _boundaries(names, [nearest([states[:, i]], [EVERY], range(L)) for i in range(len(names))])


def test_boundaries_are_told_by_their_values() -> None:
    assert found(EVERY[:, [1, 3, 5]], [1, 3, 5]) == []
    assert found(EVERY[:, [2, 4, 6]], [1, 3, 5]) == [
        "the features' boundaries are off by one: "
        "2 lies where 1 is said to, 4 lies where 3 is said to, 6 lies where 5 is said to"
    ]
    assert "permuted: 3 lies where 1 is said to, 1 lies where 3" in found(EVERY[:, [3, 1, 5]], [1, 3, 5])[0]
    assert "others: 1 lies where 1 is said to, 6 lies where 3" in found(EVERY[:, [1, 6, 5]], [1, 3, 5])[0]
    assert found(EVERY[:, [1, 3, 5]].roll(1, 0), [1, 3, 5]) == [
        "the features' rows are shifted: the state of token q lies in row q+1"
    ]
    assert found(EVERY[:, [1, 3, 5]].roll(-1, 0), [1, 3, 5]) == [
        "the features' rows are shifted: the state of token q lies in row q-1"
    ]
    assert "another target's" in found(torch.randn(T, 3, H), [1, 3, 5])[0]


def causes(last: torch.Tensor, normed: bool) -> list[str]:
    return _last_causes(_last([last], [LAST], NORM, 1e-6), normed)


def test_the_last_hidden_state_is_told_by_its_values() -> None:
    assert causes(LAST, True) == []
    assert causes(BEFORE, False) == []
    assert causes(BEFORE, True) == ["the last hidden state is before the target's final norm, not after it"]
    assert causes(LAST, False) == ["the last hidden state is after the target's final norm, not before it"]
    assert causes(LAST.roll(1, 0), True) == [
        "the last hidden states' rows are shifted: the state of token q lies in row q+1"
    ]
    assert "is not the target's" in causes(torch.randn(T, H), True)[0]
    kept = LAST.clone()
    kept[:5] = 0  # rows that were not kept are not looked at
    assert causes(kept, True) == []


def test_dumps_are_told_by_what_they_hold(tmp_path: Path) -> None:
    ids, aux = torch.arange(T), EVERY[:, [1, 3, 5]]
    (tmp_path / "specforge" / "rows_0-2000").mkdir(parents=True)
    data = {"input_ids": ids, "loss_mask": ids, "hidden_state": LAST[None], "aux_hidden_state": aux.flatten(1)[None]}
    torch.save(data, tmp_path / "specforge" / "rows_0-2000" / "data_0.ckpt")
    (tmp_path / "speculators").mkdir()
    states = torch.cat([aux, BEFORE[:, None]], 1)
    save_file({"token_ids": ids, "hidden_states": states}, tmp_path / "speculators" / "hs_0.safetensors")
    (tmp_path / "plain").mkdir()
    torch.save({"input_ids": ids, "aux": aux.flatten(1)}, tmp_path / "plain" / "a.pt")
    for layout, last, normed in (("specforge", LAST, True), ("speculators", BEFORE, False), ("plain", None, True)):
        (taken,) = read_dump(tmp_path / layout, 8, [1, 3, 5], H)
        assert torch.equal(taken.input_ids, ids) and torch.equal(taken.states, aux)
        assert taken.normed is normed
        assert (taken.last is None) if last is None else torch.equal(taken.last, last)
        assert taken.dtype == "float32"


@pytest.mark.parametrize(
    ("dtype", "named"),
    [(torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float8_e4m3fn, "float8_e4m3")],
)
def test_a_dump_s_precision_is_that_of_its_tensors(tmp_path: Path, dtype: torch.dtype, named: str) -> None:
    save_file({"input_ids": torch.arange(T), "aux": EVERY[:, :3].flatten(1).to(dtype)}, tmp_path / "a.safetensors")
    (taken,) = read_dump(tmp_path, 8, [1, 3, 5], H)
    assert (taken.dtype, taken.states.dtype) == (named, torch.float32)


@pytest.mark.parametrize("layout", ["specforge", "speculators", "plain", "plain, no last state"])
def test_another_number_or_width_of_states_is_named(tmp_path: Path, layout: str) -> None:
    def dump(states: int, hidden: int) -> Path:
        ids, aux, last = torch.arange(T), torch.ones(T, states, hidden), torch.ones(T, hidden)
        data = {
            "specforge": {"input_ids": ids, "aux_hidden_state": aux.flatten(1)[None], "hidden_state": last[None]},
            "speculators": {"token_ids": ids, "hidden_states": torch.cat([aux, last[:, None]], 1)},
            "plain": {"input_ids": ids, "aux": aux.flatten(1), "last_hidden": last},
            "plain, no last state": {"input_ids": ids, "aux": aux.flatten(1)},
        }
        torch.save(data[layout], tmp_path / "a.pt")
        return tmp_path

    assert read_dump(dump(3, H), 8, [1, 3, 5], H)[0].states.shape == (T, 3, H)
    for states in (2, 4):
        with pytest.raises(ConfigError, match=rf"a.pt holds states of {states} boundaries.* names 3: \[1, 3, 5\]"):
            read_dump(dump(states, H), 8, [1, 3, 5], H)
    theirs = "39 numbers a row" if layout.endswith("no last state") else "H is 13"
    with pytest.raises(ConfigError, match=f"a.pt: the features are another target's: {theirs}, and this target's H is"):
        read_dump(dump(3, 13), 8, [1, 3, 5], H)


class Harmful:
    def __reduce__(self) -> tuple:
        return print, ("unpickled",)


def test_what_is_no_dump_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="features.path: no .ckpt"):
        read_dump(tmp_path, 8, [1, 3, 5], H)
    torch.save({"input_ids": torch.arange(3), "aux": Harmful()}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="a.pt cannot be read as tensors alone"):
        read_dump(tmp_path, 8, [1, 3, 5], H)
    assert capsys.readouterr().out == ""
    torch.save({"input_ids": torch.arange(3), "aux": torch.zeros(2, 6)}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="a.pt has 3 tokens and 2 rows"):
        read_dump(tmp_path, 8, [1, 3, 5], H)
    torch.save({"input_ids": torch.arange(1), "aux": torch.zeros(1, 3 * H)}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="a.pt has 1 tokens and 1 rows"):  # no row before or after
        read_dump(tmp_path, 8, [1, 3, 5], H)
    for value, said in ((torch.full((3, 3 * H), torch.inf), "not finite"), (torch.ones(3, 3 * H).double(), "float64")):
        torch.save({"input_ids": torch.arange(3), "aux": value}, tmp_path / "a.pt")
        with pytest.raises(ConfigError, match=f"a.pt has states .*{said}"):
            read_dump(tmp_path, 8, [1, 3, 5], H)
    torch.save({"ids": torch.arange(3)}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=r"a.pt holds \['ids'\], which is no layout"):
        read_dump(tmp_path, 8, [1, 3, 5], H)


def test_a_sequence_is_cut_whole(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    save_file(
        {"input_ids": torch.arange(T), "aux": EVERY[:, :3].flatten(1).contiguous(), "last_hidden": LAST},
        tmp_path / "a.safetensors",
    )
    (taken,) = read_dump(tmp_path, 8, [1, 3, 5], H)
    cut = taken.cut(4)
    assert [len(cut.input_ids), len(cut.states), len(cut.last)] == [4, 4, 4]
    assert dataclasses.replace(taken, last=None).cut(4).last is None


# ---------------------------------------------------------------- with an engine made by hand

LAYERS, WIDE, AT = 8, 64, [2, 4, 5]  # of the tiny Llama
OWN = torch.randn(T, LAYERS, WIDE, generator=torch.Generator().manual_seed(3))


def off(states: torch.Tensor, by: float) -> torch.Tensor:
    """`states`, each row moved by exactly `by` of its norm."""
    way = torch.randn(states.shape, generator=torch.Generator().manual_seed(4))
    return states + by * way * (states.norm(dim=-1, keepdim=True) / way.norm(dim=-1, keepdim=True))


class ByHand:
    """Gives `own`, and when it is asked for two chunks, states that are `noise` away from that."""

    own, noise, started, info = OWN, 0.0, list[list[int]](), {"engine": "by hand"}

    def __init__(self, config: Any, folder: Path, spec: Any) -> None:
        self.boundaries = list(spec.boundaries)
        self.started.append(self.boundaries)

    def capture(self, sequences: list[list[int]]) -> list[Captured]:
        return [self._states(0.0, len(ids)) for ids in sequences]

    def capture_in_two(self, ids: list[int]) -> Captured:
        return self._states(self.noise, len(ids))

    def _states(self, noise: float, tokens: int) -> Captured:
        states = off(self.own, noise)[:tokens]
        return Captured(states[:, self.boundaries].flatten(1), states[:, 7])

    def close(self) -> None: ...


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> type[ByHand]:
    made = type("Made", (ByHand,), {"started": []})
    monkeypatch.setattr(identification, "SGLangEngine", made)
    monkeypatch.setattr(identification, "ask_layer_ids", lambda config, boundaries: [k - 1 for k in boundaries])
    return made


@pytest.fixture(scope="module")
def exact(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose engine computes in float32."""
    given = [f"target.path={tiny_llama_folder}", f"store.root={tmp_path_factory.mktemp('store')}"]
    return open_run(compose(*given, "capture.boundaries=[2,4,5]"))


@pytest.fixture(scope="module")
def rounding(exact: Run) -> Run:
    """One whose engine computes in bfloat16."""
    engine = dataclasses.replace(exact.config.engine, dtype="bfloat16")
    return dataclasses.replace(exact, config=dataclasses.replace(exact.config, engine=engine))


def judged(
    run: Run, states: torch.Tensor, dtype: str | None = "bfloat16", last: torch.Tensor | None = None
) -> list[str]:
    return identify(run, [Taken("a", torch.arange(T), states, last, dtype=dtype)], AT)["causes"]


def test_values_beyond_the_noise_are_no_features_of_this_target(by_hand: type[ByHand], rounding: Run) -> None:
    run = rounding
    assert judged(run, OWN[:, AT].bfloat16().float()) == []
    assert judged(run, off(OWN[:, AT], 0.011)) == []  # three times what bfloat16 rounds to, 2**-8, is 0.0117
    assert judged(run, off(OWN[:, AT], 0.013)) != []
    fine_tuned = off(OWN[:, AT], 0.1)
    assert judged(run, fine_tuned) == [
        "values differ beyond the noise: boundary 2 by 0.1 (median), 25.6 times the noise of 0.0039 in bfloat16"
    ]
    one_row = torch.cat([OWN[:8, AT], fine_tuned[8:]])  # of nine: the 95th percentile lies 0.6 of the way to it
    assert judged(run, one_row)[0].endswith("by 0.06 (p95), 15.4 times the noise of 0.0039 in bfloat16")
    by_hand.noise = 0.05  # of an engine that is as noisy itself
    assert judged(run, fine_tuned) == []
    assert judged(run, off(OWN[:, AT], 0.16))[0].endswith("by 0.16 (median), 3.2 times the noise of 0.05 in bfloat16")


def test_noise_is_at_least_what_the_coarser_of_dump_and_engine_rounds_to(
    by_hand: type[ByHand], exact: Run, rounding: Run
) -> None:
    near = off(OWN[:, AT], 1e-3)
    assert [bool(judged(exact, near, dtype)) for dtype in ("float32", "float16", "bfloat16", "float8_e4m3")] == [
        1,
        0,
        0,
        0,
    ]
    assert "1000.0 times the noise of 1e-06 in float32" in judged(exact, near, "float32")[0]
    assert judged(rounding, near, "float32") == []
    assert judged(exact, near, None) == []  # of our own store, in capture.dtype
    whole = dataclasses.replace(exact, spec=dataclasses.replace(exact.spec, dtype="float32"))
    assert judged(whole, near, None) != []


def test_boundaries_too_near_to_be_told_apart_are_not_called_aligned(by_hand: type[ByHand], rounding: Run) -> None:
    by_hand.own = OWN.clone()
    by_hand.own[:, 3] = off(OWN[:, 2], 0.02)
    (cause,) = judged(
        rounding, off(by_hand.own[:, AT], 0.01)
    )  # within the noise; and sqrt(0.01**2 + 0.02**2) from the next
    assert cause.startswith(
        "the features at boundary 2 cannot be told from those at boundary 3: they are 0.01 and 0.02"
    )
    assert judged(rounding, by_hand.own[:, AT]) == []


def test_the_last_hidden_state_is_held_to_its_noise_too(by_hand: type[ByHand], rounding: Run) -> None:
    run = rounding
    by_hand.own = OWN.clone()
    by_hand.own[:, 7] = torch.nn.functional.rms_norm(OWN[:, 7], [WIDE])
    last = by_hand.own[:, 7]
    assert judged(run, OWN[:, AT], last=off(last, 0.011)) == []
    assert judged(run, OWN[:, AT], last=torch.zeros_like(last)) == []  # no row was kept
    # As the norm of the tiny Llama is all ones, its own last state is the same with it and without
    (cause,) = judged(run, OWN[:, AT], last=off(last, 0.1))
    assert "values differ beyond the noise: the last hidden state by 0.1 (median), 25.6 times the noise" in cause


def test_a_state_before_the_norm_may_have_lost_its_scale(by_hand: type[ByHand], exact: Run) -> None:
    run = dataclasses.replace(exact, model=exact.model | {"rms_norm_eps": 1e-5})
    by_hand.own = OWN.clone()
    unscaled = torch.nn.functional.rms_norm(30 * OWN[:, 7], [WIDE], eps=1e-5)
    by_hand.own[:, 7] = unscaled * load_norm(run.config.target).float()

    def causes(states: torch.Tensor) -> list[str]:
        taken = Taken("a", torch.arange(T), OWN[:, AT], states, normed=False, dtype="float32")
        return identify(run, [taken], AT)["causes"]

    assert causes(30 * OWN[:, 7]) == []
    assert causes(unscaled) == []  # normed once more it is 5e-6 away
    (cause,) = causes(off(unscaled, 1e-3))
    assert "the last hidden state by 0.00097 (median), 97" in cause and "times the noise of 1e-05" in cause


def test_the_target_is_loaded_once_whichever_boundaries_its_class_captures(
    by_hand: type[ByHand], exact: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = exact
    assert judged(run, OWN[:, AT]) == []
    assert by_hand.started == [[1, 2, 3, 4, 5, 6, 7]]

    def latent(config: Any, boundaries: list[int]) -> list[int]:  # DeepSeek's class adds one to all if the first is 1
        if boundaries[0] == 1:
            raise EngineError("capture.boundaries: [1, ...] cannot be had")
        return boundaries

    monkeypatch.setattr(identification, "ask_layer_ids", latent)
    by_hand.started.clear()
    assert judged(run, OWN[:, AT]) == []
    assert by_hand.started == [[0, 1, 2, 3, 4, 5, 6, 7]]
    monkeypatch.setattr(identification, "ask_layer_ids", lambda config, boundaries: boundaries)
    with pytest.raises(ConfigError, match="capture.boundaries: 0 cannot be captured .* has boundaries 1 to 7"):
        identify(run, [Taken("a", torch.arange(T), OWN[:, [0, 2]])], [0, 2])
    assert len(by_hand.started) == 1


def test_what_was_measured_of_a_dump_is_kept_in_the_store(
    by_hand: type[ByHand], exact: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = SimpleNamespace(get=lambda of: of, remote=lambda **_: lambda task: SimpleNamespace(remote=task))
    monkeypatch.setattr("eagle3_ray.verify.ray", here)
    (tmp_path / "dump").mkdir()
    for name, error in (("a", 0.0), ("b", 0.1)):
        states = off(OWN[:, AT], error).flatten(1)
        save_file({"input_ids": torch.arange(T), "aux": states}, tmp_path / "dump" / f"{name}.safetensors")
    by_hand.noise = 0.04
    places = set()
    for samples, wanted in ((1, 0.0), (2, 0.1)):
        given = {"features": FeaturesConfig(path=f"{tmp_path}/dump"), "verify": VerifyConfig(samples)}
        summary = elsewhere(dataclasses.replace(exact, config=dataclasses.replace(exact.config, **given)))
        assert summary["summary_path"].startswith(f"{exact.files.url('verifications')}/")
        kept = exact.files.read_json(summary["summary_path"].removeprefix(f"{exact.files.root}/"))
        assert kept == summary
        assert (kept["verdict"], kept["samples"], kept["rows"]) == ("aligned", samples, samples * T)
        assert kept["errors"]["p95"] == pytest.approx([wanted] * 3, abs=1e-6)
        assert kept["floor"] == {at: pytest.approx([0.04] * 3, rel=1e-4) for at in ("median", "p95")}
        assert kept["engine"] == {"engine": "by hand"}
        places.add(kept["summary_path"])
    assert len(places) == 2


# ---------------------------------------------------------------- with the real ones


@pytest.mark.engine
@pytest.mark.full
def test_what_transformers_computes_is_told_from_a_variant_of_the_weights(
    smollm2: Path, smollm2_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(compose(f"target.path={smollm2}", f"store.root={tmp_path}"))  # in fp32
    config = dataclasses.replace(run.config, engine=dataclasses.replace(run.config.engine, name="transformers"))
    config.engine.version = None
    theirs = TransformersEngine(config, run.folder, run.spec)
    texts = ["Why is the sky blue? " * 8, "Count to five, then name each colour of the rainbow. " * 4]
    ids = [smollm2_tokenizer(text)["input_ids"] for text in texts]
    engine = SGLangEngine(run.config, run.folder, dataclasses.replace(run.spec, boundaries=tuple(range(1, 30))))
    kept = SimpleNamespace(capture=engine.capture, capture_in_two=engine.capture_in_two, info=engine.info)
    kept.close = lambda: None  # one for all that follows
    monkeypatch.setattr(identification, "SGLangEngine", lambda *_: kept)

    def judged(dtype: str) -> list[str]:
        kind, given = getattr(torch, dtype), []
        for tokens, states in zip(ids, theirs.capture(ids), strict=True):
            aux, last = states.aux.to(kind).float().unflatten(1, (3, -1)), states.last_hidden.to(kind).float()
            given.append(Taken("a", torch.tensor(tokens), aux, last, dtype=dtype))
        found = identify(run, given, [2, 15, 27])
        print(dtype, {name: found[name] for name in ("causes", "errors", "floor", "found", "last_hidden")})
        return found["causes"]

    try:
        assert [judged(dtype) for dtype in ("float32", "bfloat16")] == [[], []]
        with torch.no_grad():  # as a light fine-tune: every weight of the layers, by five percent
            for weight in theirs.model.model.layers.parameters():
                weight.mul_(1 + 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
        for dtype in ("float32", "bfloat16"):
            assert "values differ beyond the noise: boundary" in judged(dtype)[0]
    finally:
        engine.close()


@pytest.mark.engine
def test_a_sequence_is_captured_in_two_chunks_with_every_row(
    smollm2_engine: SGLangEngine, smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = smollm2_tokenizer("Why is the sky blue, and the sea? " * 6)["input_ids"]
    rows, read = [], smollm2_engine._rows

    def counted(*args: Any, **named: Any) -> Captured:
        rows.append(len((found := read(*args, **named)).aux))
        return found

    monkeypatch.setattr(smollm2_engine, "_rows", counted)
    (whole,) = smollm2_engine.capture([ids])
    for _ in range(2):
        again = smollm2_engine.capture_in_two(ids)
        print(rows, float((again.aux - whole.aux).abs().max()))
        assert rows[-2] == len(ids) // 2 and rows[-1] <= len(ids) - rows[-2] + 1  # the rest comes from the cache
        assert again.aux.shape == whole.aux.shape and again.last_hidden.shape == whole.last_hidden.shape
        assert (again.aux - whole.aux).abs().max() <= 1e-4 * whole.aux.abs().max()
        assert (again.last_hidden - whole.last_hidden).abs().max() <= 1e-4 * whole.last_hidden.abs().max()
    assert len(smollm2_engine.capture_in_two(ids[:2]).aux) == 2
    assert list(smollm2_engine.capture_dir.glob("*.rows")) == []
