"""The weighted mean of files, against sums in float64."""

from __future__ import annotations

import json
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from functavg import checkpoints
from functavg.checkpoints import mapped, pieces
from tests.checkpoints.files import FORMATS, load, metadata_of, names_in, save

SHAPES = [(3, 4), (), (0,), (5,), (2, 1, 3)]


@pytest.fixture(params=FORMATS)
def suffix(request):
    return request.param


@pytest.fixture
def small_pieces(monkeypatch):
    """Tensors of a few elements are cut into pieces."""
    monkeypatch.setattr(pieces, "PIECE", 16)


def three(folder, suffix, dtype=torch.float32, seed=0):
    """Return three files of random tensors and an integer, and their values in float64."""
    generator = torch.Generator().manual_seed(seed)
    paths, values = [], []
    for index in range(3):
        tensors = {f"layer{i}.w": torch.randn(shape, generator=generator).to(dtype) for i, shape in enumerate(SHAPES)}
        tensors["count"] = torch.tensor(20 + index)
        paths.append(save(folder / f"{index}{suffix}", tensors))
        values.append({name: tensor.double().numpy() for name, tensor in tensors.items()})
    return paths, values


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("output", FORMATS)
@pytest.mark.parametrize("weights", [None, [0.5, 0.3, 0.2], [3, 0, 1], [-0.5, 0.2, 1.3]])
def test_real_tensors_are_the_weighted_mean_and_integers_the_newest(tmp_path, suffix, output, weights):
    paths, values = three(tmp_path, suffix)
    done = checkpoints.average(paths, tmp_path / f"out{output}", weights=weights)
    shares = np.full(3, 1 / 3) if weights is None else np.array(weights) / np.sum(weights)
    result = load(done.output)
    for name in values[0].keys() - {"count"}:
        expected = sum(share * value[name] for share, value in zip(shares, values, strict=True))
        np.testing.assert_allclose(result[name].numpy(), expected, rtol=1e-6, atol=1e-6)
        assert result[name].dtype == torch.float32
    assert result["count"].item() == 22
    assert result["count"].dtype == torch.int64
    assert done.weights == pytest.approx(shares)
    assert done.files == tuple(paths)
    assert names_in(tmp_path) == {path.name for path in paths} | {f"out{output}"}


def test_integers_come_from_the_newest_file_that_has_a_weight(tmp_path, suffix):
    paths, _ = three(tmp_path, suffix)
    checkpoints.average(paths, tmp_path / f"out{suffix}", weights=[1, 1, 0])
    assert load(tmp_path / f"out{suffix}")["count"].item() == 21


def test_counters_of_int64_keep_dtype_and_newest_value(tmp_path, suffix):
    """20 and 21 give 21."""
    paths = [save(tmp_path / f"{n}{suffix}", {"n": torch.tensor(n), "b": torch.tensor(n > 20)}) for n in (20, 21)]
    checkpoints.average(paths, tmp_path / f"out{suffix}")
    result = load(tmp_path / f"out{suffix}")
    assert (result["n"].dtype, result["n"].item()) == (torch.int64, 21)
    assert (result["b"].dtype, result["b"].item()) == (torch.bool, True)


