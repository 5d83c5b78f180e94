"""What a shard keeps of the states: precisions, compression, single samples read from a store, and transcoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stores import listed
from test_store import PRINT, _features, _same

from eagle3_ray.config import TrainConfig
from eagle3_ray.store import layout
from eagle3_ray.store.blocks import compress, decompress
from eagle3_ray.store.cache import Cache
from eagle3_ray.store.commits import Units
from eagle3_ray.store.filesystem import Filesystem, StoreError
from eagle3_ray.store.precision import VALUES, dequantise, quantise, stored
from eagle3_ray.store.shards import Features, ShardReader, write_features
from eagle3_ray.store.transcode import destination, transcode
from eagle3_ray.strict_json import fingerprint
from eagle3_ray.train.features import batches, stream

MASKS = [[0, 0, 1, 1, 1], [], [0, 1, 0], [1] * 40, [0], [0, 1, 1, 0, 0, 0, 0]]
KINDS = [(dtype, compression) for dtype in ("bfloat16", "float32", "float8_e4m3") for compression in ("none", "zstd")]


def samples(dtype: str, hidden: int = 8) -> list[Features]:
    """As the extraction hands them over."""
    whole = [_features(f"sample {i}", mask, torch.float32, hidden) for i, mask in enumerate(MASKS)]
    return [replace(f, **stored(f.aux, f.last_hidden, dtype)) for f in whole]  # type: ignore[arg-type]


def read(path: Path, **where: Filesystem) -> list[Features]:
    reader = ShardReader(path, PRINT, **where)
    return [reader.stored(i) for i in range(len(reader))]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, so that a sample has several, the last one shorter."""
    monkeypatch.setattr("eagle3_ray.store.blocks.BLOCK_BYTES", 500)


# ---------------------------------------------------------------- fp8


