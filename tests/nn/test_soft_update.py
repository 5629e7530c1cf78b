"""Target networks: one step towards a model, by name, of all parameters and buffers or of none."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import functavg
from functavg import EMA, AveragedModel, soft_update
from functavg.schedules import Constant
from tests import oracle
from tests.nn.helpers import (
    FLOAT32,
    Net,
    alone,
    bits,
    fill,
    numbers,
    parameters_of,
    randomise,
    scalar,
    tensors,
    unchanged,
)
from tests.nn.test_merged_layers import WithFlag

TAU = 0.3
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)


def follow(tau: float, *, buffers: str = "copy", model: nn.Module | None = None) -> tuple[nn.Module, nn.Module, list]:
    """Let a target follow a model for five steps; return both, and the values of target and models on the way."""
    model = Net() if model is None else model
    target = copy.deepcopy(model)
    randomise(target, 100)
    seen = [numbers(target)]
    for seed in range(5):
        randomise(model, seed)
        seen.append(numbers(model))
        soft_update(target, model, tau, buffers=buffers)
    return target, model, seen


def expected(tau: float, seen: list, name: str) -> np.ndarray:
    weights = oracle.of_weights(lambda count, steps: tau)([1] * (len(seen) - 1))
    return oracle.average(weights, [values[name] for values in seen])


def values_of(model: nn.Module) -> set[float]:
    return {value for parameter in model.parameters() for value in parameter.flatten().tolist()}


# ---- values


@pytest.mark.parametrize("tau", [0.005, 0.3, 0.999])
def test_parameters_follow_as_the_weighted_sum_says(tau):
    target, model, seen = follow(tau)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        np.testing.assert_allclose(
            target.get_parameter(name).detach().double(), expected(tau, seen, name), rtol=FLOAT32, atol=4 * FLOAT32
        )
        assert parameter.dtype == torch.float32


@DTYPES
def test_the_values_are_those_of_the_loop_of_lerp(dtype):
    model = nn.ParameterList([torch.randn(3, 2, dtype=dtype), torch.randn(5, dtype=dtype)])
    target, other = (nn.ParameterList([torch.randn_like(each) for each in model]) for _ in range(2))
    for mine, its in zip(other, target, strict=True):
        mine.data.copy_(its)
    soft_update(target, model, TAU)
    with torch.no_grad():
        for mine, its in zip(other, model, strict=True):
            mine.lerp_(its, TAU)
    assert parameters_of(target) == parameters_of(other)


def test_a_constant_is_a_fixed_point():
    model = Net()
    target = copy.deepcopy(model)
    with unchanged(target, model):
        soft_update(target, model, TAU)


def test_it_is_an_ema_that_starts_with_what_init_saw():
    model = Net()
    target, averaged = copy.deepcopy(model), AveragedModel(model, rule=EMA(Constant(1 - 0.25)))
    for seed in range(4):
        randomise(model, seed)
        soft_update(target, model, 0.25)
        averaged.update_parameters(model)
    assert parameters_of(target) == parameters_of(averaged.module)


@pytest.mark.parametrize("tau", [1, 1.0, np.float64(1.0), torch.tensor(1.0), torch.tensor(True)], ids=repr)
def test_a_tau_of_exactly_1_copies_bit_by_bit(tau):
    """Nothing of the target is left, NaN and infinity among it."""
    model, target = scalar(0.1), scalar(float("nan"))
    model.register_parameter("large", nn.Parameter(torch.tensor([1e30, 0.1])))
    target.register_parameter("large", nn.Parameter(torch.tensor([float("inf"), 3e30])))
    soft_update(target, model, tau)
    assert parameters_of(target) == parameters_of(model)


@pytest.mark.parametrize("tau", [0, 0.0, torch.tensor(0.0)], ids=repr)
def test_a_tau_of_exactly_0_leaves_the_parameters_as_they_are(tau):
    """Also where the model has a NaN."""
    model, target = scalar(float("nan")), scalar(0.1)
    with unchanged(target):
        soft_update(target, model, tau)


@pytest.mark.parametrize("tau", [np.float32(0.25), torch.tensor(0.25), torch.tensor(0.25, dtype=torch.float64)])
def test_tau_may_be_any_number_or_0d_tensor(tau):
    model, target = scalar(1.0), scalar(0.0)
    soft_update(target, model, tau)
    assert target.weight.item() == 0.25


# ---- low precision


@pytest.mark.parametrize("tau", [0.005, 0.3])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_a_float32_target_follows_a_low_precision_model_in_float32(low, tau):
    model = nn.Linear(3, 3).to(low)
    target = copy.deepcopy(model).float()
    seen = [numbers(target)]
    for seed in range(20):
        randomise(model, seed)
        seen.append(numbers(model))
        soft_update(target, model, tau)
    for name, parameter in target.named_parameters():
        assert parameter.dtype == torch.float32
        np.testing.assert_allclose(
            parameter.detach().double(), expected(tau, seen, name), rtol=FLOAT32, atol=4 * FLOAT32
        )


def test_a_bfloat16_target_stops_where_its_steps_are_rounded_away():
    """Up to ``target / (256 tau)`` away from the model, as documented; a master copy goes on."""
    model, target = scalar(1.0, torch.bfloat16), scalar(1.0, torch.bfloat16)
    averaged = AveragedModel(target, rule=EMA(0.99, start="init"))
    fill(model, 1.25)
    with unchanged(target):
        soft_update(target, model, 0.01)  # 0.0025 is less than half of 2^-7
    fill(model, 1.5)
    soft_update(target, model, 0.01)  # 0.005 is more
    assert target.weight.item() == 1.0 + 2.0**-7
    fill(model, 1.25)
    averaged.update_parameters(model)
    assert averaged.state.average["weight"].item() == pytest.approx(1.0025)


def test_a_step_in_low_precision_is_rounded_once():
    model, target = nn.Linear(16, 16, dtype=torch.bfloat16), nn.Linear(16, 16, dtype=torch.bfloat16)
    wanted = target.weight.double() + TAU * (model.weight.double() - target.weight.double())
    soft_update(target, model, TAU)
    error = (target.weight.double() - wanted).abs()
    assert (error <= wanted.abs() * 2.0**-8 * 1.01 + 1e-6).all()


# ---- buffers


class Statistics(nn.Module):
    """A parameter, and buffers of all kinds."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("ids", torch.arange(3))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)


