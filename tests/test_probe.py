"""The start-up probe: an engine that captures anything but what was asked for is found out, and said so by name."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from conftest import compose

from eagle3_ray.engines.base import Captured, RequestError
from eagle3_ray.engines.transformers import TransformersEngine
from eagle3_ray.probe import ERROR, ProbeError, check_norms, probe, probe_sequences
from eagle3_ray.run import Run, open_run
from eagle3_ray.store.precision import dequantise, stored

SEQUENCES = [[1, *range(40, 60)], [1, 7, 7, 9]]


@pytest.fixture
def run(tiny_llama_folder, tmp_path) -> Run:
    """Settings that say sglang; the engines under test are Transformers ones with a fault."""
    common = [f"target.path={tiny_llama_folder}", f"store.root={tmp_path}", "capture.boundaries=[1,4,6]"]
    return open_run(compose(*common))


class Faulty(TransformersEngine):
    """The reference engine, whose `fault` changes what it captures."""

    def __init__(self, run: Run, fault=lambda captured: captured, **spec) -> None:
        engine = dataclasses.replace(run.config.engine, name="transformers", version=None, dtype="float32")
        config = dataclasses.replace(run.config, engine=engine)
        super().__init__(config, run.folder, dataclasses.replace(run.spec, **spec))
        self.fault = fault

    def capture(self, sequences):
        return [self.fault(one) for one in super().capture(sequences)]


def test_the_right_states_pass_and_are_described(run: Run) -> None:
    found = probe(run, Faulty(run), SEQUENCES)
    assert found["reference"] == "transformers" and found["rows"] == 25
    assert list(found["errors"]) == ["boundary 1", "boundary 4", "boundary 6", "last hidden"] == list(found["norms"])
    assert all(0 < low <= middle <= high for low, middle, high in found["norms"].values())
    assert len(found["cosines"]) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_boundary_is_called_by_its_name(run: Run, dtype: str) -> None:
    run.config.engine.dtype = dtype
    with pytest.raises(ProbeError, match="boundary 1 was asked for, boundary 2 came back"):
        probe(run, Faulty(run, boundaries=(2, 5, 7)), SEQUENCES)


def test_another_boundary_is_refused_however_wide_the_limit(run: Run, monkeypatch) -> None:
    monkeypatch.setitem(ERROR, "float32", 100.0)
    with pytest.raises(ProbeError, match="boundary 1 was asked for, boundary 2 came back"):
        probe(run, Faulty(run, boundaries=(2, 5, 7)), SEQUENCES)


def test_states_that_are_nearly_right_are_refused(run: Run) -> None:
    with pytest.raises(ProbeError, match="boundary 1 was asked for, boundary 1 came back: its relative error"):
        probe(
            run,
            Faulty(run, lambda c: Captured(c.aux * torch.linspace(1, 1.01, c.aux.shape[1]), c.last_hidden)),
            SEQUENCES,
        )


def test_a_last_state_before_the_norm_is_refused(run: Run) -> None:
    """The state before the final norm is no boundary that was asked for, and not the last hidden state either."""
    with pytest.raises(ProbeError, match="last hidden was asked for, boundary 6 came back"):
        probe(run, Faulty(run, lambda c: Captured(c.aux, c.aux[:, -c.last_hidden.shape[1] :])), SEQUENCES)


def test_a_target_too_large_for_transformers_is_its_own_witness(run: Run, monkeypatch) -> None:
    monkeypatch.setattr("eagle3_ray.probe.REFERENCE_BYTES", 1000)
    found = probe(run, Faulty(run), SEQUENCES)
    assert found["reference"] == "output head"
    assert found["same_token"] == 1.0 and found["logprob_error"] < 1e-4
    with pytest.raises(ProbeError, match="not what the target answers from"):
        probe(run, Faulty(run, lambda c: Captured(c.aux, c.last_hidden.roll(1, 0))), SEQUENCES)

    def few_wrong(captured):  # too few for the median
        wrong = captured.last_hidden.clone()
        wrong[::4] = wrong[::4].flip(-1)
        return Captured(captured.aux, wrong)

    with pytest.raises(ProbeError, match="likeliest token on 72% of 25 rows"):
        probe(run, Faulty(run, few_wrong), SEQUENCES)
    with pytest.raises(ProbeError, match="log-probability within"):  # the argmax of a scaled state is still right
        probe(run, Faulty(run, lambda c: Captured(c.aux, c.last_hidden * 1.05)), SEQUENCES)


def test_a_sample_unlike_the_probe_is_refused(run: Run) -> None:
    engine = Faulty(run)
    norms = probe(run, engine, SEQUENCES)["norms"]

    def checked(change) -> None:
        (captured,) = engine.capture([[5, 6, 7, 8]])
        aux, last = captured.aux.clone(), captured.last_hidden.clone()
        change(aux, last)
        check_norms(run, Captured(aux, last), norms)

    def nan(aux, last):
        last[2, 0] = float("nan")

    def empty_row(aux, last):
        aux[1, 64:128] = 0

    def too_large(aux, last):
        aux[:, 128:] *= 100

    checked(lambda aux, last: None)
    for change, reason in (
        (nan, "last hidden: the states are not finite"),
        (empty_row, "boundary 4: a row is all zeros"),
        (too_large, "boundary 6: the median norm .* is far from the probe's"),
    ):
        with pytest.raises(RequestError, match=reason):
            checked(change)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e25, 3e38])
@pytest.mark.parametrize("name", ["boundary 1", "boundary 6", "last hidden"])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(run: Run, name: str, value: float) -> None:
    """In a sample it is that sample's reason, at the start the end of the engine; also where only its square is."""
    engine = Faulty(run)
    norms = probe(run, engine, SEQUENCES)["norms"]

    def plant(captured: Captured) -> Captured:
        aux, last = captured.aux.clone(), captured.last_hidden.clone()
        {"boundary 1": aux, "boundary 6": aux[:, -64:], "last hidden": last}[name][-1, 5] = value
        return Captured(aux, last)

    said = "are so large that their squares are not finite" if math.isfinite(value) else "are not finite"
    with pytest.raises(RequestError, match=f"{name}: the states {said}"):
        check_norms(run, plant(engine.capture([[5, 6, 7, 8]])[0]), norms)
    with pytest.raises(ProbeError, match=f"{name}: 2 of 25 rows of the corpus's first prompts {said}"):
        probe(run, Faulty(run, plant), SEQUENCES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3"])
def test_what_passes_the_check_is_finite_as_it_is_stored(run: Run, dtype: str) -> None:
    engine = Faulty(run)
    norms = probe(run, engine, SEQUENCES)["norms"]
    (captured,) = engine.capture([[5, 6, 7, 8]])
    aux, last = captured.aux.clone(), captured.last_hidden.clone()
    aux[2, 7] = last[1, 3] = 1.8e19
    check_norms(run, Captured(aux, last), norms)
    kept = stored(aux, last, dtype)
    assert kept["last_hidden"].isfinite().all()
    back = dequantise(kept["aux"], kept["aux_scale"]) if dtype == "float8_e4m3" else kept["aux"]
    assert back.isfinite().all() and float(back[2, 7]) == pytest.approx(1.8e19, rel=0.01)


def test_log_probabilities_that_are_no_numbers_prove_nothing(run: Run, monkeypatch) -> None:
    monkeypatch.setattr("eagle3_ray.probe.REFERENCE_BYTES", 1000)
    engine = Faulty(run)
    monkeypatch.setattr(
        engine,
        "next_tokens",
        lambda ids: [(math.nan, token) for _, token in TransformersEngine.next_tokens(engine, ids)],
    )
    with pytest.raises(ProbeError, match="log-probability within nan"):
        probe(run, engine, SEQUENCES)


def test_a_few_prompts_are_enough_for_the_probe() -> None:
    assert probe_sequences([[1] * 200, [2] * 100, [3] * 10]) == [[1] * 200, [2] * 100]
    assert probe_sequences([[1] * 900, [2]]) == [[1] * 900]
