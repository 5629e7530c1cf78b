"""Every method of nn.Module that changes tensors, structure or state leaves an average that goes on correctly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from torch import nn

from functavg import EMA, SWA, AveragedModel
from functavg.combinators import Several
from functavg.rules.lawa import LAWA
from tests import oracle
from tests.nn.helpers import EVERY_WAY, WAYS, Course, Net, bits, contents, fill, randomise, scalar, tensors


class Image(Net):
    """Net with a weight of four dimensions, whose memory format can change."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 2, 3)


def nothing(*args: Any) -> None:
    """A hook."""


def set_extra_state(averaged):
    averaged.set_extra_state(averaged.get_extra_state())


def reload(averaged, **arguments):
    averaged.load_state_dict(copy.deepcopy(averaged.state_dict()), **arguments)


def replace_module(averaged):
    averaged.set_submodule("module.norm", copy.deepcopy(averaged.get_submodule("module.norm")))


def read_all(averaged):
    """What only reads."""
    names = [name for name, _ in averaged.named_modules()]
    assert "module.hidden.0" in names
    for read in ("named_parameters", "named_buffers", "named_children", "parameters", "buffers", "children", "modules"):
        list(getattr(averaged, read)())
    assert averaged.get_parameter("module.scale") is averaged.module.scale
    assert averaged.get_buffer("n_averaged") is averaged.n_averaged
    assert [name for name, _ in averaged.named_children()] == ["module"]
    repr(averaged), dir(averaged), str(averaged.state)


KEEPING: dict[str, Callable[[AveragedModel], Any]] = {
    "add_module": lambda averaged: averaged.add_module("extra", nn.Linear(2, 2)),
    "apply": lambda averaged: averaged.apply(nothing),
    "bfloat16": lambda averaged: averaged.bfloat16(),
    "bfloat16, float": lambda averaged: averaged.bfloat16().float(),
    "compile": lambda averaged: averaged.compile(backend="eager"),
    "cpu": lambda averaged: averaged.cpu(),
    "double": lambda averaged: averaged.double(),
    "double, half, float": lambda averaged: averaged.double().half().float(),
    "eval": lambda averaged: averaged.eval(),
    "float": lambda averaged: averaged.float(),
    "half": lambda averaged: averaged.half(),
    "half, bfloat16, double": lambda averaged: averaged.half().bfloat16().double(),
    "load_state_dict": reload,
    "load_state_dict(assign)": lambda averaged: reload(averaged, assign=True),
    "load_state_dict(strict=False)": lambda averaged: reload(averaged, strict=False),
    "named_*": read_all,
    "register_backward_hook": lambda averaged: averaged.register_full_backward_hook(nothing),
    "register_buffer": lambda averaged: averaged.register_buffer("extra", torch.ones(2)),
    "register_forward_hook": lambda averaged: averaged.register_forward_hook(nothing),
    "register_forward_pre_hook": lambda averaged: averaged.register_forward_pre_hook(nothing),
    "register_full_backward_pre_hook": lambda averaged: averaged.register_full_backward_pre_hook(nothing),
    "register_load_state_dict_post_hook": lambda averaged: (
        averaged.register_load_state_dict_post_hook(nothing),
        reload(averaged),
    ),
    "register_load_state_dict_pre_hook": lambda averaged: (
        averaged.register_load_state_dict_pre_hook(nothing),
        reload(averaged),
    ),
    "register_module": lambda averaged: averaged.register_module("extra", nn.Linear(2, 2)),
    "register_parameter": lambda averaged: averaged.register_parameter("extra", nn.Parameter(torch.ones(2))),
    "register_state_dict_post_hook": lambda averaged: (
        averaged.register_state_dict_post_hook(nothing),
        reload(averaged),
    ),
    "register_state_dict_pre_hook": lambda averaged: (averaged.register_state_dict_pre_hook(nothing), reload(averaged)),
    "requires_grad_": lambda averaged: averaged.requires_grad_(False),
    "set_extra_state": set_extra_state,
    "set_submodule": replace_module,
    "share_memory": lambda averaged: averaged.share_memory(),
    "state_dict": lambda averaged: (averaged.state_dict(), averaged.state_dict(prefix="a.", keep_vars=True)),
    "to(device)": lambda averaged: averaged.to("cpu"),
    "to(dtype)": lambda averaged: averaged.to(torch.float16),
    "to(dtype, copy)": lambda averaged: averaged.to(torch.float64).to(torch.bfloat16),
    "to(memory_format)": lambda averaged: averaged.to(memory_format=torch.channels_last),
    "to(tensor)": lambda averaged: averaged.to(torch.ones(1, dtype=torch.bfloat16), non_blocking=True),
    "train": lambda averaged: averaged.train(False),
    "type": lambda averaged: averaged.type(torch.float32),
    "type(float64)": lambda averaged: averaged.type(torch.float64),
    "zero_grad": lambda averaged: averaged.zero_grad(),
    "swap_tensors": lambda averaged: with_flag("swap_module_params_on_conversion", averaged),
    "overwrite": lambda averaged: with_flag("overwrite_module_params_on_conversion", averaged),
    "new tensors": lambda averaged: averaged._apply(torch.clone),  # as on the way to another device
    "a move of its module alone": lambda averaged: averaged.module.double(),
    "moves of a parent": lambda averaged: nn.ModuleDict({"ema": averaged}).half().double(),
}
"""After these the average is still that of the oracle, whatever was done in between."""


