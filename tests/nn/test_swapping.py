"""swapped and copy_to: a model computes with an average, and its training weights come back."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn
from torch.optim import swa_utils as torch_swa_utils

import functavg
from functavg import EMA, SWA, AveragedModel, swapped
from functavg.combinators import Several
from tests.nn.helpers import Net, bits, contents, fill, parameters_of, randomise, tensors, unchanged

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def trained(dtype=torch.float32, **arguments):
    """Return a model, and an average that has seen it and two others."""
    model = Net().to(dtype)
    averaged = AveragedModel(model, **({"rule": EMA(0.9)} | arguments))
    for seed in range(3):
        randomise(model, seed)
        averaged.update_parameters(model)
    return model, averaged


def named(averaged):
    return dict(averaged.module.named_parameters())


def as_state(averaged):
    return averaged.state


def as_torch(averaged):
    theirs = torch_swa_utils.AveragedModel(averaged.module, use_buffers=bool(averaged.use_buffers))
    theirs.n_averaged.fill_(3)
    return theirs


def as_torch_wrapped(averaged):
    theirs = torch_swa_utils.AveragedModel(nn.DataParallel(averaged.module))
    theirs.n_averaged.fill_(3)
    return theirs


AVERAGES = {
    "AveragedModel": lambda averaged: averaged,
    "state": as_state,
    "dict": named,
    "torch's": as_torch,
    "torch's of a wrapped model": as_torch_wrapped,
    "functional state": lambda averaged: SWA().update(named(averaged), SWA().init(named(averaged))),
}


@pytest.mark.parametrize("kind", AVERAGES)
@DTYPES
def test_the_model_holds_the_average_inside_and_its_own_weights_afterwards(dtype, kind):
    model, averaged = trained(dtype)
    average = AVERAGES[kind](averaged)
    objects = {name: id(tensor) for name, tensor in tensors(model).items()}
    buffers = {name: bits(buffer) for name, buffer in model.named_buffers()}
    with unchanged(model, averaged):
        with swapped(model, average) as inside:
            assert inside is model
            for name, parameter in averaged.module.named_parameters():
                assert bits(model.get_parameter(name)) == bits(parameter)
            assert {name: bits(buffer) for name, buffer in model.named_buffers()} == buffers
        assert {name: id(tensor) for name, tensor in tensors(model).items()} == objects
    assert model.hidden[1].weight is model.inputs.weight


@pytest.mark.parametrize("kind", ["AveragedModel", "state", "torch's"])
@DTYPES
def test_averaged_buffers_go_in_too(dtype, kind):
    model, averaged = trained(dtype, use_buffers=True)
    with unchanged(model, averaged), swapped(model, AVERAGES[kind](averaged)):
        for name in ("norm.running_mean", "norm.running_var", "cache"):
            assert bits(model.get_buffer(name)) == bits(averaged.module.get_buffer(name))
        assert bits(model.inputs.bias) == bits(averaged.module.inputs.bias)


def test_a_float32_model_gets_the_average_and_not_its_rounding():
    model, averaged = trained(torch.bfloat16)
    model.float()
    with swapped(model, averaged):
        assert bits(model.scale) == bits(averaged.state.average["scale"])
        assert bits(model.scale) != bits(averaged.module.scale.float())


@DTYPES
def test_an_exception_brings_the_training_weights_back(dtype):
    model, averaged = trained(dtype)
    with unchanged(model, averaged), pytest.raises(KeyboardInterrupt), swapped(model, averaged):
        fill(model, 0.0)
        raise KeyboardInterrupt
    with unchanged(model, averaged):
        inside = swapped(model, averaged)
        inside.__enter__()
        assert inside.__exit__(ValueError, ValueError("no"), None) is False


@DTYPES
def test_blocks_nest(dtype):
    model, averaged = trained(dtype)
    _, other = trained(dtype, rule=EMA(0.1))
    with unchanged(model, averaged, other), swapped(model, averaged):
        outer = parameters_of(model)
        with swapped(model, other), swapped(model, averaged), swapped(model, {"scale": torch.tensor(3.0)}):
            assert model.scale.item() == 3.0
        assert parameters_of(model) == outer
        fill(model, 0.0)


def test_an_average_of_nothing_changes_nothing():
    model = Net()
    averaged = AveragedModel(model, rule=EMA(0.9))
    fill(model, 0.5)
    batch = torch.randn(4, 3)
    theirs = torch_swa_utils.AveragedModel(Net())
    with unchanged(model):
        for average in (averaged, averaged.state, theirs, SWA().init(dict(model.named_parameters())), {}):
            before = model.eval()(batch)
            with swapped(model, average):
                assert torch.equal(model(batch), before)
        averaged.copy_to(model)


@DTYPES
def test_a_checkpoint_written_inside_holds_the_average(dtype):
    model, averaged = trained(dtype)
    outside = contents(averaged)
    file = io.BytesIO()
    with swapped(model, averaged):
        torch.save(averaged.state_dict(), file)
        assert contents(averaged) == outside
    file.seek(0)
    loaded = AveragedModel(Net().to(dtype), rule=EMA(0.9))
    loaded.load_state_dict(torch.load(file))
    state = loaded.state
    assert state.count == 3
    assert {name: bits(value) for name, value in state.average.items()} == {
        name: bits(value) for name, value in averaged.state.average.items()
    }


@DTYPES
def test_training_goes_on_afterwards_as_if_nothing_had_been(dtype):
    """The optimizer goes on with its state and its parameters, the average with the training weights."""
    results = []
    for swaps in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        averaged = AveragedModel(model, rule=EMA(0.5), use_buffers=True)
        averaged.attach(optimizer, model)
        for _ in range(4):
            optimizer.zero_grad()
            model.train()(torch.randn(8, 3).to(dtype)).square().mean().backward()
            optimizer.step()
            if swaps:
                with swapped(model, averaged), torch.inference_mode():
                    model.eval()(torch.ones(2, 3, dtype=dtype))
        results.append((parameters_of(model), contents(averaged)))
    assert results[0] == results[1]


def test_updates_inside_are_updates_with_the_average():
    """The AveragedModel stays valid inside: an average of a model at its average does not move."""
    model, averaged = trained()
    before = averaged.state.average["scale"].clone()
    with swapped(model, averaged):
        averaged.update_parameters(model)
    torch.testing.assert_close(averaged.state.average["scale"], before)
    assert averaged.n_averaged.item() == 4


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")], ids=["DataParallel", "compile"]
)
def test_the_model_may_be_wrapped(wrap):
    model, averaged = trained()
    batch = torch.randn(2, 3)
    wanted = averaged.module.eval()(batch)
    model.eval()
    averaged.module.norm.load_state_dict(model.norm.state_dict())
    averaged.module.norm.weight.data.copy_(averaged.state.average["norm.weight"])
    with unchanged(model), swapped(wrap(model), averaged) as inside:
        assert torch.equal(model.inputs.weight, averaged.module.inputs.weight)
        assert inside(batch).shape == wanted.shape


def test_some_names_may_be_swapped_and_others_left():
    model, _ = trained()
    bias = torch.full((3,), 7.0, dtype=torch.float64)
    before = bits(model.hidden[0].weight)
    with unchanged(model), swapped(model, {"hidden.0.bias": bias, "norm.running_mean": bias}):
        assert model.hidden[0].bias.tolist() == model.norm.running_mean.tolist() == [7.0] * 3
        assert model.hidden[0].bias.dtype == torch.float32
        assert bits(model.hidden[0].weight) == before


def test_a_tied_parameter_may_be_given_by_each_of_its_names():
    model, _ = trained()
    ones = torch.ones(3, 3)
    for names in (["inputs.weight"], ["hidden.1.weight"], ["hidden.1.weight", "inputs.weight"]):
        with unchanged(model), swapped(model, dict.fromkeys(names, ones)):
            assert torch.equal(model.inputs.weight, ones)
            assert model.inputs.weight is model.hidden[1].weight


def test_the_first_of_several_averages_goes_in():
    model, averaged = trained(rule=Several({"a": EMA(0.5), "b": SWA()}))
    averages = averaged.state.average
    for average, wanted in ((averaged, averages["a"]), (averages["b"], averages["b"])):
        with unchanged(model, averaged), swapped(model, average):
            assert bits(model.scale) == bits(wanted["scale"])
    averaged.copy_to(model)
    assert bits(model.scale) == bits(averaged.module.scale)


def test_a_model_in_inference_mode_may_be_swapped():
    model, averaged = trained()
    with unchanged(model, averaged), torch.inference_mode(), swapped(model, averaged):
        assert bits(model.scale) == bits(averaged.module.scale)
    assert not model.scale.is_inference()


def test_the_training_weights_come_back_into_a_model_that_was_moved_inside():
    model, averaged = trained(use_buffers=True)
    before = {name: tensor.detach().clone() for name, tensor in tensors(model).items()}
    with swapped(model, averaged):
        model.double()
        model.scale = nn.Parameter(torch.zeros(()))
        model.hidden[0].bias.data = torch.zeros(3)
    for name, tensor in tensors(model).items():
        assert torch.equal(tensor.to(before[name].dtype), before[name]), name


def test_what_was_taken_out_of_the_model_inside_does_not_keep_the_rest_from_coming_back():
    model, averaged = trained()
    before = bits(model.inputs.weight)
    with swapped(model, averaged):
        del model.hidden[0]
        del model.scale
    assert bits(model.inputs.weight) == before


def replace_embedding(model):
    model[0].weight = nn.Parameter(torch.zeros(5, 2))


def embedding_and_linear():
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2))
    averaged = AveragedModel(model, rule=EMA(0.5))
    averaged.update_parameters(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model, averaged


def test_what_still_fits_comes_back_and_what_does_not_is_named():
    model, averaged = embedding_and_linear()
    before = bits(model[1].weight)
    with pytest.raises(ValueError, match=r"0\.weight .*all others are restored"), swapped(model, averaged):
        replace_embedding(model)
    assert bits(model[1].weight) == before


def test_a_model_moved_to_meta_inside_is_an_error():
    model, averaged = embedding_and_linear()
    with (
        pytest.raises(ValueError, match=r"1\.weight \(it is on the meta device\), 0\.weight"),
        swapped(model, averaged),
    ):
        model.to("meta")


def test_an_error_of_the_block_stays_the_error():
    model, averaged = embedding_and_linear()
    before = bits(model[1].weight)
    with pytest.raises(KeyError, match="mine") as caught, swapped(model, averaged):
        replace_embedding(model)
        raise KeyError("mine")
    if hasattr(caught.value, "add_note"):
        assert "0.weight" in caught.value.__notes__[0]
    assert bits(model[1].weight) == before


@pytest.mark.parametrize("backup_device", [None, "cpu"])
def test_the_method_swaps_as_the_function_does_and_may_keep_the_weights_elsewhere(backup_device):
    model, averaged = trained()
    with unchanged(model, averaged), averaged.swapped(model, backup_device=backup_device) as inside:
        assert inside is model
        assert bits(model.scale) == bits(averaged.module.scale)


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("meta", ValueError, "backup_device='meta' keeps no values, and the training weights would be lost"),
        ("gpu", ValueError, "device must be one that torch knows.*got 'gpu'"),
    ],
)
def test_a_backup_that_would_lose_the_training_weights_is_refused(device, error, message):
    model, averaged = trained()
    with unchanged(model, averaged), pytest.raises(error, match=message):
        averaged.swapped(model, backup_device=device).__enter__()


def test_a_compiled_average_and_names_as_a_compiled_model_spells_them_are_taken():
    model, averaged = trained()
    compiled = torch.compile(model)
    with unchanged(model, averaged), swapped(model, torch.compile(averaged)):
        assert bits(model.scale) == bits(averaged.module.scale)
    rule = EMA(0.5)
    params = dict(compiled.named_parameters())
    state = rule.update(params, rule.init(params))
    state = state._replace(average={name: value + 1 for name, value in state.average.items()})
    assert "_orig_mod.scale" in state.average
    with unchanged(model, averaged), swapped(compiled, state):
        assert model.scale.item() == state.average["_orig_mod.scale"].item()


@DTYPES
def test_averages_swapped_by_others_through_data_are_not_spoiled(dtype):
    """Lightning's callback exchanges the values of model and average by ``.data``, and back."""
    model, averaged = trained(dtype, use_buffers=True)
    _, other = trained(dtype, use_buffers=True)

    def exchange():
        for mine, theirs in zip(tensors(averaged.module).values(), tensors(model).values(), strict=True):
            if mine is not averaged.module.hidden[1].weight:  # tied to one before
                kept = mine.data.clone()
                mine.data.copy_(theirs.data)
                theirs.data.copy_(kept)

    exchange()
    assert bits(model.scale) == bits(other.module.scale)
    exchange()
    for each in (averaged, other):
        each.update_parameters(model)
    assert contents(averaged) == contents(other)


