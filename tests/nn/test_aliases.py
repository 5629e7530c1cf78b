"""Memory that two names of a module share is averaged once, and nothing is written before all is known to fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from functavg import EMA, AveragedModel, Every, WeightFn
from tests.nn.helpers import fill, scalar, unchanged


def aliased(dtype=torch.float32):
    model = scalar(dtype=dtype)
    model.register_buffer("alias", model.weight)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("use_buffers", [False, True])
def test_a_parameter_that_is_a_buffer_too_is_averaged(dtype, use_buffers):
    model = aliased(dtype)
    averaged = AveragedModel(model, rule=EMA(0.5), use_buffers=use_buffers)
    for value in (0.0, 1.0):
        fill(model, value)
        averaged.update_parameters(model)
    assert averaged.module.weight.item() == averaged.module.alias.item() == 0.5
    model.alias = torch.full((1, 1), 7.0, dtype=dtype)
    averaged = AveragedModel(aliased(dtype), rule=EMA(0.5))
    averaged.update_parameters(model)
    assert (averaged.module.weight.item(), averaged.module.alias.item()) == (1.0, 7.0)


def test_a_parameter_and_a_buffer_that_are_assigned_one_memory_part():
    model = scalar()
    model.register_buffer("copy", torch.zeros(1, 1))
    averaged = AveragedModel(model, rule=EMA(0.5))
    state = averaged.state_dict()
    state["module.copy"] = state["module.weight"].detach()
    averaged.load_state_dict(state, assign=True)
    fill(model, 3.0)
    model.copy.fill_(9.0)
    averaged.update_parameters(model)
    assert (averaged.module.weight.item(), averaged.module.copy.item()) == (3.0, 9.0)


def test_a_wide_value_is_not_trusted_where_data_became_another_part_of_its_memory():
    model = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    fill(model, 0.0)
    averaged = AveragedModel(model, rule=EMA(0.5))
    for row, wanted in zip(torch.tensor([[1.0, 1.0], [8.0, 8.0]], dtype=torch.bfloat16), (0.5, 4.0), strict=True):
        nn.utils.vector_to_parameters(row, averaged.module.parameters())
        averaged.n_averaged.fill_(1)
        averaged.update_parameters(model)
        assert averaged.module.weight.tolist() == [[wanted, wanted]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_over_one_memory_in_the_average_alone_are_refused(dtype):
    model = nn.ParameterList([torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype)])
    averaged = AveragedModel(model, rule=EMA(0.5))
    averaged.module[1].data = averaged.module[0].data
    with unchanged(averaged), pytest.raises(ValueError, match=r"'0'.*and.*'1'.*share one array in the average"):
        averaged.update_parameters(model)


# ---- nothing is written before all is known to fit


class Cached(nn.Linear):
    def __init__(self):
        super().__init__(1, 1, bias=False)
        self.cache = None


def test_an_attribute_of_the_average_gives_way_to_a_buffer_of_its_name():
    model = Cached()
    averaged = AveragedModel(model, rule=EMA(0.5))
    del model.cache
    model.register_buffer("cache", torch.ones(2))
    averaged.update_parameters(model)
    assert averaged.module.cache.tolist() == [1.0, 1.0]
    assert "module.cache" in averaged.state_dict()


def test_an_update_from_a_model_whose_buffer_is_lazy_or_on_meta_changes_nothing():
    model = nn.Sequential(scalar(), nn.LazyBatchNorm1d(affine=False))
    model(torch.zeros(2, 1))
    averaged = AveragedModel(model, rule=WeightFn(lambda count, steps: 0.5))
    fill(model[0], 1.0)
    lazy = nn.Sequential(scalar(1.0), nn.LazyBatchNorm1d(affine=False))
    with (
        unchanged(averaged),
        pytest.raises(TypeError, match=r"buffer running_mean is uninitialised.*forward pass"),
    ):
        averaged.update_parameters(lazy)
    model[1].running_mean = torch.zeros(1, device="meta")
    with unchanged(averaged), pytest.raises(TypeError, match="buffer running_mean is on the meta device"):
        averaged.update_parameters(model)


# ---- modules that are shared, gates that are closed, inference mode


def test_shared_modules_are_walked_once():
    layer = scalar()
    model = nn.Sequential(layer, layer)
    for _ in range(10):
        model = nn.Sequential(model, model)
    averaged = AveragedModel(model, rule=EMA(0.5))
    for value in (0.0, 1.0):
        fill(model, value)
        averaged.update_parameters(model)
    assert {parameter.item() for parameter in averaged.module.parameters()} == {0.5}


def test_a_closed_gate_converts_a_low_precision_model_once():
    model = scalar(1.0, torch.bfloat16)
    averaged = AveragedModel(model, rule=Every(EMA(0.5), 3))
    averaged.update_parameters(model)
    before = averaged.state.average["weight"]
    averaged.update_parameters(model)
    assert averaged.state.average["weight"].data_ptr() == before.data_ptr()
    fill(averaged.module, 3.0)
    assert averaged.state.average["weight"].item() == 3.0


def test_an_update_in_inference_mode_makes_no_inference_tensors():
    model = scalar(1.0, torch.bfloat16)
    averaged = AveragedModel(model, rule=EMA(0.5))
    model.register_buffer("late", torch.ones(1))
    with torch.inference_mode():
        averaged.update_parameters(model)
    assert not averaged.state.average["weight"].is_inference()
    assert not averaged.module.late.is_inference()


def test_a_wide_parameter_beside_narrow_ones_is_written_once():
    model = nn.Sequential(scalar(), scalar(dtype=torch.bfloat16))
    averaged = AveragedModel(model, rule=EMA(0.5))
    averaged.update_parameters(model)
    versions = [parameter._version for parameter in averaged.module.parameters()]
    averaged.update_parameters(model)
    assert [
        parameter._version - old for parameter, old in zip(averaged.module.parameters(), versions, strict=True)
    ] == [1, 1]


def test_a_tied_low_precision_weight_has_one_master_copy_after_a_move():
    model = nn.Sequential(nn.Conv2d(2, 2, 3, bias=False), nn.Conv2d(2, 2, 3, bias=False)).bfloat16()
    model[1].weight = model[0].weight
    averaged = AveragedModel(model, rule=EMA(0.5))
    averaged.update_parameters(model)
    averaged.to(memory_format=torch.channels_last)
    average = averaged.state.average
    assert average["0.weight"] is average["1.weight"]


def test_a_master_copy_is_not_trusted_where_data_became_another_shape_or_dtype():
    model = nn.Linear(4, 4).bfloat16()
    averaged = AveragedModel(model, rule=EMA(0.5))
    averaged.update_parameters(model)
    for net in (model, averaged.module):
        net.bias.data = net.bias.data[:2]
    averaged.update_parameters(model)
    assert averaged.state.average["bias"].shape == (2,)
    averaged.module.bias.data = averaged.module.bias.data.view(torch.float16)
    assert torch.equal(averaged.state.average["bias"], averaged.module.bias.detach().float())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_quantised_buffer_is_copied():
    model = scalar()
    model.register_buffer("codes", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8))
    averaged = AveragedModel(model, rule=EMA(0.5))
    averaged.update_parameters(model)
    assert torch.equal(averaged.module.codes.int_repr(), model.codes.int_repr())