def with_flag(name, averaged):
    """Convert and load with one of torch's switches for how a module gets its new parameters."""
    getattr(torch.__future__, f"set_{name}")(True)
    try:
        averaged.half().float()
        reload(averaged)
        averaged.double()
    finally:
        getattr(torch.__future__, f"set_{name}")(False)


# What the average does not know of leaves but the rounding of a low-precision module.
LOSING = ("set_submodule", "a move of its module alone")


@pytest.mark.parametrize(
    ("way", "dtype", "use_buffers"),
    [
        ("EMA", torch.float32, False),
        ("SWA", torch.float32, True),
        ("avg_fn", torch.bfloat16, False),
        ("get_ema_multi_avg_fn", torch.bfloat16, True),
    ],
)
@pytest.mark.parametrize("method", KEEPING)
def test_averaging_goes_on_after_every_method(method, way, dtype, use_buffers):
    if dtype == torch.bfloat16 and method in LOSING:
        dtype = torch.float32
    arguments, profile = WAYS[way]
    model = Image().to(dtype)
    averaged = AveragedModel(model, use_buffers=use_buffers, **arguments)
    course = Course(averaged, model, profile, buffers=use_buffers)
    KEEPING[method](averaged)
    course.go(3)
    KEEPING[method](averaged) if method not in ("compile", "add_module", "register_module") else None
    course.go(3).check()
    KEEPING[method](averaged)
    course.check(rounding=2**-8)


@pytest.mark.parametrize(
    ("way", "dtype"), [("LAWA", torch.bfloat16), ("Several", torch.float32), ("Partition", torch.bfloat16)]
)
@pytest.mark.parametrize("method", KEEPING)
def test_what_rules_remember_goes_along(method, way, dtype):
    """Averages with a memory go on as one that nothing was done to, up to rounding."""
    model = Image().to(dtype)
    averaged = AveragedModel(model, **EVERY_WAY[way])
    other = copy.deepcopy(averaged)

    def go(seeds):
        for seed in seeds:
            randomise(model, seed)
            for each in (averaged, other):
                each.update_parameters(model)

    KEEPING[method](averaged)
    go(range(3))
    if not (dtype == torch.bfloat16 and method in LOSING):
        KEEPING[method](averaged)
    go(range(3, 5))
    mine, theirs = averaged.state, other.state
    assert mine.count == theirs.count == 5
    first = mine.average if way != "Several" else mine.average["fast"]
    wanted = theirs.average if way != "Several" else theirs.average["fast"]
    for name, value in wanted.items():
        torch.testing.assert_close(first[name].float(), value.float(), rtol=2e-6, atol=1e-5)
    mine, theirs = averaged.get_extra_state(), other.get_extra_state()
    for path, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert mine[path].dtype == torch.float32
            torch.testing.assert_close(mine[path], value, rtol=2e-6, atol=1e-5)
        else:
            assert mine[path] == value