# ---- what does not fit

WRONG = {
    "an unknown name": (
        {"scale": torch.ones(()), "weight": torch.ones(1)},
        ValueError,
        r"the model has no tensors named weight; it has scale, .* and [0-9]+ more\. Names are those of named_",
    ),
    "another shape": ({"scale": torch.ones(()), "inputs.bias": torch.ones(1)}, ValueError, r"inputs\.bias.*\(3,\)"),
    "a number": ({"scale": torch.ones(()), "inputs.bias": 1.0}, TypeError, r"inputs\.bias.*expected a torch tensor"),
    "complex": (
        {"scale": torch.ones(()), "inputs.bias": torch.ones(3) + 0j},
        TypeError,
        r"inputs\.bias.*expected torch.float32",
    ),
    "a list": ([torch.ones(())], TypeError, "average must be an AveragedModel, an AverageState or a mapping.*got list"),
    "None": (None, TypeError, "average must be an AveragedModel.*got NoneType"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_before_anything_is_written(wrong):
    model, _ = trained()
    average, error, message = WRONG[wrong]
    versions = {name: tensor._version for name, tensor in tensors(model).items()}
    with unchanged(model), pytest.raises(error, match=message), swapped(model, average):
        raise AssertionError("must not get here")
    assert {name: tensor._version for name, tensor in tensors(model).items()} == versions


def test_an_average_of_another_model_is_refused():
    _, averaged = trained()
    other = nn.Linear(3, 3)
    for use in (lambda: swapped(other, averaged).__enter__(), lambda: averaged.copy_to(other)):
        with unchanged(other, averaged), pytest.raises(ValueError, match="the model has no tensors named"):
            use()


# ---- copy_to


@DTYPES
def test_copy_to_gives_the_average_for_good(dtype):
    model, averaged = trained(dtype)
    target = Net().to(torch.float64)
    averaged.copy_to(target)
    for name, value in averaged.state.average.items():
        assert bits(target.get_parameter(name)) == bits(value.double())
    for name, buffer in averaged.module.named_buffers():
        assert torch.equal(target.get_buffer(name), buffer.to(target.get_buffer(name).dtype))
    averaged.copy_to(nn.DataParallel(model))
    assert parameters_of(model) == parameters_of(averaged.module)
    assert averaged.n_averaged.item() == 3
    assert model.hidden[1].weight is model.inputs.weight


def test_copy_to_a_model_that_lacks_tensors_writes_nothing():
    _, averaged = trained()
    target = Net()
    target.norm.register_buffer("running_mean", torch.zeros(4))
    with unchanged(target, averaged), pytest.raises(ValueError, match=r"norm\.running_mean.*expected shape \(4,\)"):
        averaged.copy_to(target)


def test_the_names_of_the_library_are_those_of_the_package():
    assert functavg.swapped is swapped
