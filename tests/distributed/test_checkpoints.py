"""Averages through torch.distributed.checkpoint, from any number of processes to any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import functavg
from functavg import AveragedModel, AverageState
from tests.distributed.processes import Net, assert_same, everywhere, randomise, sharded, spawn
from tests.nn.helpers import alone

DTYPES = (torch.float32, torch.bfloat16)
PARTS = {"weights": functavg.SkipNonFinite(functavg.SWA()), "rest": functavg.LAWA(2)}
NEST = {
    "fast": functavg.Partition(PARTS, lambda name, leaf: "weights" if name.endswith("weight") else "rest"),
    "slow": functavg.Every(functavg.LAWA(2), 2),
}
RULES = {"EMA": functavg.EMA(0.9), "nest": functavg.Several(NEST)}
UPDATES = 3


def pair(dtype: torch.dtype, rule: functavg.AveragingRule) -> tuple[nn.Module, AveragedModel]:
    """Return a sharded model and its average, which is sharded alike."""
    torch.manual_seed(0)
    plain = Net().to(dtype)
    mesh = everywhere()
    model = sharded(plain, mesh)
    return model, AveragedModel(model, module=sharded(plain, mesh), rule=rule)


def go(model: nn.Module, averaged: AveragedModel, start: int, updates: int = UPDATES) -> None:
    for seed in range(start, start + updates):
        randomise(model, seed)
        averaged.update_parameters(model)


def went(dtype: torch.dtype, rule: functavg.AveragingRule) -> tuple[nn.Module, AveragedModel]:
    model, averaged = pair(dtype, rule)
    go(model, averaged, 0)
    return model, averaged


def went_functional(dtype: torch.dtype, rule: functavg.AveragingRule) -> tuple[dict[str, Any], AverageState[Any]]:
    """Return sharded params and the state of a rule after some updates."""
    model, _ = pair(dtype, functavg.SWA())
    params = dict(model.named_parameters())
    state = rule.init(params)
    for seed in range(UPDATES):
        randomise(model, seed)
        state = rule.update(params, state, inplace=True)
    return params, state


def everything(averaged: AveragedModel) -> dict[str, Any]:
    """Return all that a resumed run must have."""
    module = {f"module.{name}": parameter.detach() for name, parameter in averaged.module.named_parameters()}
    return functavg.to_state_dict(averaged.state) | module | {"n_averaged": averaged.n_averaged.clone()}


# ---- what the processes do


def save(folder: Path) -> None:
    for dtype in DTYPES:
        for name, rule in RULES.items():
            model, averaged = went(dtype, rule)
            _, state = went_functional(dtype, rule)
            objects = {
                "model": model.state_dict(),
                "averaged": averaged.state_dict(),
                "stateful": averaged,
                "got": get_model_state_dict(averaged),
                "functional": functavg.to_state_dict(state),
            }
            dcp.save(objects, checkpoint_id=folder / f"{dtype}-{name}")


def load(folder: Path) -> None:
    """Resume in each way, compare with the run that was never interrupted, and go on with both."""
    for dtype in DTYPES:
        for name, rule in RULES.items():
            checkpoint = folder / f"{dtype}-{name}"
            expected_model, expected = went(dtype, rule)
            at_once = everything(expected)
            resumed = [by_state_dict(checkpoint, dtype, rule), by_object(checkpoint, dtype, rule)]
            resumed.append(by_functions(checkpoint, dtype, rule))
            for _, averaged in resumed:
                assert_same(everything(averaged), at_once)
            for model, averaged in [(expected_model, expected), *resumed]:
                go(model, averaged, UPDATES)
            for _, averaged in resumed:
                assert_same(everything(averaged), everything(expected))
            functionally(checkpoint, dtype, rule)


def by_state_dict(checkpoint: Path, dtype: torch.dtype, rule: functavg.AveragingRule) -> Any:
    model, averaged = pair(dtype, rule)
    objects = {"model": model.state_dict(), "averaged": averaged.state_dict()}
    dcp.load(objects, checkpoint_id=checkpoint)
    model.load_state_dict(objects["model"])
    averaged.load_state_dict(objects["averaged"])
    expected_model, _ = went(dtype, functavg.SWA())
    assert_same(model.state_dict(), expected_model.state_dict())
    return model, averaged


def by_object(checkpoint: Path, dtype: torch.dtype, rule: functavg.AveragingRule) -> Any:
    model, averaged = pair(dtype, rule)
    dcp.load({"stateful": averaged}, checkpoint_id=checkpoint)
    return model, averaged


def by_functions(checkpoint: Path, dtype: torch.dtype, rule: functavg.AveragingRule) -> Any:
    model, averaged = pair(dtype, rule)
    go(model, averaged, 7, 1)  # one that has averaged something else is overwritten
    objects = {"got": get_model_state_dict(averaged)}
    dcp.load(objects, checkpoint_id=checkpoint)
    set_model_state_dict(averaged, objects["got"])
    return model, averaged


def functionally(checkpoint: Path, dtype: torch.dtype, rule: functavg.AveragingRule) -> None:
    params, expected = went_functional(dtype, rule)
    objects = {"functional": functavg.to_state_dict(rule.init(params))}
    dcp.load(objects, checkpoint_id=checkpoint)
    resumed = functavg.from_state_dict(rule.init(params), objects["functional"])
    for _ in range(2):
        assert_same(functavg.to_state_dict(resumed), functavg.to_state_dict(expected))
        resumed, expected = rule.update(params, resumed), rule.update(params, expected)


def through_whole_tensors() -> None:
    """Gather everything as full tensors, scatter it again, from every process and from the first one."""
    for dtype in DTYPES:
        for rule in RULES.values():
            _, expected = went(dtype, rule)
            for options in ({}, {"broadcast_from_rank0": True}):
                model, averaged = pair(dtype, rule)
                whole = get_model_state_dict(expected, options=StateDictOptions(full_state_dict=True))
                set_model_state_dict(averaged, whole, options=StateDictOptions(full_state_dict=True, **options))
                if dtype == torch.float32 or not options:  # a broadcast goes through the parameters, and so rounds
                    assert_same(everything(averaged), everything(expected))
                averaged.update_parameters(model)


# ---- tests


def test_what_two_processes_saved_goes_on_in_one_and_in_four_to_the_same_bits(tmp_path: Path) -> None:
    spawn(save, 2, tmp_path, tmp_path)
    with alone():
        load(tmp_path)
    spawn(load, 4, tmp_path, tmp_path)


def test_memory_is_gathered_and_scattered_with_the_parameters(tmp_path: Path) -> None:
    spawn(through_whole_tensors, 2, tmp_path)


def test_memory_of_other_shards_is_refused_by_name() -> None:
    with alone():
        rule, plain = functavg.LAWA(2), Net()
        _, averaged = pair(torch.float32, rule)
        extra = averaged.get_extra_state()
        with pytest.raises(TypeError, match=r"memory\.1\..*: expected a plain tensor, got a DTensor"):
            AveragedModel(plain, rule=rule).set_extra_state(extra)
        mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        other = AveragedModel(sharded(plain, mesh), module=sharded(plain, mesh), rule=rule)
        with pytest.raises(ValueError, match=r"memory\.1\..*: expected shards on .*, got "):
            other.set_extra_state(extra)


def test_a_checkpoint_without_the_memory_of_a_rule_is_refused() -> None:
    """Where a file has nothing, torch's functions pass an object of their own for the extra state."""
    with alone():
        _, averaged = pair(torch.float32, functavg.EMA(0.9))
        _, remembering = pair(torch.float32, functavg.LAWA(2))
        options = StateDictOptions(full_state_dict=True)
        with pytest.raises(RuntimeError, match=r"written by a rule without memory.* is read by LAWA"):
            set_model_state_dict(remembering, get_model_state_dict(averaged, options=options), options=options)