# ---- what changes values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_that_apply_gives_are_gone_on_from(dtype):
    model = scalar(0.0, dtype)
    averaged = AveragedModel(model, rule=EMA(0.75))
    averaged.update_parameters(model)
    averaged.apply(lambda module: fill(module, 4.0) if isinstance(module, nn.Linear) else None)
    averaged.update_parameters(model)
    assert averaged.state.average["weight"].item() == 3.0


@pytest.mark.filterwarnings("ignore:this update replaces the weights of averaged.module")
@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_to_empty_starts_anew(dtype, way):
    """An emptied average is one that has averaged nothing: what comes then is all there is."""
    model = Image().to(dtype)
    averaged = AveragedModel(model, **EVERY_WAY[way])
    other = copy.deepcopy(averaged)
    for seed in range(3):
        randomise(model, seed)
        averaged.update_parameters(model)
    assert averaged.to_empty(device="cpu") is averaged
    assert (averaged.n_averaged.dtype, averaged.n_averaged.item(), averaged.state.count) == (torch.int64, 0, 0)
    with torch.no_grad():
        for each in (averaged, other):
            for tensor in tensors(each.module).values():
                tensor.fill_(1)
            each.set_extra_state(AveragedModel(each.module, **EVERY_WAY[way]).get_extra_state())
    for seed in range(4):
        randomise(model, seed)
        for each in (averaged, other):
            each.update_parameters(model)
    assert contents(averaged) == contents(other)


def test_a_memory_forgets_what_was_emptied():
    model = scalar(1.0)
    averaged = AveragedModel(model, rule=LAWA(3))
    for _ in range(2):
        averaged.update_parameters(model)
    averaged.to_empty(device="cpu")
    fill(model, 5.0)
    averaged.update_parameters(model)
    assert averaged.module.weight.item() == 5.0


# ---- meta


