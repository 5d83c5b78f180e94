"""Whose states are these: dumps in each layout, with faults made by hand, against a target made by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3_ray.config import ConfigError
from eagle3_ray.identify import _boundaries, _last, _last_causes, nearest, read_dump

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
        (taken,) = read_dump(tmp_path / layout, 8, 3)
        assert torch.equal(taken.input_ids, ids) and torch.equal(taken.states, aux)
        assert taken.normed is normed
        assert (taken.last is None) if last is None else torch.equal(taken.last, last)


class Harmful:
    def __reduce__(self) -> tuple:
        return print, ("unpickled",)


def test_what_is_no_dump_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="features.path: no .ckpt"):
        read_dump(tmp_path, 8, 3)
    torch.save({"input_ids": torch.arange(3), "aux": Harmful()}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="a.pt cannot be read as tensors alone"):
        read_dump(tmp_path, 8, 3)
    assert capsys.readouterr().out == ""
    torch.save({"input_ids": torch.arange(3), "aux": torch.zeros(2, 6)}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="a.pt has 3 tokens and 2 rows"):
        read_dump(tmp_path, 8, 3)
    torch.save({"ids": torch.arange(3)}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=r"a.pt holds \['ids'\], which is no layout"):
        read_dump(tmp_path, 8, 3)


def test_a_sequence_is_cut_whole(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    save_file(
        {"input_ids": torch.arange(T), "aux": EVERY[:, :3].flatten(1).contiguous(), "last_hidden": LAST},
        tmp_path / "a.safetensors",
    )
    (taken,) = read_dump(tmp_path, 8, 3)
    cut = taken.cut(4)
    assert [len(cut.input_ids), len(cut.states), len(cut.last)] == [4, 4, 4]
    assert dataclasses.replace(taken, last=None).cut(4).last is None
