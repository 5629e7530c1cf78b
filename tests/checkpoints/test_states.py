"""States in files: what is loaded goes on exactly as what was saved."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import functavg
from functavg import EMA, LAWA, SWA, AvgFn, Every, Several, SkipNonFinite, checkpoints, schedules
from functavg.checkpoints import CheckpointError, records
from functavg.saving import to_state_dict
from tests.checkpoints.files import load, metadata_of, names_in, save

RULES = [
    EMA(0.9),
    EMA(schedules.TFWarmup(0.99)),
    functavg.PowerEMA(2.5),
    LAWA(2),
    Every(SkipNonFinite(LAWA(3)), 2, start=1),
    Several({"slow": EMA(0.99), "fast": SWA()}),
    functavg.Partition({"w": SWA(), "rest": functavg.Freeze()}, {"w": "w", "deep": {"b": "rest"}}),
]


def torch_params(step):
    return {"w": torch.full((2, 3), float(step)), "deep": {"b": torch.tensor(step, dtype=torch.bfloat16)}}


def numpy_params(step):
    return {"w": np.full((2, 3), float(step)), "deep": {"b": np.array(step, np.float16)}}


def jax_params(step):
    jnp = pytest.importorskip("jax.numpy")
    return {"w": jnp.full((2, 3), float(step)), "deep": {"b": jnp.asarray(step, jnp.bfloat16)}}


def trained(rule, params, steps=range(1, 6), state=None):
    state = rule.init(params(0)) if state is None else state
    for step in steps:
        state = rule.update(params(step), state)
    return state


def float64(value):
    return value.double().numpy() if isinstance(value, torch.Tensor) else np.asarray(value).astype(np.float64)


def assert_equal(one, two):
    one, two = to_state_dict(one), to_state_dict(two)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert type(value) is type(two[name])
        assert getattr(value, "dtype", None) == getattr(two[name], "dtype", None)
        np.testing.assert_array_equal(float64(value), float64(two[name]))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("params", [torch_params, numpy_params, jax_params])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_loaded_state_is_the_saved_one_and_goes_on_as_it_does(tmp_path, rule, params, suffix):
    state = trained(rule, params)
    path = tmp_path / f"state{suffix}"
    checkpoints.save_state(path, state, rule)
    for like in (rule.init(params(0)), params(0)):
        loaded = checkpoints.load_state(path, like)
        assert_equal(loaded, state)
        assert_equal(trained(rule, params, range(6, 9), loaded), trained(rule, params, range(6, 9), state))
    assert checkpoints.load_rule(path) == rule
    assert names_in(tmp_path) == {path.name}


def test_a_file_describes_itself(tmp_path):
    path = tmp_path / "state.safetensors"
    checkpoints.save_state(path, trained(EMA(0.9), torch_params), EMA(0.9))
    record = json.loads(metadata_of(path)["functavg"])
    assert record == {"kind": "state", "version": 1, "rule": repr(EMA(0.9)), "numbers": {"count": 5}}
    assert load(path).keys() == {"average.w", "average.deep.b"}


def test_tied_arrays_are_stored_once_and_stay_tied(tmp_path):
    shared = torch.ones(3)
    rule = SWA()
    state = rule.init({"emb": shared, "head": shared})
    path = tmp_path / "state.safetensors"
    checkpoints.save_state(path, state, rule)
    assert load(path).keys() == {"average.emb"}
    loaded = checkpoints.load_state(path, {"emb": shared, "head": shared})
    assert loaded.average["emb"] is loaded.average["head"]
    array = np.ones(3)
    checkpoints.save_state(path, rule.init({"emb": array, "head": array}), rule)
    assert load(path).keys() == {"average.emb"}


def test_a_count_on_a_device_is_stored_as_a_tensor(tmp_path):
    rule = SWA()
    state = rule.init({"w": torch.ones(2)})._replace(count=torch.tensor(3))
    path = tmp_path / "state.safetensors"
    checkpoints.save_state(path, state, rule)
    assert checkpoints.load_state(path, state).count == torch.tensor(3)
    assert checkpoints.load_state(path, {"w": torch.ones(2)}).count == 3


def test_files_of_states_are_averaged_and_give_plain_weights(tmp_path):
    rule = LAWA(2)
    for index, steps in enumerate((range(1, 2), range(1, 4))):
        checkpoints.save_state(tmp_path / f"{index}.safetensors", trained(rule, torch_params, steps), rule)
    paths = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    checkpoints.average(paths, tmp_path / "out.safetensors")
    result = load(tmp_path / "out.safetensors")
    assert result.keys() == {"w", "deep.b"}
    assert result["w"].tolist() == [[1.75] * 3] * 2  # of 1 and of the mean of 2 and 3
    rule = Several({"a": SWA(), "b": EMA(0.5)})
    checkpoints.save_state(tmp_path / "two.pt", trained(rule, torch_params), rule)
    checkpoints.average([tmp_path / "two.pt"], tmp_path / "out.pt")
    assert load(tmp_path / "out.pt").keys() == {"a.w", "a.deep.b", "b.w", "b.deep.b"}
    checkpoints.save_state(tmp_path / "bare.safetensors", SWA().init(torch.ones(2)), SWA())
    checkpoints.average([tmp_path / "bare.safetensors"], tmp_path / "out.pt")
    assert load(tmp_path / "out.pt").keys() == {"average"}


def test_what_does_not_fit_is_named_with_its_file(tmp_path):
    path = tmp_path / "state.safetensors"
    checkpoints.save_state(path, trained(SWA(), torch_params), SWA())
    with pytest.raises(CheckpointError, match=r"state\.safetensors: .*missing average\.v; unexpected average\.deep\.b"):
        checkpoints.load_state(path, {"w": torch.ones(2, 3), "v": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"state\.safetensors: .*average\.w"):
        checkpoints.load_state(path, torch_params(0) | {"w": torch.ones(3)})
    other = save(tmp_path / "other.safetensors", {"w": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"other\.safetensors: expected a file of save_state, got one of 'ano"):
        checkpoints.load_state(other, {"w": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"missing\.safetensors: cannot be read"):
        checkpoints.load_rule(tmp_path / "missing.safetensors")


def test_a_file_of_a_later_version_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    monkeypatch.setattr(records, "VERSION", 2)
    checkpoints.save_state(path, SWA().init(torch_params(0)), SWA())
    with pytest.raises(CheckpointError, match="has version 2 of the format, this functavg knows up to 1; upgrade it"):
        checkpoints.load_state(path, torch_params(0))


def test_a_rule_with_a_function_is_noted_but_not_made_again(tmp_path):
    rule = AvgFn(lambda average, params, count: params)
    path = tmp_path / "state.safetensors"
    state = trained(rule, torch_params)
    checkpoints.save_state(path, state, rule)
    with pytest.raises(CheckpointError, match=r"its rule cannot be made again, make it yourself: 'AvgFn.*lambda"):
        checkpoints.load_rule(path)
    assert_equal(checkpoints.load_state(path, rule.init(torch_params(0))), state)


def test_what_cannot_be_stored_is_refused_and_the_old_file_stays(tmp_path):
    path = tmp_path / "state.safetensors"
    checkpoints.save_state(path, SWA().init(torch_params(0)), SWA())
    before = path.read_bytes()
    with pytest.raises(TypeError, match=r"rule must be an AveragingRule .*, got the class"):
        checkpoints.save_state(path, SWA().init(torch_params(0)), SWA)
    with pytest.raises(TypeError, match="state must be an AverageState, got dict"):
        checkpoints.save_state(path, {}, SWA())
    with pytest.raises(CheckpointError, match=r"'average\.z' is complex128, which safetensors cannot hold"):
        checkpoints.save_state(path, SWA().init({"z": np.ones(1, complex)}), SWA())
    if hasattr(np, "longdouble") and np.dtype(np.longdouble).itemsize > 8:
        with pytest.raises(TypeError, match=r"'average\.x' cannot be stored: its dtype float128 is none of torch's"):
            checkpoints.save_state(path, SWA().init({"x": np.ones(1, np.longdouble)}), SWA())
    assert path.read_bytes() == before