def outliers() -> torch.Tensor:
    """Aux of 3 boundaries of 64, several pieces of it: usual rows, a massive outlier, zeros, and tiny values."""
    aux = torch.randn(2 * VALUES // (3 * 64) + 7, 3, 64, generator=torch.Generator().manual_seed(0)) * 2  # [T, A, H]
    aux[5, 1, 10] = 24960.0
    aux[6] = aux[7, 2] = 0
    aux[8, 0] *= 1e-30
    aux[9, 0] = 0
    aux[9, 0, 3] = 1e-44  # its scale underflows to none
    aux[10, 0] = 0
    aux[10, 0, 3] = 9.4e-43  # its scale to so little that it is 671 of them
    return aux


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_fp8_errs_by_a_sixteenth_of_a_value_or_by_very_little_of_its_boundarys_largest(given: torch.dtype) -> None:
    aux = outliers().to(given)  # [T, A, H]
    kept = stored(aux.flatten(1), torch.randn(4, 64), "float8_e4m3")
    assert (kept["aux"].dtype, kept["aux_scale"].dtype) == (torch.float8_e4m3fn, torch.float32)
    assert kept["last_hidden"].dtype == torch.bfloat16
    assert kept["aux_scale"].shape == aux.shape[:2]
    got = dequantise(kept["aux"], kept["aux_scale"])  # [T, A*H]
    assert got.dtype == torch.bfloat16
    got, wanted = got.double().view_as(aux), aux.double()
    largest = wanted.abs().amax(-1, keepdim=True)  # [T, A, 1]
    rounding = 2.0**-8  # bfloat16's, of the result
    bound = (wanted.abs() / 16).maximum(largest / 448 / 2**10) * (1 + rounding) + wanted.abs() * rounding
    assert ((got - wanted).abs() <= bound + 1e-40).all()
    assert (got[6] == 0).all() and (got[7, 2] == 0).all()
    assert got[5, 1, 10] == 24960
    usual = torch.arange(len(aux)) > 10
    relative = (got - wanted)[usual].norm() / wanted[usual].norm()
    assert 0.01 < relative < 0.03  # FACTS: 0.02
    # the outlier is its own boundary's matter: the same row's others are as good as any
    others = (got - wanted)[5, [0, 2]].norm() / wanted[5, [0, 2]].norm()
    assert others < 0.05


def test_the_pieces_that_a_sample_is_quantised_in_do_not_show() -> None:
    aux = outliers().flatten(1)  # [T, A*H]
    values, scale = quantise(aux, 3)
    kept = stored(aux, torch.empty(0, 64), "float8_e4m3")
    assert torch.equal(kept["aux"].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(kept["aux_scale"], scale)
    eager = (values.float().view(len(aux), 3, 64) * scale[..., None]).flatten(1).bfloat16()
    assert torch.equal(dequantise(values, scale), eager)


def test_states_of_fp8_are_read_as_bfloat16_and_nothing_else_changes(tmp_path: Path) -> None:
    kept = samples("float8_e4m3")
    write_features(tmp_path / "shard", kept, PRINT)
    reader = ShardReader(tmp_path / "shard", PRINT)
    for i, sample in enumerate(kept):
        assert _same(reader.stored(i), sample)
        aux = dequantise(sample.aux, sample.aux_scale)  # type: ignore[arg-type]
        assert _same(reader.features(i), replace(sample, aux=aux, aux_scale=None))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3"])
def test_what_is_stored_holds_on_to_no_memory_of_the_engine(dtype: str) -> None:
    states = torch.ones(5, 32, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32)  # [T, A*H + H]
    kept = stored(states[:, :24], states[torch.tensor([1, 2]), 24:], dtype)
    assert all(tensor.untyped_storage().data_ptr() != states.untyped_storage().data_ptr() for tensor in kept.values())


@pytest.mark.parametrize("wrong", [{"aux_scale": None}, {"aux_scale": torch.ones(2, 3)}, {"aux": torch.ones(5, 24)}])
def test_fp8_and_its_scales_are_written_together_or_not_at_all(tmp_path: Path, wrong: dict) -> None:
    with pytest.raises(StoreError, match="5 tokens of .* rows of aux_scale"):
        write_features(tmp_path / "shard", [replace(samples("float8_e4m3")[0], **wrong)], PRINT)


# ---------------------------------------------------------------- compression


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_block_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    every = torch.arange(2**16).to(torch.int32).to(torch.uint16).view(torch.uint8)  # NaN of every kind, too
    rows = every.view(dtype).view(64, -1)
    back = torch.empty_like(rows)
    decompress(torch.frombuffer(bytearray(compress(rows)), dtype=torch.uint8), back)
    assert torch.equal(back.view(torch.uint8), rows.view(torch.uint8))


def test_the_bytes_are_shuffled_before_they_are_compressed() -> None:
    rows = (1 + torch.rand(256, 256, generator=torch.Generator().manual_seed(0))).bfloat16()  # of one exponent
    assert len(compress(rows)) < 0.51 * rows.nbytes < 0.95 * len(compress(rows.view(torch.uint8)))


@pytest.mark.parametrize(("dtype", "compression"), KINDS)
def test_any_sample_comes_back_bit_for_bit(tmp_path: Path, small_blocks: None, dtype: str, compression: str) -> None:
    kept = samples(dtype)
    write_features(tmp_path / "shard", kept, PRINT, compression)
    for got in (read(tmp_path / "shard"), read("shard", files=Filesystem(str(tmp_path)))):  # type: ignore[arg-type]
        assert len(got) == len(kept) and all(map(_same, got, kept))
    reader = ShardReader(tmp_path / "shard", PRINT)
    assert all(_same(reader.stored(i), kept[i]) for i in (3, 0, 5, 1, 4, 2))


def test_compression_makes_a_shard_smaller_and_it_stays_a_safetensors_file(tmp_path: Path) -> None:
    kept = samples("bfloat16", hidden=256)
    write_features(tmp_path / "plain", kept, PRINT)
    write_features(tmp_path / "small", kept, PRINT, "zstd")
    plain, small = load_file(tmp_path / "plain"), load_file(tmp_path / "small")
    for name in ("aux", "last_hidden"):
        assert small[name].dtype == torch.uint8 and small[name].nbytes < 0.9 * plain[name].nbytes
        assert int(small[f"{name}.blocks"][-1]) == small[name].nbytes
    assert (tmp_path / "small").stat().st_size < 0.9 * (tmp_path / "plain").stat().st_size


def test_a_compressed_shard_may_have_no_samples(tmp_path: Path) -> None:
    write_features(tmp_path / "shard", [], PRINT, "zstd")
    assert len(ShardReader(tmp_path / "shard", PRINT)) == 0


def test_states_that_do_not_compress_have_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3_ray.store.blocks.BLOCK_BYTES", 100)
    noise = torch.randint(0, 256, (40, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    noise[:, 1::2] &= 0xBF  # below 2, and finite
    sample = samples("bfloat16", hidden=4)[3]
    sample.aux = noise.view(torch.bfloat16)  # [T, A*H] of 960 bytes, and over 1000 in blocks
    write_features(tmp_path / "shard", [sample], PRINT, "zstd")
    assert load_file(tmp_path / "shard")["aux"].nbytes >= 1000
    assert _bits(read(tmp_path / "shard")[0]) == _bits(sample)


def _bits(sample: Features) -> list[int]:
    return sample.aux.contiguous().view(torch.uint8).flatten().tolist()


# ---------------------------------------------------------------- one sample of a store's shard


class Counted(Filesystem):
    """Keeps what was asked for."""

    def read(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        data = super().read(key, start, end)
        self.spans.append((start or 0, (start or 0) + len(data)))
        return data


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    files = Counted(str(tmp_path))
    files.spans: list[tuple[int, int]] = []  # type: ignore[misc]
    return files


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_one_sample_of_a_store_costs_its_own_bytes(tmp_path: Path, counted: Counted, compression: str) -> None:
    kept = [_features(f"sample {i}", [1] * 100, hidden=256) for i in range(10)]
    write_features(tmp_path / "shard", kept, PRINT, compression)
    reader = ShardReader("shard", PRINT, counted)
    assert counted.spans == [(0, layout.FIRST_READ)]
    counted.spans.clear()
    assert _same(reader.features(7), kept[7])
    sample = sum(value.nbytes for value in vars(kept[7]).values() if isinstance(value, torch.Tensor))
    assert (0.5 if compression == "zstd" else 1) * sample <= sum(end - start for start, end in counted.spans) <= sample
    assert len(counted.spans) == 5


def test_a_header_longer_than_the_first_read_costs_a_second_and_the_index_a_third(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_features(tmp_path / "shard", samples("bfloat16"), PRINT)
    monkeypatch.setattr(layout, "FIRST_READ", 16)
    ShardReader("shard", PRINT, counted)
    begin = 8 + int.from_bytes((tmp_path / "shard").read_bytes()[:8], "little")
    assert counted.spans == [(0, 16), (16, begin), (begin, begin + 8 * 3 * (len(MASKS) + 1))]


@pytest.mark.parametrize(("dtype", "compression"), [("bfloat16", "none"), ("float32", "zstd"), ("float8_e4m3", "none")])
def test_any_flipped_byte_is_noticed_in_what_a_store_hands_out(tmp_path: Path, dtype: str, compression: str) -> None:
    kept = [replace(sample, id=sample.id[-1]) for sample in samples(dtype)[:3]]
    write_features(tmp_path / "shard", kept, PRINT, compression)
    files, whole = Filesystem(str(tmp_path)), (tmp_path / "shard").read_bytes()
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 4
        (tmp_path / "shard").write_bytes(data)
        with pytest.raises(StoreError, match=f"shard {tmp_path}/shard"):
            read("shard", files=files)  # type: ignore[arg-type]


def test_a_damaged_sample_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    kept = samples("bfloat16")
    write_features(tmp_path / "shard", kept, PRINT)
    data = bytearray((tmp_path / "shard").read_bytes())
    at = data.index(bytes(_bits(kept[3])))
    data[at] ^= 1
    (tmp_path / "shard").write_bytes(data)
    reader = ShardReader("shard", PRINT, Filesystem(str(tmp_path)))
    with pytest.raises(StoreError, match="/shard: the bytes of its sample 3 "):
        reader.features(3)
    assert all(_same(reader.features(i), kept[i]) for i in (0, 1, 2, 4, 5))


def test_a_store_whose_object_is_short_or_missing_says_so(tmp_path: Path) -> None:
    files = Filesystem(str(tmp_path))
    with pytest.raises(StoreError, match=f"{tmp_path}/none cannot be opened"):
        ShardReader("none", PRINT, files)
    write_features(tmp_path / "shard", [_features("a", [1] * 4)], PRINT)
    reader = ShardReader("shard", PRINT, files)
    (tmp_path / "shard").write_bytes((tmp_path / "shard").read_bytes()[:-1])
    with pytest.raises(StoreError, match="ends before its sample 0 does"):
        reader.features(0)


# ---------------------------------------------------------------- transcoding


DESCRIPTION = {"boundaries": [1, 2, 3], "engine_dtype": "bfloat16", "target": "kimi"}


def units_of(root: Path, dtype: str, compression: str = "none", shard_bytes: int = 1000, **more: str) -> Units:
    """Features that a run has stored: two units of three samples."""
    description = DESCRIPTION | {"dtype": dtype} | more
    units = Units(Filesystem(str(root)), "features", fingerprint(description))
    units.describe(description | {"shard_bytes": shard_bytes})
    units.record("engine", {"attention_backend": "fa3"})
    engine = getattr(torch, description["engine_dtype"])
    of = [replace(f, **stored(f.aux.to(engine), f.last_hidden.to(engine), dtype)) for f in samples("float32")]  # type: ignore[arg-type]
    for unit in range(2):
        group = of[3 * unit :][:3]
        write_features(root / "new", group, units.folder.rpartition("/")[2], compression)
        assert units.commit(f"u{unit}", root / "new", listed(group), failed=[], engine={"class": "x"})
    return units


def all_of(units: Units) -> dict[str, Features]:
    found = {}
    for commit in units.commits():
        reader = units.open(commit, Cache(Path("/nonexistent")))
        found |= {sample.id: sample for sample in (reader.stored(i) for i in range(len(reader)))}
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("compressions", [("none", "zstd"), ("zstd", "none")])
def test_another_compression_has_the_same_fingerprint_and_bits(
    tmp_path: Path, dtype: str, compressions: tuple[str, str]
) -> None:
    (tmp_path / "a").mkdir()
    source = units_of(tmp_path / "a", dtype, compressions[0], engine_dtype="float32")
    with pytest.raises(StoreError, match="another store.root"):
        destination(source, source.files, dtype)
    target = destination(source, Filesystem(str(tmp_path / "b")), dtype)
    assert transcode(source, target, compressions[1], Cache(tmp_path / "cache"), tmp_path) == 2
    assert target.folder == source.folder and target.description() == source.description()
    before, after = all_of(source), all_of(target)
    assert before.keys() == after.keys() and all(_same(after[name], before[name]) for name in before)
    for old, new in zip(source.commits(), target.commits(), strict=True):
        assert (new.unit, new.samples) == (old.unit, old.samples)
        assert new.facts == old.facts | {"transcoded_from": source.files.url(old.shard)}
    sizes = [sum(commit.size for commit in units.commits()) for units in (source, target)]
    assert sizes[0] != sizes[1]
    assert target.files.read(f"{target.folder}/engine.json") == source.files.read(f"{source.folder}/engine.json")
    assert not (tmp_path / "cache").exists() and not list(tmp_path.glob("tmp*"))


@pytest.mark.parametrize(
    ("before", "after"), [("float32", "bfloat16"), ("bfloat16", "float8_e4m3"), ("float32", "float8_e4m3")]
)
def test_less_precision_is_what_a_capture_in_it_would_have_stored(tmp_path: Path, before: str, after: str) -> None:
    (tmp_path / "captured").mkdir()
    source, captured = units_of(tmp_path, before), units_of(tmp_path / "captured", after)
    target = destination(source, source.files, after)
    transcode(source, target, "zstd", Cache(tmp_path / "cache"), tmp_path)
    assert target.folder == captured.folder
    got, wanted = all_of(target), all_of(captured)
    assert got.keys() == wanted.keys() and all(_same(got[name], wanted[name]) for name in wanted)


def test_values_that_lost_bits_are_kept_apart_from_captured_ones(tmp_path: Path) -> None:
    source = units_of(tmp_path, "float8_e4m3")
    target = destination(source, source.files, "bfloat16")
    transcode(source, target, "none", Cache(tmp_path / "cache"), tmp_path)
    assert target.description()["transcoded_from"] == source.folder
    assert target.folder != units_of(tmp_path, "bfloat16").folder
    before, after = all_of(source), all_of(target)
    for name, sample in before.items():
        aux = dequantise(sample.aux, sample.aux_scale)  # type: ignore[arg-type]
        assert _same(after[name], replace(sample, aux=aux, aux_scale=None))
    unlike = units_of(tmp_path, "bfloat16", engine_dtype="float32")  # fp8 of its float32 values is another
    assert destination(unlike, unlike.files, "float8_e4m3").description()["transcoded_from"] == unlike.folder


def test_a_transcoding_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = units_of(tmp_path, "bfloat16")
    target = destination(source, source.files, "float8_e4m3")
    commit = target.commit

    def stop(unit: str, *args: object, **facts: object) -> bool:
        if unit == "u1":
            raise KeyboardInterrupt
        return commit(unit, *args, **facts)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(target, "commit", stop)
        transcode(source, target, "none", Cache(tmp_path / "cache"), tmp_path)
    first = target.read_commit("u0")
    again = destination(source, source.files, "float8_e4m3")
    assert transcode(source, again, "none", Cache(tmp_path / "cache"), tmp_path) == 1
    assert target.read_commit("u0") == first and target.committed() == ["u0", "u1"]
    monkeypatch.setattr(source, "fetch", lambda commit, cache: pytest.fail("a finished unit was read again"))
    assert transcode(source, again, "none", Cache(tmp_path / "cache"), tmp_path) == 0
    assert len(target.files.list(f"{target.folder}/shards")) == 2
    assert not (tmp_path / "cache").exists() and not list(tmp_path.glob("tmp*"))


@pytest.mark.parametrize("shard_bytes", [1, 100, 1000, 12345])
def test_the_units_of_another_precision_are_those_that_its_shard_bytes_cuts(tmp_path: Path, shard_bytes: int) -> None:
    source = units_of(tmp_path, "bfloat16", shard_bytes=shard_bytes)
    rows = {"bfloat16": 64, "float8_e4m3": 3 * 8 + 3 * 4 + 2 * 8}
    new = destination(source, source.files, "float8_e4m3").description()["shard_bytes"]
    for tokens in range(1, 400):
        assert (tokens * rows["bfloat16"] > shard_bytes) == (tokens * rows["float8_e4m3"] > new)


def test_shards_of_every_kind_lie_in_one_folder_and_training_reads_them_alike(tmp_path: Path) -> None:
    units = Units(Filesystem(str(tmp_path)), "features", PRINT)
    for number, (dtype, compression) in enumerate(KINDS):
        named = [replace(f, id=f"{number}/{f.id}") for f in samples(dtype)]
        write_features(tmp_path / "new", named, PRINT, compression)
        units.commit(f"u{number}", tmp_path / "new", listed(named))
    for number, ((dtype, _), commit) in enumerate(zip(KINDS, units.commits(), strict=True)):
        got = [replace(f, id=f.id.removeprefix(f"{number}/")) for f in read(units.fetch(commit, Cache(tmp_path)))]
        assert len(got) == len(MASKS) and all(map(_same, got, samples(dtype)))
    config = TrainConfig(batch_size=len(KINDS) * len(MASKS))
    (batch,) = batches(next(stream(config, units, units.commits(), tmp_path, 0, 1, 0)), 4096, torch.bfloat16)
    whole = {f.id: f for f in samples("bfloat16")}
    for name, aux in zip(batch.ids, batch.aux.split(batch.lengths), strict=True):
        torch.testing.assert_close(aux, whole[name.rpartition("/")[2]].aux[: len(aux)], rtol=0.08, atol=0.01)