def test_tensors_that_are_tied_stay_tied(tmp_path):
    """Two files in which ``emb`` and ``head`` share one tensor of 1.0 give 1.0, still shared."""
    for index in range(2):
        shared = torch.ones(4)
        torch.save({"emb": shared, "head": shared, "other": torch.ones(4)}, tmp_path / f"{index}.pt")
    checkpoints.average([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "out.pt")
    result = load(tmp_path / "out.pt")
    assert result["emb"].tolist() == [1.0] * 4
    assert result["emb"].data_ptr() == result["head"].data_ptr()
    assert result["other"].data_ptr() != result["head"].data_ptr()


def test_ties_go_through_safetensors_as_its_library_records_them(tmp_path):
    shared = torch.ones(4)
    torch.save({"emb": shared, "head": shared}, tmp_path / "in.pt")
    checkpoints.average([tmp_path / "in.pt"], tmp_path / "out.safetensors")
    assert load(tmp_path / "out.safetensors").keys() == {"emb"}
    assert metadata_of(tmp_path / "out.safetensors")["head"] == "emb"
    model = nn.Module()
    model.emb = model.head = nn.Parameter(torch.zeros(4))
    from safetensors.torch import load_model

    load_model(model, tmp_path / "out.safetensors")
    assert model.head.tolist() == [1.0] * 4
    checkpoints.average([tmp_path / "out.safetensors"], tmp_path / "back.pt")
    result = load(tmp_path / "back.pt")
    assert result["emb"].data_ptr() == result["head"].data_ptr()


def test_tensors_that_are_tied_in_one_file_only_are_averaged_each_by_itself(tmp_path):
    shared = torch.ones(2)
    torch.save({"emb": torch.full((2,), 3.0), "head": torch.full((2,), 5.0)}, tmp_path / "0.pt")
    torch.save({"emb": shared, "head": shared}, tmp_path / "1.pt")
    for output in FORMATS:
        checkpoints.average([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / f"out{output}")
        result = load(tmp_path / f"out{output}")
        assert result["emb"].tolist() == [2.0, 2.0]
        assert result["head"].tolist() == [3.0, 3.0]


def test_three_hundred_bfloat16_files_of_ones_give_ones(tmp_path, suffix):
    path = save(tmp_path / f"one{suffix}", {"w": torch.ones(3, dtype=torch.bfloat16)})
    checkpoints.average([path] * 300, tmp_path / f"out{suffix}")
    result = load(tmp_path / f"out{suffix}")["w"]
    assert result.dtype == torch.bfloat16
    assert result.tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_the_sum_is_rounded_once_to_the_dtype_of_the_files(tmp_path, suffix, dtype):
    paths, values = three(tmp_path, suffix, dtype)
    checkpoints.average(paths, tmp_path / f"out{suffix}")
    result = load(tmp_path / f"out{suffix}")["layer0.w"]
    mean = torch.from_numpy(sum(value["layer0.w"] for value in values) / 3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert result.dtype == dtype
    torch.testing.assert_close(result.to(wide), mean.to(dtype).to(wide), rtol=torch.finfo(dtype).eps, atol=1e-15)


def test_a_dtype_that_is_asked_for_is_stored_without_rounding_to_that_of_the_files(tmp_path, suffix):
    paths, values = three(tmp_path, suffix, torch.bfloat16)
    checkpoints.average(paths, tmp_path / f"out{suffix}", dtype="float32")
    result = load(tmp_path / f"out{suffix}")
    expected = sum(value["layer0.w"] for value in values) / 3
    np.testing.assert_allclose(result["layer0.w"].numpy(), expected, rtol=1e-6, atol=1e-6)
    assert result["layer0.w"].dtype == torch.float32
    assert result["count"].dtype == torch.int64


def test_files_of_several_floating_dtypes_need_a_dtype_to_store(tmp_path, suffix):
    wide = save(tmp_path / f"a{suffix}", {"w": torch.full((2,), 1.0)})
    low = save(tmp_path / f"b{suffix}", {"w": torch.full((2,), 2.0, dtype=torch.bfloat16)})
    with pytest.raises(checkpoints.CheckpointError, match=r"b\.\w+: 'w' is bfloat16, expected float32 as in .*dtype="):
        checkpoints.average([wide, low], tmp_path / f"out{suffix}")
    checkpoints.average([wide, low], tmp_path / f"out{suffix}", dtype=torch.float64)
    assert load(tmp_path / f"out{suffix}")["w"].tolist() == [1.5, 1.5]


def test_complex_tensors_are_averaged_and_take_the_complex_counterpart_of_a_dtype(tmp_path, suffix):
    for index, value in enumerate((1 + 2j, 3 - 4j)):
        save(tmp_path / f"{index}{suffix}", {"z": torch.tensor([value])})
    paths = [tmp_path / f"{index}{suffix}" for index in range(2)]
    checkpoints.average(paths, tmp_path / f"out{suffix}", dtype="bfloat16")
    assert load(tmp_path / f"out{suffix}")["z"].tolist() == [2 - 1j]
    checkpoints.average(paths, tmp_path / "wide.pt", dtype="float64", weights=[1, -1], normalize=False)
    assert load(tmp_path / "wide.pt")["z"].tolist() == [-2 + 6j]


def test_safetensors_cannot_hold_every_dtype(tmp_path):
    path = save(tmp_path / "in.pt", {"z": torch.ones(1, dtype=torch.complex128)})
    with pytest.raises(checkpoints.CheckpointError, match=r"'z' is complex128, which safetensors cannot hold; write a"):
        checkpoints.average([path], tmp_path / "out.safetensors")


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("weights", [[1, -1, 0], [2, 2, 2]])
def test_without_normalisation_it_is_the_plain_sum(tmp_path, suffix, weights):
    paths, values = three(tmp_path, suffix)
    checkpoints.average(paths, tmp_path / f"out{suffix}", weights=weights, normalize=False)
    result = load(tmp_path / f"out{suffix}")
    for name in ("layer0.w", "layer1.w", "layer3.w"):
        expected = sum(weight * value[name] for weight, value in zip(weights, values, strict=True))
        np.testing.assert_allclose(result[name].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert result["count"].item() == (22 if weights[-1] else 21)


def test_metadata_of_the_newest_is_kept_with_a_record_of_what_was_averaged(tmp_path):
    for index in range(2):
        save(tmp_path / f"{index}.safetensors", {"w": torch.ones(1)}, {"format": "pt", "epoch": str(index)})
    paths = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    checkpoints.average(paths, tmp_path / "out.safetensors", weights=[3, 1])
    metadata = metadata_of(tmp_path / "out.safetensors")
    assert (metadata["format"], metadata["epoch"]) == ("pt", "1")
    record = json.loads(metadata["functavg"])
    assert record["files"] == list(map(str, paths))
    assert record["weights"] == [0.75, 0.25]


def test_a_state_dict_keeps_the_versions_of_its_modules_and_loads_strictly(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for index in range(2):
        torch.save(model.state_dict(), tmp_path / f"{index}.pt")
    checkpoints.average([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "out.pt")
    result = load(tmp_path / "out.pt")
    assert isinstance(result, OrderedDict)
    assert result._metadata == model.state_dict()._metadata
    assert result._functavg["files"] == [str(tmp_path / "0.pt"), str(tmp_path / "1.pt")]
    assert list(result) == list(model.state_dict())
    nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).load_state_dict(result, strict=True)


def test_tensors_are_found_in_nested_dicts_and_what_is_no_weight_is_left_out(tmp_path):
    for index in range(2):
        checkpoint = {
            "epoch": index,
            "config": {"lr": 0.1},
            "optimizer": {"state": {0: {"m": torch.ones(1)}}},
            "model": {"w": torch.full((2,), float(index))},
        }
        torch.save(checkpoint, tmp_path / f"{index}.ckpt")
    checkpoints.average([tmp_path / "0.ckpt", tmp_path / "1.ckpt"], tmp_path / "out.ckpt")
    result = load(tmp_path / "out.ckpt")
    assert result.keys() == {"epoch", "config", "model", "functavg"}
    assert result["model"]["w"].tolist() == [0.5, 0.5]
    assert (result["epoch"], result["config"]) == (1, {"lr": 0.1})
    checkpoints.average([tmp_path / "out.ckpt"], tmp_path / "out.safetensors")
    assert metadata_of(tmp_path / "out.safetensors")["epoch"] == "1"


@pytest.mark.parametrize(
    ("key", "value"), [("ema", 2.0), ("model", 1.0), ("ema.block", 2.0), ("deep.est", 3.0), ("with.dots", 4.0)]
)
def test_a_key_chooses_among_several_dicts_and_beginnings_of_names(tmp_path, key, value):
    checkpoint = {
        "model": {"block.w": torch.ones(1)},
        "ema": {"block.w": torch.full((1,), 2.0), "w": torch.zeros(1)},
        "deep": {"est": {"w": torch.full((1,), 3.0)}},
        "with.dots": {"w": torch.full((1,), 4.0)},
    }
    torch.save(checkpoint, tmp_path / "in.pt")
    with pytest.raises(checkpoints.CheckpointError, match=r"expected one dict of tensors, got .*'model', 'ema'.*key="):
        checkpoints.average([tmp_path / "in.pt"], tmp_path / "out.safetensors")
    checkpoints.average([tmp_path / "in.pt"], tmp_path / "out.safetensors", key=key)
    result = load(tmp_path / "out.safetensors")
    assert next(iter(result.values())).item() == value
    with pytest.raises(checkpoints.CheckpointError, match="no tensor under 'nothing'"):
        checkpoints.average([tmp_path / "in.pt"], tmp_path / "out.safetensors", key="nothing")


def test_a_key_chooses_the_beginning_of_names_in_safetensors(tmp_path):
    path = save(tmp_path / "in.safetensors", {"module.w": torch.ones(1), "n_averaged": torch.tensor(3)})
    checkpoints.average([path], tmp_path / "out.pt", key="module")
    assert load(tmp_path / "out.pt").keys() == {"w"}
    with pytest.raises(checkpoints.CheckpointError, match="no tensor under 'nothing'; there are 'n_averaged', 'mod"):
        checkpoints.average([path], tmp_path / "out.pt", key="nothing")


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_with_an_index_are_read_as_one_file_also_from_their_folder(tmp_path, suffix):
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    for index in range(2):
        folder = tmp_path / str(index)
        folder.mkdir()
        save(folder / f"{stem}-1{suffix}", {"a": torch.full((2,), float(index))})
        save(folder / f"{stem}-2{suffix}", {"b": torch.full((3,), 2.0 * index)})
        weight_map = {"a": f"{stem}-1{suffix}", "b": f"{stem}-2{suffix}"}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    index = tmp_path / "0" / f"{stem}{suffix}.index.json"
    checkpoints.average([index, tmp_path / "1"], tmp_path / "out.safetensors")
    result = load(tmp_path / "out.safetensors")
    assert (result["a"].tolist(), result["b"].tolist()) == ([0.5] * 2, [1.0] * 3)


def test_views_and_files_of_old_torch_are_read_with_their_values(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"t": whole.t(), "part": whole[1:, 1:], "row": whole[1], "wide": torch.ones(1).expand(3)}
    tensors |= {"conj": torch.tensor([1 + 2j]).conj(), "param": nn.Parameter(torch.ones(2))}
    torch.save(tensors, tmp_path / "new.pt")
    torch.save(tensors, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    checkpoints.average([tmp_path / "new.pt", tmp_path / "old.pt"], tmp_path / "out.pt")
    result = load(tmp_path / "out.pt")
    for name, tensor in tensors.items():
        torch.testing.assert_close(result[name], tensor.detach(), rtol=0, atol=0)
        assert result[name].is_contiguous()


def test_entries_that_are_no_tensors_go_into_a_torch_file_and_not_into_safetensors(tmp_path):
    torch.save({"w": torch.ones(1), "_extra_state": {"n": 3}}, tmp_path / "in.pt")
    checkpoints.average([tmp_path / "in.pt"], tmp_path / "out.pt")
    assert load(tmp_path / "out.pt")["_extra_state"] == {"n": 3}
    with pytest.raises(checkpoints.CheckpointError, match="beside tensors there are '_extra_state', which safetensors"):
        checkpoints.average([tmp_path / "in.pt"], tmp_path / "out.safetensors")


def test_progress_tells_the_bytes_done_up_to_all(tmp_path, suffix, capsys):
    paths, _ = three(tmp_path, suffix)
    told = []
    checkpoints.average(paths, tmp_path / f"out{suffix}", progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == 4 * (4 * (12 + 1 + 5 + 6) + 8)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    checkpoints.average(paths, tmp_path / f"out{suffix}", progress=True)
    assert capsys.readouterr().out == ""


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([torch.float32, torch.float64])), min_size=1, max_size=5),
    st.integers(1, 40),
)
def test_a_constant_is_a_fixed_point_however_tensors_are_cut(tmp_path_factory, weights, tensors, piece):
    folder = tmp_path_factory.mktemp("constant")
    values = {str(i): torch.randn(length, dtype=dtype) for i, (length, dtype) in enumerate(tensors)}
    path = save(folder / "in.safetensors", values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", max(piece, 8))
        checkpoints.average([path] * len(weights), folder / "out.safetensors", weights=weights)
    for name, value in load(folder / "out.safetensors").items():
        torch.testing.assert_close(value, values[name], rtol=0, atol=0)


def test_where_the_system_does_not_tell_what_is_mapped_tensors_are_read_through_the_map(tmp_path, monkeypatch):
    paths, values = three(tmp_path, ".pt")
    monkeypatch.setattr(mapped, "MAPS", tmp_path / "nothing")
    checkpoints.average(paths, tmp_path / "out.pt")
    expected = sum(value["layer0.w"] for value in values) / 3
    np.testing.assert_allclose(load(tmp_path / "out.pt")["layer0.w"].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_bare_file_of_shards_and_a_key_select_like_any_other(tmp_path):
    save(tmp_path / "s.safetensors", {"module.w": torch.ones(1)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"module.w": "s.safetensors"}}))
    checkpoints.average([index], tmp_path / "out.pt", key="module")
    assert load(tmp_path / "out.pt").keys() == {"w"}
