"""What two gloo processes do: train a sharded model and average it beside an unsharded one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import functavg
from functavg import AveragedModel
from functavg.nn import pairing
from tests.distributed.processes import Net, everywhere, sharded


def compare() -> None:
    """Compare the sharded average with the unsharded one, bit for bit."""
    for dtype in (torch.float32, torch.bfloat16):
        for rule in (functavg.EMA(0.9), functavg.SkipNonFinite(functavg.SWA())):
            _compare(everywhere(), dtype, rule)


def _compare(mesh: dist.DeviceMesh, dtype: torch.dtype, rule: functavg.AveragingRule) -> None:
    torch.manual_seed(0)
    plain = Net().to(dtype)
    model = sharded(plain, mesh)
    averaged = AveragedModel(model, module=sharded(plain, mesh), rule=rule)
    expected = AveragedModel(plain, rule=rule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randn(8, 4, dtype=dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(x)  # leaves the root group unsharded
        with CommDebugMode() as counted:
            averaged.update_parameters(model)
        asked = isinstance(rule, functavg.SkipNonFinite)  # whether any shard holds a NaN
        assert counted.get_total_counts() == int(asked)
        with torch.no_grad():
            for parameter, shard in zip(plain.parameters(), model.parameters(), strict=True):
                parameter.copy_(shard.full_tensor())
        expected.update_parameters(plain)
    for name, value in expected.state.average.items():
        assert torch.equal(averaged.state.average[name].full_tensor(), value), name
    training = [parameter.full_tensor() for parameter in model.parameters()]
    outputs = model(x)
    with functavg.swapped(model, averaged), torch.no_grad():
        assert torch.equal(model(x), expected(x))
    assert torch.equal(model(x), outputs)
    pairing.reshard(model)
    assert all(torch.equal(a, b.full_tensor()) for a, b in zip(training, model.parameters(), strict=True))
    _refuses_alike(averaged, plain)


def _refuses_alike(averaged: AveragedModel, plain: nn.Module) -> None:
    """Every rank must come to the same verdict, so that none waits for another."""
    before = [value.to_local().clone() for value in averaged.state.average.values()]
    with pytest.raises(TypeError, match="DTensor"):
        averaged.update_parameters(plain)
    after = [value.to_local() for value in averaged.state.average.values()]
    assert all(map(torch.equal, before, after))
