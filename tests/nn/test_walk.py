"""The walk over a model and its average: what it pairs, what it calls it, and what an update makes of a change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import functavg
from functavg import EMA, AveragedModel
from functavg.nn import pairing
from functavg.nn.buffers import split_buffers
from tests.nn.helpers import Net, all_values, bits, quarter, scalar, tensors

# ---- what is paired


def with_gaps(*gaps):
    """Return a model in which some parameters, buffers or modules are registered as None."""
    model = nn.Sequential(Net(), nn.Linear(2, 2), nn.BatchNorm1d(2))
    for name in gaps:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, None)
    return model


@pytest.mark.parametrize("gaps", [(), ("1.bias",), ("2.running_mean", "1.weight"), ("2.weight", "2.running_var")])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_tensors_are_paired_under_their_names_in_the_order_of_the_model(gaps, use_buffers):
    average, model = with_gaps(*gaps), with_gaps(*gaps)
    pairs = pairing.pair(average, model)
    split_buffers(pairs, use_buffers)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    saved = model.state_dict() if use_buffers else {}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()}
    assert pairs.names() == [*parameters, *buffers]
    assert list(map(id, pairs.news)) == list(map(id, (parameters | buffers).values()))
    assert list(map(id, pairs.averages)) == [id(tensors(average)[name]) for name in pairs.names()]


@pytest.mark.parametrize("gap", ["1.weight", "1.bias", "2.weight", "1"])
def test_a_parameter_that_only_one_has_is_named(gap):
    with pytest.raises(ValueError, match=rf"missing {gap}.*unexpected nothing"):
        pairing.pair(with_gaps(), with_gaps(gap))
    with pytest.raises(ValueError, match=rf"missing nothing; unexpected {gap}"):
        pairing.pair(with_gaps(gap), with_gaps())


def test_a_module_within_itself_is_walked_once():
    model = scalar()
    model.itself = model
    assert pairing.pair(model, model).names() == ["weight"]


def test_an_update_is_planned_once_whatever_fails():
    calls = []

    def decay(u):
        calls.append(u)
        raise ValueError("no decay")

    model = scalar()
    averaged = AveragedModel(model, rule=EMA(decay))
    with pytest.raises(ValueError, match="no decay"):
        averaged.update_parameters(model)
    assert calls == [1]


def test_an_error_names_its_tensor_without_another_plan():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    averaged = AveragedModel(model, rule=EMA(0.5))
    model[1].weight.data = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"^tree\['1.weight'\]: expected shape \(2, 2\), got \(3, 2\)"):
        averaged.update_parameters(model)


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
    averaged.update_parameters(model)
    assert all_values(averaged) == {0.25}


def test_buffers_that_only_the_average_has_stay_as_they_are():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    averaged = quarter(model)
    averaged.module[0].register_buffer("note", torch.tensor(7.0))
    averaged.update_parameters(model)
    assert all_values(averaged) == {0.25}
    assert averaged.module[0].note.item() == 7.0


# ---- what an update makes of a change


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


def by_names(model, averaged, weight):
    """Return what a float64 step by names makes of the average, None where the parameters do not correspond."""
    olds = {name: value.detach().double().clone() for name, value in averaged.state.average.items()}
    news = dict(model.named_parameters(remove_duplicate=False))
    if olds.keys() != news.keys() or any(olds[name].shape != news[name].shape for name in olds):
        return None
    return {name: old + weight * (news[name].detach().double() - old) for name, old in olds.items()}


@pytest.mark.parametrize("changed", ["model", "average"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rule", [EMA(0.5), functavg.SkipNonFinite(EMA(0.5))], ids=["EMA", "SkipNonFinite"])
def test_an_update_after_a_change_is_the_step_by_names_or_changes_nothing(rule, change, dtype, changed):
    if changed == "average" and change is buffer_that_sees_a_parameter:
        pytest.skip("in one memory, what the buffer is given the parameter shows")
    model = Net().to(dtype)
    averaged = AveragedModel(model, rule=rule)
    averaged.update_parameters(model)
    change(model if changed == "model" else averaged.module)
    with torch.no_grad():
        for value, parameter in enumerate(model.parameters()):
            if 0 not in parameter.stride():
                parameter.fill_(value + 2)
    before = {name: bits(tensor) for name, tensor in tensors(averaged.module).items()}
    try:
        wanted = by_names(model, averaged, 0.5)
        averaged.update_parameters(model)
    except (TypeError, ValueError):
        assert {name: bits(tensor) for name, tensor in tensors(averaged.module).items()} == before
        assert averaged.n_averaged.item() == 1
        return
    assert averaged.n_averaged.item() == 2
    assert wanted is not None
    for name, value in averaged.state.average.items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=1e-6, atol=1e-6)
    model_buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in averaged.module.named_buffers(remove_duplicate=False):
        if name in model_buffers and not isinstance(buffer, nn.Parameter):
            assert bits(buffer) == bits(model_buffers[name].to(buffer.dtype)), name
