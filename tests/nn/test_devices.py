"""Averages on another device than the model; they need an accelerator."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from functavg import EMA, AveragedModel, swapped
from tests.nn.helpers import Net, randomise, tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_average_on_the_host_has_the_values_of_one_on_the_host_throughout(dtype):
    model = Net().to(dtype)
    there = copy.deepcopy(model).cuda()
    averaged, offloaded = AveragedModel(model, rule=EMA(0.9)), AveragedModel(there, device="cpu", rule=EMA(0.9))
    for seed in range(4):
        randomise(model, seed)
        there.load_state_dict(model.state_dict())
        averaged.update_parameters(model)
        offloaded.update_parameters(there)
    assert offloaded.n_averaged.device.type == "cpu"
    for name, value in averaged.state.average.items():
        assert torch.equal(offloaded.state.average[name], value), name
    with swapped(there, offloaded):
        for name, value in tensors(offloaded.module).items():
            assert torch.equal(tensors(there)[name].cpu(), value), name


def test_the_accelerator_never_holds_a_second_model():
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)]).to("cuda", torch.bfloat16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    offloaded = AveragedModel(model, device="cpu", rule=EMA(0.9))
    for _ in range(2):
        offloaded.update_parameters(model)
    assert torch.cuda.max_memory_allocated() - before <= 2 * 2048 * 2048 * 4  # a layer on its way, in float32
