"""The walk in step and the walk by name find the same, whatever becomes of a model or of its average."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import functavg
from functavg import EMA, AveragedModel
from functavg.nn import pairing
from tests.nn.helpers import Net, all_values, bits, quarter, scalar, tensors

# ---- what they find


def with_gaps(*gaps):
    """Return a model in which some parameters, buffers or modules are registered as None."""
    model = nn.Sequential(Net(), nn.Linear(2, 2), nn.BatchNorm1d(2))
    for name in gaps:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, None)
    return model


@pytest.mark.parametrize("gaps", [(), ("1.bias",), ("2.running_mean", "1.weight"), ("2.weight", "2.running_var")])
def test_the_walk_in_step_finds_what_the_walk_by_name_finds(gaps):
    average, model = with_gaps(*gaps), with_gaps(*gaps)
    found = pairing.pairs(average, model)
    expected = [
        (average.get_parameter(name), model.get_parameter(name))
        if name in found.news
        else (average.get_buffer(name), model.get_buffer(name))
        for name in [*found.news, *(name for name, _, _ in found.buffers if not name.endswith(gaps or "?"))]
    ]
    mine, theirs = pairing.in_step(average, model)
    pairs = zip(mine.parameters + mine.buffers, theirs.parameters + theirs.buffers, strict=True)
    assert {(id(old), id(new)) for old, new in pairs} == {(id(old), id(new)) for old, new in expected}


@pytest.mark.parametrize("gap", ["1.weight", "1.bias", "2.weight", "2.running_mean", "0.norm", "1"])
def test_models_with_gaps_in_other_places_are_not_walked_in_step(gap):
    assert pairing.in_step(with_gaps(), with_gaps(gap)) is None
    assert pairing.in_step(with_gaps(gap), with_gaps()) is None


def test_a_module_within_itself_is_not_walked_in_step():
    model = scalar()
    model.itself = model
    assert pairing.in_step(model, model) is None


class Forwarding(nn.Module):
    """A module that holds another's parameters as its own, by properties."""

    def __init__(self, inner):
        self.__dict__["inner"] = inner

    _parameters = property(lambda self: self.inner._parameters)
    _buffers = property(lambda self: self.inner._buffers)
    _modules = property(lambda self: self.inner._modules)


def test_modules_that_hold_their_parameters_in_their_own_way_are_averaged():
    averaged = quarter(scalar())
    model = Forwarding(scalar(1.0))
    assert pairing.in_step(averaged.module, model) is None
    averaged.update_parameters(model)
    assert all_values(averaged) == {0.25}


def test_buffers_that_only_the_average_has_stay_as_they_are():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    averaged = quarter(model)
    averaged.module[0].register_buffer("note", torch.tensor(7.0))
    assert pairing.in_step(averaged.module, model) is not None
    averaged.update_parameters(model)
    assert all_values(averaged) == {0.25}
    assert averaged.module[0].note.item() == 7.0


# ---- what they make of a change


def reordered(model):
    model.norm._parameters["weight"] = model.norm._parameters.pop("weight")


def assigned(model):
    model.scale = nn.Parameter(torch.full((), 7.0))


def frozen(model):
    model.inputs.weight.requires_grad_(False)


def halved(model):
    model.half()


def widened(model):
    model.double()


def in_columns(model):
    model.hidden[0].weight.data = model.hidden[0].weight.data.t()


def expanded(model):
    model.norm.weight.data = torch.ones(1).expand(3)


def reshaped(model):
    model.norm.weight.data = torch.ones(5)


def extended(model):
    model.hidden.append(scalar(1.0))


def buffer_of_another_shape(model):
    model.ids = torch.arange(7)


def buffer_of_another_kind(model):
    model.ids = torch.arange(4).float()


def buffer_that_is_sparse(model):
    model.cache = torch.eye(2).to_sparse()


def buffer_gone(model):
    del model.cache


def buffer_of_none(model):
    model.cache = None


def buffer_anew(model):
    model.register_buffer("extra", torch.ones(2))


def buffer_that_is_a_parameter(model):
    model.norm._buffers["running_mean"] = model.norm.weight


def buffer_that_sees_a_parameter(model):
    model.norm.running_mean = model.norm.weight.data


def buffers_that_are_one(model):
    model.norm.running_mean = model.norm.running_var


def module_in_two_places(model):
    model.hidden[0] = model.inputs


CHANGES = [
    *(reordered, assigned, frozen, halved, widened, in_columns, expanded, reshaped, extended, buffer_of_another_shape),
    *(buffer_of_another_kind, buffer_that_is_sparse, buffer_gone, buffer_of_none, buffer_anew),
    *(buffer_that_is_a_parameter, buffer_that_sees_a_parameter, buffers_that_are_one, module_in_two_places),
]


def after(change, model, averaged, changed):
    """Return what a run is like in which a model or its average changes before the third update."""
    model, averaged = copy.deepcopy((model, averaged))
    course = []
    for step in range(4):
        if step == 2:
            change(model if changed == "model" else averaged.module)
        for value, parameter in enumerate(model.parameters()):
            if 0 not in parameter.stride():
                parameter.data.fill_(value + step**2)
        for value, buffer in enumerate(model.buffers()):
            if buffer.layout == torch.strided:
                buffer.data.fill_(value + 3 * step)
        try:
            averaged.update_parameters(model)
        except (TypeError, ValueError) as error:
            course.append((type(error), str(error)))
        course.append({name: bits(tensor) for name, tensor in tensors(averaged.module).items()})
        course.append({name: bits(value) for name, value in averaged.state.average.items()})
    return course


@pytest.mark.parametrize("changed", ["model", "average"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rule", [EMA(0.5), functavg.SkipNonFinite(functavg.SWA())], ids=["EMA", "SkipNonFinite"])
def test_an_update_in_step_does_what_one_by_name_does(monkeypatch, rule, change, dtype, changed):
    model = Net().to(dtype)
    averaged = AveragedModel(model, rule=rule)
    in_step = after(change, model, averaged, changed)
    monkeypatch.setattr(pairing, "in_step", lambda average, model: None)
    assert in_step == after(change, model, averaged, changed)