@pytest.mark.parametrize("buffers", ["copy", "average", "keep"])
def test_buffers_are_copied_averaged_or_kept(buffers):
    target, _, seen = follow(TAU, buffers=buffers, model=Statistics())
    for name, buffer in tensors(target).items():
        if isinstance(buffer, nn.Parameter):
            continue
        if buffers == "average" and name in target.state_dict() and buffer.is_floating_point():
            np.testing.assert_allclose(buffer.double(), expected(TAU, seen, name), rtol=FLOAT32, atol=4 * FLOAT32)
        else:
            kept = seen[0] if buffers == "keep" else seen[-1]
            np.testing.assert_array_equal(buffer, kept[name])


def test_buffers_are_copied_by_default():
    model = nn.BatchNorm1d(2)
    target = copy.deepcopy(model)
    model(torch.randn(8, 2))
    soft_update(target, model, 0.0)
    assert torch.equal(target.running_mean, model.running_mean)
    assert target.num_batches_tracked == 1


def test_vectors_of_a_spectral_norm_are_copied():
    """The mean of two of them would belong to no weight."""
    model = parametrizations.spectral_norm(nn.Linear(3, 3))
    target = copy.deepcopy(model)
    model(torch.randn(2, 3))
    soft_update(target, model, 0.5, buffers="average")
    assert torch.equal(target.parametrizations.weight[0]._u, model.parametrizations.weight[0]._u)


def test_a_buffer_that_was_resized_replaces_that_of_the_target_unless_it_keeps_its_own():
    model = scalar(1.0)
    model.register_buffer("memory", torch.zeros(2))
    target = copy.deepcopy(model)
    model.register_buffer("memory", torch.ones(3))
    model.register_buffer("new", torch.ones(1), persistent=False)
    soft_update(target, model, 0.5, buffers="keep")
    assert target.memory.shape == (2,)
    assert not hasattr(target, "new")
    soft_update(target, model, 0.5)
    assert target.memory.tolist() == [1.0, 1.0, 1.0]
    assert target.memory is not model.memory
    assert target.new.tolist() == [1.0]
    assert "new" not in target.state_dict()


