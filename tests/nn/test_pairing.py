"""Which tensor goes into which: by name, through wrappers, never from memory; what does not fit changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize

import functavg
from functavg import EMA, AveragedModel
from functavg.combinators import Several
from functavg.rules.lawa import LAWA
from tests import oracle
from tests.nn.helpers import (
    Course,
    Net,
    all_values,
    alone,
    bits,
    contents,
    fill,
    quarter,
    randomise,
    scalar,
    tensors,
    unchanged,
)

# Weight rules may pair without names, functions and memories may not, low precision has values beside.
RULES = {
    "EMA": lambda: {"rule": EMA(0.75)},
    "avg_fn": lambda: {"avg_fn": functavg.AvgFn(lambda average, new, count: 0.75 * average + 0.25 * new).fn},
    "Several": lambda: {"rule": Several({"first": EMA(0.75), "second": LAWA(2)})},
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
BY_RULE = pytest.mark.parametrize("rule", RULES)


# ---- names


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight


@DTYPES
@BY_RULE
def test_tied_weights_are_averaged_once_and_stay_tied(rule, dtype):
    model = Tied().to(dtype)
    averaged = AveragedModel(model, **RULES[rule]())
    fill(model, 0.0)
    averaged.update_parameters(model)
    fill(model, 1.0)
    averaged.update_parameters(model)
    assert averaged.module.head.weight is averaged.module.embedding.weight
    assert all_values(averaged) == {0.25}


@DTYPES
def test_a_shared_module_is_averaged_once_and_stays_shared(dtype):
    layer = scalar(0.0, dtype)
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer), "c": scalar(0.0, dtype)})
    averaged = quarter(model)
    averaged.update_parameters(model)
    assert averaged.module["a"] is averaged.module["b"][0]
    assert all_values(averaged) == {0.25}


@pytest.mark.parametrize("use_buffers", [True, False])
@BY_RULE
def test_tensors_are_paired_by_name_whatever_their_order(rule, use_buffers):
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(0.0))
    model.first, model.second = scalar(), scalar()
    other = nn.Module()
    other.second, other.first = scalar(2.0), scalar(1.0)
    other.b, other.a = nn.Parameter(torch.tensor(4.0)), nn.Parameter(torch.tensor(3.0))
    for module in (model, other):
        module.register_buffer("x" if module is model else "y", torch.tensor(0.0))
        module.register_buffer("y" if module is model else "x", torch.tensor(0.0))
    other.x.fill_(5.0)
    other.y.fill_(6.0)
    averaged = AveragedModel(model, use_buffers=use_buffers, **RULES[rule]())
    averaged.update_parameters(other)
    mine = averaged.module
    assert (mine.a.item(), mine.b.item(), mine.first.weight.item(), mine.second.weight.item()) == (3.0, 4.0, 1.0, 2.0)
    assert (mine.x.item(), mine.y.item()) == (5.0, 6.0)


def test_children_are_not_taken_for_parameters_of_other_modules():
    """Two models that spell the same names in the same order, at other places."""

    class Part(nn.Module):
        def __init__(self, **parts):
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

    def weight():
        return nn.Parameter(torch.ones(1))

    averaged = AveragedModel(Part(p=Part(x=Part(w=weight())), q=Part()), rule=EMA(0.5))
    with unchanged(averaged), pytest.raises(ValueError, match=r"missing p\.x\.w; unexpected q\.x"):
        averaged.update_parameters(Part(p=Part(), q=Part(x=weight(), w=Part())))


def test_containers_and_optional_parts_of_models_are_paired():
    model = nn.Module()
    model.list = nn.ParameterList([torch.zeros(2), torch.zeros(())])
    model.dict = nn.ParameterDict({"b": torch.zeros(2), "a": torch.zeros(1)})
    model.empty = nn.Parameter(torch.zeros(0))
    model.modules_by_name = nn.ModuleDict({"x": scalar()})
    model.register_module("no_module", None)
    model.register_parameter("no_parameter", None)
    model.register_buffer("no_buffer", None)
    averaged = quarter(model)
    averaged.update_parameters(model)
    assert all_values(averaged) == {0.25}
    assert averaged.module.no_buffer is None


def test_a_parameter_that_is_none_may_become_one_only_in_both():
    model = scalar()
    model.register_parameter("later", None)
    averaged = quarter(model)
    model.later = nn.Parameter(torch.zeros(1))
    with unchanged(averaged), pytest.raises(ValueError, match="unexpected later"):
        averaged.update_parameters(model)
    averaged.module.later = nn.Parameter(torch.zeros(1))
    averaged.update_parameters(model)
    assert averaged.module.later.item() == 0.0


# ---- wrappers


def compiled_blocks(model):
    model.inputs = torch.compile(model.inputs, backend="eager")
    return model


def checkpointed_blocks(model):
    model.inputs = checkpoint_wrapper(model.inputs)
    model.hidden[0] = checkpoint_wrapper(model.hidden[0])
    return model


WRAPPERS = {
    "compile": lambda model: torch.compile(model, backend="eager"),
    "compiled blocks": compiled_blocks,
    "DataParallel": nn.DataParallel,
    "checkpoint_wrapper": checkpoint_wrapper,
    "checkpointed blocks": checkpointed_blocks,
    "several": lambda model: torch.compile(nn.DataParallel(checkpointed_blocks(model)), backend="eager"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@DTYPES
@BY_RULE
def test_a_model_may_be_wrapped_before_or_after_the_average_is_made(rule, dtype, wrapper):
    plain = Net().to(dtype)
    keys = {"n_averaged", *(f"module.{key}" for key in plain.state_dict())}
    after = AveragedModel(plain, **RULES[rule]())
    wrapped = WRAPPERS[wrapper](copy.deepcopy(plain))
    before = AveragedModel(wrapped, **RULES[rule]())
    for seed in range(3):
        randomise(plain, seed)
        randomise(wrapped, seed)  # sorted by name, the same values
        with torch.no_grad():
            for mine, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
                mine.copy_(theirs)
        for averaged in (after, before):
            averaged.update_parameters(wrapped)
            averaged.update_parameters(plain)
    for averaged in (after, before):
        assert set(averaged.state_dict()) - {"_extra_state"} == keys
        assert averaged(torch.zeros(2, 3, dtype=dtype)).shape == (2, 3)
        assert not any(isinstance(module, torch._dynamo.OptimizedModule) for module in averaged.modules())
    assert [bits(p) for p in after.parameters()] == [bits(p) for p in before.parameters()]
    after.load_state_dict(before.state_dict())


def test_a_distributed_model_is_averaged_as_the_model_inside():
    model = Net()
    with alone():
        parallel = DistributedDataParallel(model)
        averages = [AveragedModel(model, rule=EMA(0.75)), AveragedModel(parallel, rule=EMA(0.75))]
        for averaged in averages:
            assert set(averaged.state_dict()) == {"n_averaged", *(f"module.{key}" for key in model.state_dict())}
            course = Course(averaged, model, oracle.ema(0.75))
            course.go(1)
            parallel(torch.randn(4, 3)).sum().backward()
            fill(model, 1.0)
            before = {n: p.clone() for n, p in averaged.module.named_parameters()}
            averaged.update_parameters(parallel)
            for name, parameter in averaged.module.named_parameters():
                torch.testing.assert_close(parameter, before[name] * 0.75 + 0.25)
            with functavg.swapped(parallel, averaged):
                assert torch.equal(model.inputs.bias, averaged.module.inputs.bias)
            averaged.copy_to(parallel)
            assert torch.equal(model.inputs.bias, averaged.module.inputs.bias)


def test_an_attribute_named_as_in_a_wrapper_is_no_wrapper():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = scalar()
            self._orig_mod = scalar()
            self._checkpoint_wrapped_module = scalar()

    model = Holder()
    averaged = quarter(model)
    averaged.update_parameters(model)
    assert len(list(averaged.module.parameters())) == 3
    assert all_values(averaged) == {0.25}


def fsdp1(model):
    """Return what looks like an FSDP1 model; a real one needs an accelerator."""
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper._fsdp_wrapped_module = model
    return wrapper


@DTYPES
def test_fsdp1_is_refused_at_any_depth(dtype):
    with pytest.raises(TypeError, match=r"\(FSDP1\).*fully_shard \(FSDP2\).*summon_full_params"):
        AveragedModel(fsdp1(scalar()))
    with pytest.raises(TypeError, match="FSDP1"):
        AveragedModel(nn.Sequential(fsdp1(scalar())))
    averaged = quarter(nn.Sequential(scalar(0.0, dtype)))
    for model in (fsdp1(scalar()), nn.Sequential(fsdp1(scalar(1.0, dtype)))):
        with unchanged(averaged), pytest.raises(TypeError, match="FSDP1"):
            averaged.update_parameters(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:FutureWarning")
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("use_buffers", [True, False])
def test_scripted_models_are_averaged_as_torch_does(use_buffers, whole):
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model = model if whole else nn.Sequential(*model.children())
    averaged = AveragedModel(model, rule=EMA(0.75), use_buffers=use_buffers)
    for value in (0.0, 1.0):
        fill(model, value)
        model(torch.randn(4, 2))
        averaged.update_parameters(model)
    assert all_values(averaged) == {0.25}
    assert averaged.module.state_dict()["1.num_batches_tracked"].item() == 2


def test_a_traced_graph_is_averaged():
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    averaged = quarter(model)
    averaged.update_parameters(model)
    assert all_values(averaged) == {0.25}


# ---- what does not fit


def reshaped(model):
    model.inputs.bias = nn.Parameter(torch.zeros(1))


def emptied(model):
    model.inputs.bias.data = torch.zeros(0)


def lazy(model):
    model.inputs.bias = nn.UninitializedParameter()


def sparse(model):
    model.inputs.bias = nn.Parameter(torch.zeros(3).to_sparse())


def complex_(model):
    model.inputs.bias = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


def buffer_instead(model):
    del model.scale
    model.register_buffer("scale", torch.ones(()))


def untied(model):
    model.hidden[1].weight = nn.Parameter(torch.zeros(3, 3))


def renamed(model):
    model.input = model.inputs
    del model.inputs


def parametrized(model):
    parametrizations.weight_norm(model.inputs)


def buffer_of_another_shape(model):
    model.norm.register_buffer("running_mean", torch.zeros(4))


def complex_buffer(model):
    model.norm.register_buffer("running_mean", torch.zeros(3, dtype=torch.complex64))


def sparse_buffer(model):
    model.norm.register_buffer("running_mean", torch.zeros(3).to_sparse())


MISFITS = {
    "an extra parameter": (
        lambda model: model.register_parameter("extra", nn.Parameter(torch.zeros(1))),
        ValueError,
        "missing nothing; unexpected extra. Update from the model that the average was made of",
    ),
    "an extra layer": (
        lambda model: model.add_module("more", nn.Linear(1, 1)),
        ValueError,
        r"missing nothing; unexpected more\.weight, more\.bias",
    ),
    "a missing parameter": (lambda model: delattr(model, "scale"), ValueError, "missing scale; unexpected nothing"),
    "a missing layer": (
        lambda model: delattr(model, "hidden"),
        ValueError,
        r"missing hidden\.0\.weight, hidden\.0\.bias, hidden\.1\.(weight, hidden\.1\.)?bias; unexpected nothing",
    ),
    "a renamed layer": (renamed, ValueError, r"missing inputs\.weight, inputs\.bias; unexpected input\.weight"),
    "a parametrization": (
        parametrized,
        ValueError,
        r"missing inputs\.weight; unexpected inputs\.parametrizations\.weight\.original0",
    ),
    "a buffer for a parameter": (buffer_instead, ValueError, "missing scale; unexpected nothing"),
    "another shape": (reshaped, ValueError, r"inputs\.bias.*expected shape \(3,\), got \(1,\); nothing is broadcast"),
    "size 0": (emptied, ValueError, r"inputs\.bias.*got \(0,\).*partitioned away, gather it first"),
    "lazy": (lazy, TypeError, r"inputs\.bias.*uninitialised \(lazy\).*run one forward pass"),
    "sparse": (sparse, TypeError, r"inputs\.bias.*layout torch.sparse_coo"),
    "complex for real": (complex_, TypeError, r"inputs\.bias.*expected torch.float32.*got torch.complex64"),
    "untied": (
        untied,
        ValueError,
        r"inputs\.weight.*and.*hidden\.1\.weight.*share one array in the average.*a new AveragedModel",
    ),
}
MISFIT_BUFFERS = {
    "another shape": (buffer_of_another_shape, ValueError, r"norm\.running_mean.*expected shape \(3,\), got \(4,\)"),
    "complex": (complex_buffer, TypeError, r"norm\.running_mean.*got torch.complex64"),
    "sparse": (sparse_buffer, TypeError, r"norm\.running_mean.*layout torch.sparse_coo"),
}
STEPS = {
    0: (ValueError, "steps must be an integer of at least 1, got 0"),
    -1: (ValueError, "steps must be an integer of at least 1, got -1"),
    1.5: (TypeError, "steps must be an integer.*got 1.5"),
    True: (TypeError, "steps must be an integer.*got True"),
    "1": (TypeError, "steps must be an integer.*got '1'"),
}


def well_averaged(rule, dtype, **arguments):
    model = Net().to(dtype)
    averaged = AveragedModel(model, **RULES[rule](), **arguments)
    for seed in range(2):
        randomise(model, seed)
        averaged.update_parameters(model)
    return averaged, model


@pytest.mark.parametrize("misfit", MISFITS)
@DTYPES
@BY_RULE
def test_a_model_that_does_not_fit_is_refused_by_name_and_changes_nothing(rule, dtype, misfit):
    averaged, model = well_averaged(rule, dtype)
    broken = copy.deepcopy(model)
    randomise(broken, 7)
    spoil, error, message = MISFITS[misfit]
    spoil(broken)
    for _ in range(2):
        with unchanged(averaged), pytest.raises(error, match=message):
            averaged.update_parameters(broken)
    averaged.update_parameters(model)
    assert averaged.n_averaged.item() == 3


@pytest.mark.parametrize("misfit", MISFIT_BUFFERS)
@DTYPES
@BY_RULE
def test_averaged_buffers_that_do_not_fit_are_refused_and_change_nothing(rule, dtype, misfit):
    averaged, model = well_averaged(rule, dtype, use_buffers=True)
    broken = copy.deepcopy(model)
    randomise(broken, 7)
    spoil, error, message = MISFIT_BUFFERS[misfit]
    spoil(broken)
    for _ in range(3):
        with unchanged(averaged), pytest.raises(error, match=message):
            averaged.update_parameters(broken)
    averaged.update_parameters(model)
    assert averaged.n_averaged.item() == 3


@pytest.mark.parametrize("steps", STEPS)
@DTYPES
@BY_RULE
def test_steps_that_are_none_are_refused_and_change_nothing(rule, dtype, steps):
    averaged, model = well_averaged(rule, dtype)
    error, message = STEPS[steps]
    with unchanged(averaged, model), pytest.raises(error, match=message):
        averaged.update_parameters(model, steps=steps)


def test_a_callable_decay_that_fails_changes_nothing():
    averaged, model = well_averaged("EMA", torch.bfloat16)
    averaged._rule = EMA(lambda u: 2.0)
    with unchanged(averaged), pytest.raises(ValueError, match="decay"):
        averaged.update_parameters(model)


def test_long_lists_of_names_are_cut():
    with pytest.raises(ValueError, match=r"unexpected 0\.weight, .*7\.weight and 12 more"):
        AveragedModel(nn.Sequential()).update_parameters(nn.Sequential(*(scalar() for _ in range(20))))


def test_an_average_of_two_parameters_takes_one_tied_parameter():
    """Tying the model later is no error: each of the two averages goes on to the one value."""
    model = nn.ModuleList([scalar(), scalar()])
    averaged = quarter(model)
    model[1].weight = model[0].weight
    averaged.update_parameters(model)
    assert all_values(averaged) == {0.25}


# ---- nothing is remembered


def first_average(averaged):
    """Return copies of the values of the average, of the first one where there are several."""
    average = averaged.state.average
    return {name: value.clone() for name, value in average.get("first", average).items()}


def assign_parameter(model):
    model.inputs.weight = model.hidden[1].weight = nn.Parameter(torch.ones_like(model.inputs.weight))


def assign_state(model):
    state = {key: torch.ones_like(value) for key, value in model.state_dict().items()}
    state["hidden.1.weight"] = state["inputs.weight"] = nn.Parameter(state["inputs.weight"])
    model.load_state_dict(state, assign=True)


def swap_submodule(model):
    model.hidden[0] = nn.Linear(3, 3, dtype=model.scale.dtype)


def freeze(model):
    model.requires_grad_(False)
    model.scale.requires_grad_(True)


def set_data(model):
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter).t() if parameter.ndim == 2 else torch.zeros_like(parameter)


CHANGES = {
    "a parameter assigned anew": assign_parameter,
    "load_state_dict(assign=True)": assign_state,
    "a swapped submodule": swap_submodule,
    "requires_grad": freeze,
    ".data": set_data,
    "float16": lambda model: model.half(),
    "float64": lambda model: model.double(),
    "backward": lambda model: model(torch.randn(4, 3).to(model.scale.dtype)).sum().backward(),
    "zero_grad": lambda model: model.zero_grad(),
    "eval": lambda model: model.eval(),
    "a deleted buffer": lambda model: delattr(model, "cache"),
}


@pytest.mark.parametrize("change", CHANGES)
@DTYPES
@BY_RULE
def test_what_changed_in_the_model_is_seen_by_the_next_update(rule, dtype, change):
    averaged, model = well_averaged(rule, dtype)
    before = first_average(averaged)
    CHANGES[change](model)
    fill(model, 3.0)
    model.norm.running_mean.fill_(5.0)
    averaged.update_parameters(model)
    for name, value in first_average(averaged).items():
        torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * 3.0, rtol=1e-6, atol=1e-6)
    assert averaged.module.norm.running_mean.tolist() == [5.0] * 3


CHANGES_OF_THE_AVERAGE = {
    "a parameter assigned anew": assign_parameter,
    "load_state_dict(assign=True)": assign_state,
    "a swapped submodule": swap_submodule,
    "requires_grad": freeze,
    ".data": set_data,
    "in place": lambda module: fill(module, 1.0),
    "reset_parameters": lambda module: module.inputs.reset_parameters(),
    "vector_to_parameters": lambda module: nn.utils.vector_to_parameters(
        torch.ones(sum(p.numel() for p in module.parameters()), dtype=module.scale.dtype), module.parameters()
    ),
    "apply": lambda module: module.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None),
    "load_state_dict": lambda module: module.load_state_dict(
        {k: torch.ones_like(v) for k, v in module.state_dict().items()}
    ),
}


@pytest.mark.parametrize("change", CHANGES_OF_THE_AVERAGE)
@DTYPES
@BY_RULE
def test_the_average_goes_on_from_what_its_module_was_given_by_hand(rule, dtype, change):
    averaged, model = well_averaged(rule, dtype)
    before = first_average(averaged)
    given = averaged.module.named_parameters(remove_duplicate=False)
    kept = {name: (parameter, bits(parameter)) for name, parameter in given}
    CHANGES_OF_THE_AVERAGE[change](averaged.module)
    for name, parameter in averaged.module.named_parameters(remove_duplicate=False):
        if parameter is not kept[name][0] or bits(parameter) != kept[name][1]:
            before[name] = parameter.detach().float().clone()
    fill(model, 3.0)
    averaged.update_parameters(model)
    after = first_average(averaged)
    for name, value in before.items():
        torch.testing.assert_close(after[name], 0.75 * value + 0.25 * 3.0, rtol=1e-6, atol=1e-6)


@DTYPES
def test_a_shape_changed_in_place_in_both_is_followed(dtype):
    averaged, model = well_averaged("EMA", dtype)
    model.scale.data = torch.zeros(4, dtype=dtype)
    with unchanged(averaged), pytest.raises(ValueError, match=r"scale.*expected shape \(\), got \(4,\)"):
        averaged.update_parameters(model)
    averaged.module.scale.data = torch.full((4,), 2.0, dtype=dtype)
    averaged.update_parameters(model)
    assert averaged.module.scale.tolist() == [1.5] * 4


def test_cached_parametrizations_do_not_stick():
    model = parametrizations.weight_norm(nn.Linear(2, 2))
    averaged = AveragedModel(model, rule=EMA(0.5))
    with parametrize.cached():
        assert model.weight is model.weight
        for seed in range(3):
            randomise(model, seed)
            averaged.update_parameters(model)
    other = AveragedModel(model, rule=EMA(0.5))
    for seed in range(3):
        randomise(model, seed)
        other.update_parameters(model)
    assert contents(averaged) == contents(other)
    assert torch.equal(averaged.module.weight, other.module.weight)


def test_updates_read_the_tensors_of_the_model_and_nothing_else():
    """Averaging leaves the model and its gradients as they are, to the last version."""
    model = Net()
    model(torch.randn(4, 3)).sum().backward()
    versions = {name: tensor._version for name, tensor in tensors(model).items()}
    gradients = {name: bits(parameter.grad) for name, parameter in model.named_parameters()}
    averaged = AveragedModel(model, use_buffers=True)
    with unchanged(model):
        for _ in range(2):
            averaged.update_parameters(model)
    assert {name: tensor._version for name, tensor in tensors(model).items()} == versions
    assert {name: bits(parameter.grad) for name, parameter in model.named_parameters()} == gradients
