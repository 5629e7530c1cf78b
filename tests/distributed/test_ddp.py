"""Averages of a model that DistributedDataParallel trains: each rank has its own, and all are equal."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import functavg
from functavg import AveragedModel
from tests.distributed.processes import Net, assert_same, spawn
from tests.nn.helpers import alone


def train_and_average() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rule in (functavg.EMA(0.9), functavg.SkipNonFinite(functavg.Several({"fast": functavg.EMA(0.5)}))):
            _train_and_average(dtype, rule)


def _train_and_average(dtype: torch.dtype, rule: functavg.AveragingRule) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Net(), nn.BatchNorm1d(3)).to(dtype)
    expected = AveragedModel(copy.deepcopy(net), rule=rule, use_buffers=True)
    model = DistributedDataParallel(net)
    of_bare, of_wrapped = (AveragedModel(it, rule=rule, use_buffers=True) for it in (net, model))
    params = dict(net.named_parameters())
    functional = rule.init(params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())  # each rank has other data
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator).to(dtype)).square().mean().backward()
        optimizer.step()
        for buffer in net.buffers():  # of each rank, until the next forward
            dist.broadcast(buffer, 0)
        with CommDebugMode() as counted:
            of_bare.update_parameters(model)
            of_wrapped.update_parameters(model)
            functional = rule.update(params, functional, inplace=True)
        assert counted.get_total_counts() == 0
        expected.update_parameters(net)
    for averaged in (of_bare, of_wrapped):
        assert "module.0.first.weight" in averaged.state_dict()
        assert_same(functavg.to_state_dict(averaged.state), functavg.to_state_dict(expected.state))
        assert_equal_on_all_ranks(averaged.state_dict())
        assert_equal_on_all_ranks(functavg.to_state_dict(averaged.state))
    assert_equal_on_all_ranks(functavg.to_state_dict(functional))
    training = copy.deepcopy(net.state_dict())
    with CommDebugMode() as counted, functavg.swapped(model, of_wrapped):
        pass
    assert counted.get_total_counts() == 0
    assert_same(net.state_dict(), training)
    of_wrapped.copy_to(model)
    assert_equal_on_all_ranks(model.state_dict())


def assert_equal_on_all_ranks(saved: dict[str, Any]) -> None:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, saved)
    for other in every:
        assert_same(saved, other)


def test_each_rank_averages_to_the_same_bits_without_talking(tmp_path: Path) -> None:
    spawn(train_and_average, 2, tmp_path)


def test_what_counts_collectives_does_count_them() -> None:
    """Else the assertions of this file would hold of anything."""
    with alone(), CommDebugMode() as counted:
        dist.broadcast(torch.zeros(1), 0)
        dist.all_reduce(torch.zeros(1))
    assert counted.get_total_counts() == 2