# ---- kinds of modules


@pytest.mark.parametrize("frozen", [True, False])
def test_a_target_may_require_a_gradient_or_not_and_gets_none(frozen):
    model = nn.Linear(2, 1)
    target = copy.deepcopy(model).requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        inputs = torch.randn(4, 2)
        loss = (model(inputs) - target(inputs).detach()).square().mean() + model(inputs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        soft_update(target, model, TAU)
    for parameter in target.parameters():
        assert parameter.requires_grad is not frozen
        assert parameter.is_leaf
        assert parameter.grad is None


def test_a_step_is_seen_by_autograd():
    """A graph that still needs the old target says so, instead of computing with the new one."""
    model, target = scalar(1.0), scalar(0.0)
    x = torch.ones(1, requires_grad=True)
    loss = target(x).square().sum()
    soft_update(target, model, TAU)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_target_made_in_inference_mode_follows():
    model = scalar(1.0)
    with torch.inference_mode():
        target = scalar(0.0)
        soft_update(target, model, 0.25)
    soft_update(target, model, 0.25)
    assert target.weight.is_inference()
    assert target.weight.item() == 0.4375


def test_a_step_in_inference_mode_leaves_ordinary_tensors():
    model = Net()
    target = copy.deepcopy(model)
    model.register_buffer("new", torch.ones(1))
    with torch.inference_mode():
        soft_update(target, model, TAU)
    assert not any(tensor.is_inference() for tensor in tensors(target).values())


def test_wrappers_are_seen_through_on_both_sides():
    model, target = Net(), Net()
    fill(model, 1.0)
    fill(target, 0.0)
    with alone():
        soft_update(torch.compile(target, backend="eager"), nn.parallel.DistributedDataParallel(model), 0.25)
    assert values_of(target) == {0.25}


def test_compiled_code_computes_with_the_new_target():
    model, target = scalar(1.0), scalar(0.0)
    compiled = torch.compile(target, backend="eager")
    with torch.no_grad():
        assert compiled(torch.ones(1)).item() == 0.0
        soft_update(compiled, model, 0.25)
        assert compiled(torch.ones(1)).item() == 0.25


def test_cached_parametrizations_are_computed_anew():
    model = parametrizations.weight_norm(nn.Linear(2, 2))
    target = parametrizations.weight_norm(nn.Linear(2, 2))
    with parametrize.cached(), torch.no_grad():
        before = target.weight.clone()
        soft_update(target, model, 0.5)
        assert not torch.equal(target.weight, before)


def test_tied_parameters_move_once_and_stay_tied():
    target, _, _ = follow(TAU)
    assert target.hidden[1].weight is target.inputs.weight
    model, target = Net(), Net()
    fill(model, 1.0)
    fill(target, 0.0)
    soft_update(target, model, 0.25)
    assert values_of(target) == {0.25}


def test_parameters_are_paired_by_name_whatever_their_order():
    model, target = nn.Module(), nn.Module()
    for module, names in ((model, "ab"), (target, "ba")):
        for name in names:
            setattr(module, name, scalar(0.0))
    fill(model.a, 1.0)
    soft_update(target, model, 0.25)
    assert (target.a.weight.item(), target.b.weight.item()) == (0.25, 0.0)


def test_parameters_that_were_assigned_anew_are_followed():
    model, target = scalar(0.0), scalar(0.0)
    soft_update(target, model, 0.25)
    model.weight = nn.Parameter(torch.ones(1, 1))
    soft_update(target, model, 0.25)
    target.weight = nn.Parameter(torch.full((1, 1), 0.5))
    soft_update(target, model, 0.5)
    assert target.weight.item() == 0.75


def test_a_frozen_part_that_both_hold_stays_as_it_is():
    trunk = scalar(0.1).requires_grad_(False)
    model, target = nn.Sequential(trunk, scalar(1.0)), nn.Sequential(trunk, scalar(0.0))
    before = bits(trunk.weight)
    soft_update(target, model, 0.25)
    assert bits(trunk.weight) == before
    assert target[1].weight.item() == 0.25


@pytest.mark.parametrize("evaluated", ["target", "model", "both", "neither"])
def test_layers_that_merge_weights_in_eval_mode_move_apart(evaluated):
    """As LoRA layers do: what is merged is no weight that is trained. Modes stay as they are."""
    model, target = nn.Sequential(WithFlag(), scalar(1.0)), nn.Sequential(WithFlag(), scalar(0.0))
    nn.init.constant_(model[0].a, 3.0)
    model.train(evaluated not in ("model", "both"))
    target.train(evaluated not in ("target", "both"))
    modes = [part.training for part in target.modules()]
    soft_update(target, model, 0.5)
    assert [part.training for part in target.modules()] == modes
    target.train()
    assert target[0].a.tolist() == [[2.0, 2.0]]
    assert target[0].weight.tolist() == [[4.0, 4.0], [4.0, 4.0]]
    assert target[1].weight.item() == 0.5


# ---- lists


def test_critics_move_in_one_call():
    critics = [Net(), Net()]
    targets = [copy.deepcopy(critic) for critic in critics]
    for seed, critic in enumerate(critics):
        randomise(critic, seed)
    wanted = copy.deepcopy(targets)
    for one, critic in zip(wanted, critics, strict=True):
        soft_update(one, critic, TAU)
    soft_update(targets, tuple(critics), TAU)
    assert [parameters_of(target) for target in targets] == [parameters_of(one) for one in wanted]


def test_a_module_list_is_a_module_like_any():
    critics, targets = nn.ModuleList([scalar(1.0), scalar(1.0)]), nn.ModuleList([scalar(0.0), scalar(0.0)])
    soft_update(targets, critics, 0.25)
    assert values_of(targets) == {0.25}


def test_an_encoder_that_the_critics_share_moves_once():
    def critics(value):
        encoder = scalar(value)
        return [nn.Sequential(encoder, scalar(value)), nn.Sequential(encoder, scalar(value))]

    targets = critics(0.0)
    soft_update(targets, critics(1.0), 0.25)
    assert {value for target in targets for value in values_of(target)} == {0.25}


def test_of_a_list_all_move_or_none():
    targets, critics = [scalar(0.0), nn.Linear(2, 1)], [scalar(1.0), nn.Linear(3, 1)]
    with unchanged(*targets), pytest.raises(ValueError, match=r"1\.weight'\]: expected shape \(1, 2\), got \(1, 3\)"):
        soft_update(targets, critics, TAU)


def test_stacks_of_vmap_move_by_lerp():
    """Ensembles for ``torch.func.vmap`` are stacked tensors by name."""
    critics = [scalar(1.0), scalar(2.0)]
    params, _ = torch.func.stack_module_state(critics)
    target = {name: torch.zeros_like(stack) for name, stack in params.items()}
    target = functavg.lerp(target, params, 0.25, inplace=True)
    assert target["weight"].flatten().tolist() == [0.25, 0.5]


# ---- errors; nothing changes


@pytest.mark.parametrize(
    ("tau", "message"),
    [
        (-0.1, r"tau must be in \[0, 1\], got -0.1"),
        (1.1, r"tau must be in \[0, 1\], got 1.1"),
        (float("nan"), "tau must be finite, got nan"),
        (float("inf"), "tau must be finite, got inf"),
        (None, "tau must be a real number or a 0-d array, got None of NoneType"),
        ("0.1", "tau must be a real number or a 0-d array, got '0.1' of str"),
        (torch.ones(1), "tau must be a real number or a 0-d array"),
        (1j, "tau must be a real number or a 0-d array"),
    ],
)
def test_a_wrong_tau_is_refused(tau, message):
    model, target = scalar(1.0), scalar(0.0)
    with unchanged(target), pytest.raises((TypeError, ValueError), match=message):
        soft_update(target, model, tau)


@pytest.mark.parametrize("buffers", ["sync", True, None])
def test_a_wrong_choice_of_buffers_is_refused(buffers):
    message = re.escape(f"buffers must be one of 'copy', 'average', 'keep', got {buffers!r}")
    with pytest.raises(ValueError, match=message):
        soft_update(scalar(), scalar(), TAU, buffers=buffers)


@pytest.mark.parametrize(
    ("target", "model", "message"),
    [
        (scalar().state_dict(), scalar(), "target must be a torch.nn.Module or a list of them, got OrderedDict"),
        (scalar(), None, "model must be a torch.nn.Module or a list of them, got NoneType"),
        (scalar(), "net", "model must be a torch.nn.Module or a list of them, got str"),
        ([scalar()], [torch.ones(1)], "model must be a torch.nn.Module or a list of them, got list of 1"),
        (scalar(), 0.1, "model must be a torch.nn.Module or a list of them, got float"),
    ],
)
def test_what_is_no_module_is_refused(target, model, message):
    with pytest.raises(TypeError, match=message):
        soft_update(target, model, TAU)


@pytest.mark.parametrize(
    ("target", "model", "got"),
    [
        ([scalar()], [scalar(), scalar()], "got list of 1 as target and list of 2 as model"),
        (scalar(), [scalar()], "got Linear as target and list of 1 as model"),
    ],
)
def test_lists_of_other_lengths_are_refused(target, model, got):
    with pytest.raises(ValueError, match=f"expected two modules, or two lists of as many, {got}"):
        soft_update(target, model, TAU)


def test_a_target_that_is_the_model_is_refused():
    model = Net()
    shallow = copy.copy(model)
    for target in (model, torch.compile(model, backend="eager"), shallow):
        with unchanged(model), pytest.raises(ValueError, match="the target is the model, or holds its parameters"):
            soft_update(target, model, TAU)
    with pytest.raises(ValueError, match="the target is the model, or holds its parameters"):
        soft_update([model, model], [model, model], TAU)


def test_other_names_are_refused_and_spelled():
    target, model = nn.Sequential(scalar(), scalar()), nn.Sequential(scalar())
    message = (
        r"the model does not have the parameters of the target: missing 1\.weight; unexpected nothing\. "
        r"Make the target as a copy\.deepcopy of the model"
    )
    with unchanged(target), pytest.raises(ValueError, match=message):
        soft_update(target, model, TAU)
    with unchanged(model), pytest.raises(ValueError, match=r"missing nothing; unexpected 1\.weight"):
        soft_update(model, target, TAU)


def test_other_shapes_are_refused_before_anything_is_written():
    target, model = nn.Sequential(scalar(), nn.BatchNorm1d(2)), nn.Sequential(scalar(1.0), nn.BatchNorm1d(3))
    with unchanged(target), pytest.raises(ValueError, match=r"1\.weight'\]: expected shape \(2,\), got \(3,\)"):
        soft_update(target, model, TAU)


def test_parameters_tied_in_the_target_alone_are_refused():
    target, model = nn.Sequential(scalar(), scalar()), nn.Sequential(scalar(1.0), scalar(2.0))
    target[1].weight = target[0].weight
    with unchanged(target), pytest.raises(ValueError, match=r"0\.weight'\] and tree\['1\.weight'\] share one array"):
        soft_update(target, model, TAU)


@pytest.mark.parametrize("buffers", ["copy", "average", "keep"])
def test_what_has_no_values_is_refused(buffers):
    target = Statistics()
    with (
        unchanged(target),
        pytest.raises(TypeError, match=r"norm\.weight'\]: expected a tensor with values, got .*meta"),
    ):
        soft_update(target, Statistics().to("meta"), TAU, buffers=buffers)


def test_lazy_parameters_are_refused_by_name():
    message = r"weight'\]: expected a dense tensor, got an uninitialised \(lazy\) parameter"
    for target, model in ((nn.LazyLinear(2), nn.Linear(2, 2)), (nn.Linear(2, 2), nn.LazyLinear(2))):
        with pytest.raises(TypeError, match=message):
            soft_update(target, model, TAU)


def test_a_buffer_without_values_is_refused_before_parameters_are_written():
    model, target = scalar(1.0), scalar(0.0)
    model.register_buffer("new", torch.ones(1, device="meta"))
    with unchanged(target), pytest.raises(TypeError, match="the model's buffer new is on the meta device"):
        soft_update(target, model, TAU)


def test_it_is_exported_lazily():
    assert functavg.soft_update is soft_update
    assert "soft_update" in functavg.__all__
