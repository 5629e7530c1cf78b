"""update_parameters: every rule is the weighted sum that its formula says, for every kind of tensor in a model."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch import nn

import functavg
from functavg import EMA, SWA, AveragedModel
from functavg.combinators import Several, SkipNonFinite
from functavg.rules.lawa import LAWA
from tests import oracle
from tests.nn.helpers import (
    EVERY_WAY,
    FLOAT32,
    LOW,
    WAYS,
    Course,
    Net,
    bits,
    contents,
    fill,
    randomise,
    scalar,
    tensors,
    unchanged,
)
from tests.tables import ema_step

# ---- rules and functions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_every_rule_and_function_is_its_weighted_sum(name, dtype):
    arguments, profile = WAYS[name]
    model = Net().to(dtype)
    Course(AveragedModel(model, **arguments), model, profile).go(6).check(1e-12 if dtype.itemsize == 8 else FLOAT32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_buffers_are_averaged_as_parameters_are(name, dtype):
    arguments, profile = WAYS[name]
    model = Net().to(dtype)
    averaged = AveragedModel(model, use_buffers=True, **arguments)
    course = Course(averaged, model, profile, buffers=True).go(6)
    course.check()
    assert {"norm.running_mean", "norm.running_var"} <= averaged.state.average.keys()
    assert not {"norm.num_batches_tracked", "ids", "cache"} & averaged.state.average.keys()


@pytest.mark.parametrize("name", [name for name in WAYS if "vg" not in name and name != "default"])
def test_steps_weigh_an_iterate_by_how_long_it_lasted(name):
    arguments, profile = WAYS[name]
    model = Net()
    course = Course(AveragedModel(model, **arguments), model, profile)
    course.go(1).go(1, steps=3).go(2).go(1, steps=2).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [np.int64, torch.tensor], ids=["numpy", "tensor"])
@pytest.mark.parametrize("name", ["EMA", "EMA-debias", "SWA", "PowerEMA"])
def test_steps_may_be_an_integer_of_any_library(name, kind, dtype):
    arguments, profile = WAYS[name]
    model = Net().to(dtype)
    course = Course(AveragedModel(model, **arguments), model, profile)
    for steps in (1, 3, 2):
        course.go(1, steps=kind(steps))
    course.steps = [int(steps) for steps in course.steps]
    course.check()


@pytest.mark.parametrize("name", ["get_ema_avg_fn", "get_swa_multi_avg_fn"])
def test_torchs_functions_are_told_steps_as_the_rules_are(name):
    arguments, profile = WAYS[name]
    model = Net()
    Course(AveragedModel(model, **arguments), model, profile).go(1).go(2, steps=3).check()


@pytest.mark.parametrize("kind", ["avg_fn", "multi_avg_fn", "AvgFn", "AvgFn-grouped"])
def test_functions_count_models_whatever_the_steps(kind):
    averaged = AveragedModel(scalar(), **WAYS[kind][0])
    for value in (0.0, 1.0, 1.0):
        averaged.update_parameters(scalar(value), steps=5)
    assert averaged.n_averaged.item() == 3
    assert averaged.module.weight.item() == pytest.approx(1 - 0.75**2)


def test_the_first_update_copies_whatever_the_average_was():
    model = Net()
    averaged = AveragedModel(model, rule=EMA(0.999))
    fill(averaged.module, float("nan"))
    fill(model, 3.0)
    with pytest.warns(UserWarning, match="this update replaces the weights"):
        averaged.update_parameters(model)
    assert all(bool((parameter == 3.0).all()) for parameter in averaged.module.parameters())


def test_several_averages_of_one_model_are_all_right():
    rule = Several({"fast": EMA(0.5), "slow": EMA(0.9), "window": LAWA(2)})
    model = Net().bfloat16()
    averaged = AveragedModel(model, rule=rule)
    fast, slow = (Course(averaged, model, oracle.ema(decay)) for decay in (0.5, 0.9))
    for seed in range(5):
        randomise(model, seed)
        averaged.update_parameters(model)
        for course in (fast, slow):
            course.iterates.append({name: tensor.detach().double().numpy() for name, tensor in tensors(model).items()})
            course.steps.append(1)
    fast.averaged.state.average["fast"]
    state = averaged.state
    for name, course in {"fast": fast, "slow": slow}.items():
        wanted = course.expected()
        for key, value in state.average[name].items():
            assert value.dtype == torch.float32
            np.testing.assert_allclose(value.double().numpy(), wanted[key], rtol=FLOAT32, atol=4 * FLOAT32)
    assert torch.equal(averaged.module.inputs.weight, state.average["fast"]["inputs.weight"].bfloat16())
    window = (fast.iterates[-1]["scale"] + fast.iterates[-2]["scale"]) / 2
    assert state.average["window"]["scale"].item() == pytest.approx(window, rel=FLOAT32)
    assert state.count == averaged.n_averaged.item() == 5


@pytest.mark.parametrize("name", EVERY_WAY)
def test_the_average_never_shares_memory_with_the_model(name):
    model = Net()
    averaged = AveragedModel(model, use_buffers=True, **EVERY_WAY[name])
    for seed in range(3):
        randomise(model, seed)
        averaged.update_parameters(model)
        mine = {tensor.data_ptr() for tensor in tensors(averaged.module).values()}
        assert not mine & {tensor.data_ptr() for tensor in tensors(model).values()}


# ---- precision


def test_a_slow_average_of_bfloat16_moves():
    model = scalar(1.0, torch.bfloat16)
    averaged = AveragedModel(model, rule=EMA(0.9999))
    averaged.update_parameters(model)
    fill(model, 2.0)
    for _ in range(5000):
        averaged.update_parameters(model)
    wanted = 2 - 0.9999**5000
    assert averaged.state.average["weight"].item() == pytest.approx(wanted, rel=2e-5)
    assert averaged.module.weight.dtype == torch.bfloat16
    assert averaged.module.weight.item() == torch.tensor(wanted).bfloat16().item()
    assert averaged.state_dict()["module.weight"].item() == averaged.state.average["weight"].item()


def test_the_mean_of_many_bfloat16_snapshots_is_right():
    model = scalar(1.0, torch.bfloat16)
    averaged = AveragedModel(model)
    for value in (1.0, 2.0):
        fill(model, value)
        for _ in range(500):
            averaged.update_parameters(model)
    assert averaged.state.average["weight"].item() == pytest.approx(1.5, rel=1e-6)
    assert averaged.module.weight.item() == 1.5


@pytest.mark.parametrize("name", WAYS)
def test_a_low_precision_model_goes_into_a_float32_average(name):
    arguments, profile = WAYS[name]
    model = Net().bfloat16()
    course = Course(AveragedModel(model, **arguments).float(), model, profile)
    course.go(2).check()
    assert {parameter.dtype for parameter in course.averaged.module.parameters()} == {torch.float32}


@pytest.mark.parametrize("decay", [0.9, np.float64(0.9), torch.tensor(0.9, dtype=torch.float64)], ids=repr)
@pytest.mark.parametrize(
    "make", [functavg.get_ema_avg_fn, functavg.get_ema_multi_avg_fn, EMA], ids=lambda f: f.__name__
)
def test_the_average_does_not_depend_on_the_type_of_the_decay(make, decay):
    averages = []
    for given in (0.9, decay):
        model = Net().bfloat16()
        argument = {EMA: "rule", functavg.get_ema_avg_fn: "avg_fn"}.get(make, "multi_avg_fn")
        averaged = AveragedModel(model, **{argument: make(given)})
        for seed in range(3):
            randomise(model, seed)
            averaged.update_parameters(model)
        averages.append({name: bits(value) for name, value in averaged.state.average.items()})
    assert averages[0] == averages[1]


def test_an_equal_mean_of_float16_does_not_overflow_on_the_way():
    model = scalar(4000.0, torch.float16)
    averaged = AveragedModel(model)
    for _ in range(20):
        averaged.update_parameters(model)
        assert averaged.module.weight.item() == 4000.0


def test_float8_and_complex_parameters_are_averaged():
    model = nn.Module()
    model.eighth = nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn), requires_grad=False)
    model.complex = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    averaged = AveragedModel(model, rule=EMA(0.75))
    for value in (0.0, 1.0):
        model.eighth.data = torch.full((4,), value).to(torch.float8_e4m3fn)
        model.complex.data.fill_(complex(value, -value))
        averaged.update_parameters(model)
    assert averaged.state.average["eighth"].tolist() == [0.25] * 4
    assert averaged.module.complex.tolist() == [0.25 - 0.25j] * 4


# ---- kinds of buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_counters_of_batches_are_copied(dtype):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(dtype)
    averaged = AveragedModel(model, rule=EMA(0.99), use_buffers=True)
    batch = torch.randn(4, 2, dtype=dtype)
    for _ in range(200):
        with torch.no_grad():
            model(batch)
        averaged.update_parameters(model)
    assert averaged.module[1].num_batches_tracked.item() == 200
    assert averaged.module[1].num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("name", WAYS)
def test_integer_and_bool_buffers_take_the_newest_value(name):
    model = nn.Linear(1, 1)
    model.register_buffer("unsigned", torch.tensor(5, dtype=torch.uint8))
    model.register_buffer("signed", torch.tensor(100, dtype=torch.int8))
    model.register_buffer("mask", torch.tensor([True, False]))
    averaged = AveragedModel(model, use_buffers=True, **WAYS[name][0])
    averaged.update_parameters(model)
    model.unsigned.fill_(3)
    model.signed.fill_(-100)
    model.mask.fill_(False)
    averaged.update_parameters(model)
    module = averaged.module
    assert (module.unsigned.item(), module.signed.item(), module.mask.tolist()) == (3, -100, [False, False])
    assert (module.unsigned.dtype, module.signed.dtype, module.mask.dtype) == (torch.uint8, torch.int8, torch.bool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("rule", [EMA(0.9), SWA(), LAWA(2), SkipNonFinite(EMA(0.9))], ids=repr)
@pytest.mark.parametrize("use_buffers", [True, lambda name, buffer: True], ids=["True", "function"])
def test_masks_that_hold_an_infinity_are_copied(use_buffers, rule, dtype):
    model = scalar(0.0)
    model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1).to(dtype))
    model.register_buffer("statistic", torch.zeros(()))
    averaged = AveragedModel(model, rule=rule, use_buffers=use_buffers)
    for _ in range(3):
        averaged.update_parameters(model)
    assert averaged.n_averaged == 3
    assert bits(averaged.module.mask) == bits(model.mask)
    assert averaged.state.average.keys() == {"weight", "statistic"}
    again = copy.deepcopy(averaged)
    again.update_parameters(model)
    assert bits(again.module.mask) == bits(model.mask)


def test_buffers_that_are_not_persistent_are_copied_so_that_a_resumed_average_has_them():
    model = scalar(0.0)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    averaged = AveragedModel(model, rule=EMA(0.9), use_buffers=True)
    for value in range(3):
        model.cache.fill_(value)
        averaged.update_parameters(model)
    resumed = AveragedModel(model, rule=EMA(0.9), use_buffers=True)
    resumed.load_state_dict(averaged.state_dict())
    model.cache.fill_(7.0)
    for course in (averaged, resumed):
        course.update_parameters(model)
    assert contents(averaged) == contents(resumed)
    assert averaged.module.cache.tolist() == [7.0, 7.0]


def legacy_spectral_norm(layer):
    return nn.utils.spectral_norm(layer)


@pytest.mark.parametrize("spectral_norm", [nn.utils.parametrizations.spectral_norm, legacy_spectral_norm])
def test_vectors_of_a_spectral_norm_are_copied(spectral_norm):
    torch.manual_seed(0)
    model = spectral_norm(nn.Linear(16, 16, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    averaged = AveragedModel(model, rule=EMA(0.9), use_buffers=True)
    for _ in range(60):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
    vectors = {name: buffer for name, buffer in model.named_buffers() if name.endswith(("_u", "_v"))}
    assert len(vectors) == 2
    for name, vector in vectors.items():
        assert torch.equal(averaged.module.get_buffer(name), vector)
    averaged.eval()
    with torch.no_grad():
        averaged.module(torch.zeros(1, 16))
    assert torch.linalg.matrix_norm(averaged.module.weight.detach(), 2).item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("rule", [EMA(0.5), functavg.AvgFn(ema_step)])
def test_the_average_follows_buffers_that_are_resized_registered_or_set_to_none(rule, persistent):
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_buffer("cache", torch.zeros(4), persistent=persistent)
    model[0].register_buffer("later", None, persistent=persistent)
    averaged = AveragedModel(model, rule=rule)
    averaged.update_parameters(model)
    model[0].register_buffer("cache", torch.arange(8.0), persistent=persistent)
    model[0].later = torch.ones(2)
    model[0].register_buffer("new", torch.full((3,), 7.0), persistent=persistent)
    model[0].register_buffer("empty", None, persistent=persistent)
    averaged.update_parameters(model)
    assert averaged.module[0].empty is None
    layer = averaged.module[0]
    assert [b.tolist() for b in (layer.cache, layer.later, layer.new)] == [list(range(8)), [1.0, 1.0], [7.0, 7.0, 7.0]]
    assert layer.cache is not model[0].cache
    model[0].cache.fill_(-1.0)
    model[0].later = None
    averaged.update_parameters(model)
    assert layer.cache.tolist() == [-1.0] * 8
    assert layer.later is None
    assert set(averaged.state_dict()) - {"n_averaged"} == {f"module.{key}" for key in model.state_dict()}


def test_a_copied_buffer_changes_its_dtype_with_the_models_only_where_it_must():
    model = scalar()
    for name, buffer in {"a": torch.tensor(1), "b": torch.tensor(1.0), "c": torch.tensor(1.0)}.items():
        model.register_buffer(name, buffer)
    averaged = AveragedModel(model)
    model.a, model.b, model.c = torch.tensor(1.5), torch.tensor(2), torch.tensor(3 + 4j)
    averaged.update_parameters(model)
    module = averaged.module
    assert (module.a.item(), module.b.item(), module.c.item()) == (1.5, 2.0, 3 + 4j)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_copied_buffers_may_be_sparse_or_quantised():
    model = scalar()
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    averaged = AveragedModel(model)
    for scale in (1.0, 2.0):
        model.adjacency = scale * torch.eye(2).to_sparse()
        averaged.update_parameters(model)
        assert averaged.module.adjacency.layout == torch.sparse_coo
        assert averaged.module.adjacency.to_dense().tolist() == [[scale, 0.0], [0.0, scale]]
        assert averaged.module.adjacency is not model.adjacency
    model.register_buffer("packed", torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8))
    for _ in range(2):
        averaged.update_parameters(model)
        assert averaged.module.packed.dequantize().tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_copied_buffers_may_be_nested():
    model = scalar()
    model.register_buffer("table", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    averaged = AveragedModel(model)
    for value in (2.0, 3.0):
        model.table = torch.nested.nested_tensor([torch.full((2,), value), torch.full((3,), value)])
        averaged.update_parameters(model)
        assert [part.tolist() for part in averaged.module.table.unbind()] == [[value] * 2, [value] * 3]


def test_a_sparse_buffer_is_refused_by_name_where_it_would_be_averaged():
    model = scalar()
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    averaged = AveragedModel(model, use_buffers=True)
    with unchanged(averaged), pytest.raises(TypeError, match=r"adjacency.*sparse_coo"):
        averaged.update_parameters(model)
    averaged.use_buffers = lambda name, buffer: name != "adjacency"
    averaged.update_parameters(model)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_buffers_that_share_memory_are_each_averaged_once(use_buffers):
    model = scalar()
    model.register_buffer("all", torch.zeros(4))
    model.register_buffer("part", model.all[:2])
    model.register_buffer("weights", model.weight.data.view(1))
    averaged = AveragedModel(model, rule=EMA(0.75), use_buffers=use_buffers)
    for value in (0.0, 1.0):
        fill(model, value)
        model.all.fill_(value)
        averaged.update_parameters(model)
    wanted = 0.25 if use_buffers else 1.0
    assert averaged.module.weight.item() == 0.25
    assert [set(b.tolist()) for b in averaged.module.buffers()] == [{wanted}] * 3


def test_copied_buffers_may_be_shared_in_the_average_and_parted_in_the_model():
    model = nn.ModuleList([scalar(), scalar()])
    mask = torch.zeros(2)
    for layer in model:
        layer.register_buffer("mask", mask)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    model.double()  # as every move does, it parts the buffers
    model[0].mask.fill_(1.0)
    model[1].mask.fill_(2.0)
    for _ in range(2):
        averaged.update_parameters(model)
        assert [layer.mask.tolist() for layer in averaged.module] == [[1.0, 1.0], [2.0, 2.0]]


# ---- use_buffers


def test_use_buffers_may_choose_by_name_and_buffer():
    model = Net()
    asked = {}

    def use_buffers(name, buffer):
        asked[name] = buffer
        return name == "norm.running_mean"

    averaged = AveragedModel(model, rule=EMA(0.75), use_buffers=use_buffers)
    asked.clear()
    for value in (0.0, 1.0):
        for buffer in (model.norm.running_mean, model.norm.running_var, model.cache):
            buffer.fill_(value)
        averaged.update_parameters(model)
    assert averaged.module.norm.running_mean.tolist() == [0.25] * 3
    assert averaged.module.norm.running_var.tolist() == [1.0] * 3
    assert averaged.module.cache.tolist() == [1.0] * 2
    assert asked.keys() == {"norm.running_mean", "norm.running_var"}
    assert asked["norm.running_mean"] is model.norm.running_mean


def test_what_to_average_by_is_read_at_each_update():
    model = scalar()
    averaged = AveragedModel(model)
    model.register_buffer("buffer", torch.zeros(1))
    averaged.update_parameters(model)
    fill(model, 1.0)
    model.buffer.fill_(1.0)
    averaged.avg_fn = functavg.get_ema_avg_fn(0.75)
    averaged.update_parameters(model)
    assert (averaged.module.weight.item(), averaged.module.buffer.item()) == (0.25, 1.0)
    averaged.avg_fn = None
    averaged.multi_avg_fn = lambda averages, news, count: torch._foreach_lerp_(averages, news, 0.5)
    averaged.use_buffers = True
    model.buffer.fill_(2.0)
    averaged.update_parameters(model)
    assert (averaged.module.weight.item(), averaged.module.buffer.item()) == (0.625, 1.5)
    averaged.multi_avg_fn = functavg.get_ema_multi_avg_fn(0.0)
    averaged.update_parameters(model)
    assert (averaged.module.weight.item(), averaged.module.buffer.item()) == (1.0, 2.0)
    assert averaged.n_averaged.item() == 4


def test_the_representation_shows_the_rule():
    assert "rule=EMA(decay=0.9, debias=False, start='copy'), use_buffers=True" in repr(
        AveragedModel(scalar(), multi_avg_fn=functavg.get_ema_multi_avg_fn(0.9), use_buffers=True)
    )
    assert "rule=SWA()" in repr(AveragedModel(scalar()))


# ---- functions of users


def test_functions_see_real_and_complex_tensors_only_converted_upwards():
    model = Net().bfloat16()
    model.register_parameter("frozen", nn.Parameter(torch.tensor([1, 2], dtype=torch.int8), requires_grad=False))
    model.register_parameter("complex", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    seen = []

    def avg_fn(average, new, count):
        seen.append((average.dtype, new.dtype, average.shape == new.shape, average.requires_grad or new.requires_grad))
        assert torch.is_grad_enabled() is False
        assert (count.dtype, count.shape, count.item()) == (torch.int64, (), 1)
        return new

    averaged = AveragedModel(model, avg_fn=avg_fn, use_buffers=True)
    averaged.update_parameters(model)
    assert not seen  # the first model is copied
    averaged.update_parameters(model)
    real, complex_ = (torch.float32,) * 2, (torch.complex64,) * 2
    assert set(seen) == {(*real, True, False), (*complex_, True, False)}
    saved = model.state_dict(keep_vars=True).values()  # what is not persistent is copied
    assert len(seen) == len({id(t) for t in saved if t.is_floating_point() or t.is_complex()})


def test_functions_of_many_tensors_get_one_dtype_at_a_time():
    model = nn.ModuleList([scalar(0.0, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)])
    model.register_buffer("counter", torch.tensor(0))
    calls = []

    def multi_avg_fn(averages, news, count):
        calls.append([tensor.dtype for tensor in (*averages, *news)])
        assert (count.dtype, count.shape, count.item()) == (torch.int64, (), 1)
        torch._foreach_lerp_(averages, news, 0.5)

    averaged = AveragedModel(model, multi_avg_fn=multi_avg_fn, use_buffers=True)
    averaged.update_parameters(model)
    fill(model, 1.0)
    model.counter.fill_(7)
    averaged.update_parameters(model)
    assert all(len(set(call)) == 1 for call in calls)
    assert sorted(str(call[0]) for call in calls) in (
        ["torch.float32", "torch.float32", "torch.float64"],
        ["torch.float32", "torch.float64"],
    )
    assert [layer.weight.item() for layer in averaged.module] == [0.5] * 3
    assert averaged.module.counter.item() == 7


@pytest.mark.parametrize("result", [None, 1.0, torch.zeros(2)], ids=["None", "number", "shape"])
def test_the_result_of_a_function_is_checked(result):
    averaged = AveragedModel(scalar(), avg_fn=lambda average, new, count: result)
    averaged.update_parameters(scalar(1.0))
    with unchanged(averaged), pytest.raises(ValueError, match=r"weight.*avg_fn must return the new average.*\(1, 1\)"):
        averaged.update_parameters(scalar(2.0))


def test_a_function_that_raises_leaves_the_count():
    def broken(average, new, count):
        raise ArithmeticError("no")

    averaged = AveragedModel(Net(), avg_fn=broken)
    averaged.update_parameters(Net())
    with unchanged(averaged), pytest.raises(ArithmeticError, match="no"):
        averaged.update_parameters(Net())


def test_a_function_may_write_to_its_average_and_return_the_new_value():
    model = scalar(1.0)
    averaged = AveragedModel(model, avg_fn=lambda average, new, count: average.mul_(0.5).add_(new, alpha=0.5))
    averaged.update_parameters(model)
    averaged.avg_fn, model_2 = (lambda average, new, count: new), scalar(5.0)
    averaged.update_parameters(model_2)
    fill(model_2, 6.0)
    assert averaged.module.weight.item() == 5.0


@pytest.mark.parametrize("name", ["avg_fn", "multi_avg_fn"])
def test_a_function_may_have_an_attribute_named_rule_that_is_none(name):
    class Function:
        rule = "mean of two"

        def __call__(self, average, new, count):
            if name == "avg_fn":
                return (average + new) / 2
            for old, value in zip(average, new, strict=True):
                old.lerp_(value, 0.5)

    averaged = AveragedModel(scalar(), **{name: Function()})
    for value in (0.0, 1.0):
        averaged.update_parameters(scalar(value))
    assert averaged.module.weight.item() == 0.5


# ---- arguments


@pytest.mark.parametrize(
    "arguments",
    [
        {"avg_fn": ema_step, "multi_avg_fn": functavg.get_swa_multi_avg_fn()},
        {"avg_fn": ema_step, "rule": SWA()},
        {"multi_avg_fn": functavg.get_swa_multi_avg_fn(), "rule": SWA()},
        {"device": functavg.get_swa_multi_avg_fn(), "rule": SWA()},
    ],
    ids="+".join,
)
def test_two_ways_to_average_are_one_too_many(arguments):
    with pytest.raises(AssertionError, match="Only one of avg_fn, multi_avg_fn and rule"):
        AveragedModel(scalar(), **arguments)


def test_two_multi_avg_fns_are_one_too_many():
    function = functavg.get_swa_multi_avg_fn()
    with pytest.raises(AssertionError, match="two ways to average were given"):
        AveragedModel(scalar(), function, multi_avg_fn=function)


@pytest.mark.parametrize("rule", [0.999, EMA, "ema"], ids=repr)
def test_a_rule_must_be_one(rule):
    with pytest.raises(TypeError, match=r"rule must be an AveragingRule such as EMA"):
        AveragedModel(scalar(), rule=rule)


@pytest.mark.parametrize("decay", [float("nan"), -0.1, 1.1, "0.9", None])
@pytest.mark.parametrize("make", [functavg.get_ema_avg_fn, functavg.get_ema_multi_avg_fn], ids=lambda f: f.__name__)
def test_a_wrong_decay_is_refused_with_its_value(make, decay):
    with pytest.raises((TypeError, ValueError), match=rf"decay.*{decay}"):
        make(decay)


def test_rules_of_functions_want_functions():
    with pytest.raises(TypeError, match=r"fn must be callable, got 0.9"):
        functavg.AvgFn(0.9, grouped=True)


# ---- modes


MODES = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["EMA", "SWA", "avg_fn", "multi_avg_fn"])
def test_updates_do_not_depend_on_modes(name, dtype, mode):
    arguments, profile = WAYS[name]
    model = Net().to(dtype)
    course = Course(AveragedModel(model, **arguments), model, profile)
    course.go(2)
    for _ in range(3):
        course.seed += 1
        randomise(model, course.seed)
        course.iterates.append({n: t.detach().to(torch.float64).numpy() for n, t in tensors(model).items()})
        course.steps.append(1)
        with MODES[mode]():
            course.averaged.update_parameters(model)
    assert not any(tensor.is_inference() or tensor.grad_fn for tensor in tensors(course.averaged).values())
    course.go(1).check()


@pytest.mark.parametrize(("built", "dtype"), [(True, torch.bfloat16), (False, torch.float32)], ids=["built", "updated"])
@pytest.mark.parametrize("name", EVERY_WAY)
def test_what_was_built_or_updated_in_inference_mode_is_updated_outside(name, built, dtype):
    """The same average comes out as without inference mode."""

    def average(mode):
        model = Net().to(dtype)
        randomise(model, 0)
        with mode() if built else contextlib.nullcontext():
            averaged = AveragedModel(model, use_buffers=True, **EVERY_WAY[name])
        for seed in range(4):
            randomise(model, seed)
            with mode() if seed % 2 else contextlib.nullcontext():
                averaged.update_parameters(model)
        return {key: bits(value) for key, value in tensors(averaged).items()}

    assert average(torch.inference_mode) == average(torch.no_grad)


def test_a_model_made_in_inference_mode_is_averaged_outside():
    with torch.inference_mode():
        model = nn.Sequential(scalar(0.0), nn.BatchNorm1d(1))
    averaged = AveragedModel(model, rule=EMA(0.75), use_buffers=True)
    averaged.update_parameters(model)
    with torch.inference_mode():
        fill(model, 1.0)
    averaged.update_parameters(model)
    assert averaged.module[0].weight.item() == 0.25
    assert not any(tensor.is_inference() for tensor in tensors(averaged).values())


def test_an_average_moved_in_inference_mode_keeps_its_precision():
    model = scalar(1.0)
    averaged = AveragedModel(model, rule=EMA(0.999))
    averaged.update_parameters(model)
    with torch.inference_mode():
        averaged.bfloat16()
    fill(model, 2.0)
    for _ in range(100):
        averaged.update_parameters(model)
    assert averaged.state.average["weight"].item() == pytest.approx(2 - 0.999**100, rel=1e-5)


def assigned(averaged):
    again = AveragedModel(averaged.module, rule=averaged.rule)
    again.load_state_dict(copy.deepcopy(averaged.state_dict()), assign=True)
    return again


@pytest.mark.parametrize("rule", [EMA(0.999), LAWA(2), Several({"a": EMA(0.999), "b": SWA()})], ids=repr)
@pytest.mark.parametrize("way", [copy.deepcopy, assigned], ids=["deepcopy", "assign"])
def test_a_copy_or_load_in_inference_mode_goes_on_to_the_same_bits(way, rule):
    model = scalar(1.0, torch.bfloat16)
    averaged = AveragedModel(model, rule=rule)
    with torch.inference_mode():
        early = way(averaged)
    for course in (averaged, early):
        for value in (1.0, 2.0, 4.0):
            fill(model, value)
            course.update_parameters(model)
    with torch.inference_mode():
        late = way(averaged)
    for course in (averaged, early, late):
        course.update_parameters(model)
    assert contents(averaged) == contents(early) == contents(late)


def test_a_module_moved_by_hand_in_inference_mode_averages_by_its_rounding():
    model = scalar(0.0)
    averaged = AveragedModel(model, rule=EMA(0.5))
    averaged.update_parameters(model)
    with torch.inference_mode():
        averaged.module.weight = nn.Parameter(averaged.module.weight.bfloat16())
    assert averaged.module.weight.is_inference()
    fill(model, 1.0)
    for wanted in (0.5, 0.75):
        averaged.update_parameters(model)
        assert averaged.module.weight.item() == averaged.state.average["weight"].item() == wanted


def test_updates_leave_no_graph_and_training_goes_on():
    model = Net()
    averaged = AveragedModel(model, rule=EMA(0.9))
    loss = model(torch.randn(4, 3)).sum()
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    loss.backward()  # no version of the model's was bumped
    assert all(parameter.grad_fn is None for parameter in averaged.parameters())
    averaged(torch.randn(4, 3)).sum().backward()


def test_a_dtype_is_that_of_what_is_averaged_and_of_no_buffer_that_is_copied():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    held = {name: tensor.dtype for name, tensor in AveragedModel(model, dtype=torch.bfloat16).module.named_buffers()}
    assert held == {name: tensor.dtype for name, tensor in model.named_buffers()}
    averaged = AveragedModel(model, dtype=torch.bfloat16, use_buffers=True)
    assert {parameter.dtype for parameter in averaged.module.parameters()} == {torch.bfloat16}
    assert averaged.module[1].running_mean.dtype == torch.bfloat16
    assert averaged.module[1].num_batches_tracked.dtype == torch.int64