# Whether values on meta are finite is unknown.
@pytest.mark.parametrize("way", [way for way in EVERY_WAY if way != "SkipNonFinite"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_average_on_meta_counts_on(dtype, way):
    model = Image().to(dtype)
    averaged = AveragedModel(model, use_buffers=True, **EVERY_WAY[way])
    averaged.update_parameters(model)
    count = averaged.state.count
    averaged.to("meta")
    model.to("meta")
    assert averaged.state.count == count
    for _ in range(2):
        averaged.update_parameters(model)
    assert averaged.state.count >= count
    assert all(tensor.is_meta for tensor in tensors(averaged).values())
    assert averaged.n_averaged.dtype == torch.int64
    averaged.to_empty(device="cpu")
    assert averaged.n_averaged.item() == averaged.state.count == 0
    assert not any(tensor.is_meta for tensor in tensors(averaged).values())
    averaged.update_parameters(Image().to(dtype))


# ---- shared memory


def update_there(averaged, model):
    """What another process does with a shared average."""
    averaged.update_parameters(model)


@pytest.mark.parametrize("rule", [EMA(0.75), Several({"a": EMA(0.75), "b": SWA()})], ids=["EMA", "Several"])
def test_shared_memory_is_that_of_all_tensors(rule):
    model = Net().bfloat16()
    averaged = AveragedModel(model, rule=rule)
    averaged.update_parameters(model)
    averaged.share_memory()
    averaged.update_parameters(model)
    saved = averaged.state_dict()
    everything = tensors(averaged) | saved | (saved.get("_extra_state") or {})
    assert [
        name for name, tensor in everything.items() if isinstance(tensor, torch.Tensor) and not tensor.is_shared()
    ] == []


@pytest.mark.slow
def test_another_process_updates_the_same_average():
    model = scalar(0.0, torch.bfloat16)
    averaged = AveragedModel(model, rule=EMA(0.999))
    averaged.update_parameters(model)
    averaged.share_memory()
    fill(model, 1.0)
    averaged.update_parameters(model)
    process = torch.multiprocessing.get_context("spawn").Process(target=update_there, args=(averaged, model))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0
    assert averaged.n_averaged.item() == 2 + 1
    averaged.update_parameters(model)
    assert averaged.n_averaged.item() == 4
    assert averaged.state.average["weight"].item() == pytest.approx(1 - 0.999**3, rel=1e-4)


# ---- the count


def test_the_count_is_an_int64_buffer_as_in_torch():
    averaged = AveragedModel(Net(), "cpu")
    assert dict(averaged.named_buffers(recurse=False)).keys() == {"n_averaged"}
    assert (averaged.n_averaged.dtype, averaged.n_averaged.shape) == (torch.int64, ())
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        averaged.type(dtype)
        assert averaged.n_averaged.dtype == torch.int64


def test_a_count_set_by_hand_is_read():
    model = scalar(0.0)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    averaged.n_averaged.fill_(3)
    fill(model, 1.0)
    averaged.update_parameters(model)
    assert (averaged.module.weight.item(), averaged.n_averaged.item()) == (0.25, 4)
    averaged.n_averaged = torch.tensor(0)
    averaged.update_parameters(model)
    assert (averaged.module.weight.item(), averaged.n_averaged.item()) == (1.0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", EVERY_WAY)
def test_an_average_whose_count_is_set_back_to_0_begins_anew(way, dtype):
    """Also what its rule remembers, and whatever is read in between."""
    model = Net().to(dtype)
    averaged, anew = (AveragedModel(model, use_buffers=True, **EVERY_WAY[way]) for _ in range(2))
    for seed in range(3):
        randomise(model, seed)
        averaged.update_parameters(model)
    anew.load_state_dict(averaged.state_dict())
    for reset in (averaged, anew):
        reset.n_averaged.zero_()
    assert averaged.state.count == 0
    averaged = copy.deepcopy(averaged)
    fresh = AveragedModel(averaged.module, use_buffers=True, **EVERY_WAY[way])
    for seed in range(4):
        randomise(model, 7 + seed)
        for course in (averaged, anew, fresh):
            course.update_parameters(model)
    assert contents(averaged) == contents(anew)
    if dtype == torch.float32:
        assert contents(averaged) == contents(fresh)


def test_moves_that_convert_leave_integers_and_their_dtypes():
    model = Net()
    averaged = AveragedModel(model)
    for _ in range(2):
        averaged.half()
        averaged.update_parameters(model)
    assert averaged.module.ids.dtype == averaged.module.norm.num_batches_tracked.dtype == torch.int64
    assert averaged.module.scale.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_the_average_move_with_it(dtype):
    averaged = AveragedModel(Net().to(dtype), rule=EMA(0.9))
    averaged(torch.ones(2, 3, dtype=dtype)).sum().backward()
    averaged.double()
    assert {parameter.grad.dtype for parameter in averaged.parameters()} == {torch.float64}
    averaged.update_parameters(Net().to(dtype))
    averaged.zero_grad()
    assert all(parameter.grad is None for parameter in averaged.parameters())


def test_an_average_converted_and_converted_back_has_lost_nothing():
    model = Net()
    averaged = AveragedModel(model, rule=EMA(0.9))
    for seed in range(3):
        randomise(model, seed)
        averaged.update_parameters(model)
    before = {name: bits(value) for name, value in averaged.state.average.items()}
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        averaged.to(dtype)
    assert {name: bits(value) for name, value in averaged.state.average.items()} == before
    assert bits(averaged.module.scale) == before["scale"]


@pytest.mark.parametrize("held", [None, torch.float64], ids=str)
@pytest.mark.parametrize("way", [("bfloat16", "half"), ("bfloat16", "float", "half"), ("double", "bfloat16", "half")])
def test_a_module_converted_back_holds_the_rounding_of_the_average_and_not_that_of_a_rounding(way, held):
    model = nn.Linear(9, 9).half()
    averaged = AveragedModel(model, rule=EMA(0.9), dtype=held)
    for seed in range(3):
        randomise(model, seed)
        averaged.update_parameters(model)
    before = contents(averaged)
    for method in way:
        getattr(averaged, method)()
    assert contents(averaged) == before


def test_the_oracle_sees_a_wrong_average():
    """The checks above can fail: one wrong value is noticed."""
    model = Net()
    course = Course(AveragedModel(model, rule=EMA(0.9)), model, oracle.ema(0.9)).go(3)
    course.check()
    with torch.no_grad():
        course.averaged.module.scale.mul_(1 + 1e-4)
    with pytest.raises(AssertionError, match="scale"):
        course.check()
    assert np.isfinite(course.expected()["scale"])
