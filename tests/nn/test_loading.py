"""A load takes over what fits, says what does not, and changes nothing where it fails."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import functavg
from functavg import EMA, SWA, AveragedModel, swapped
from functavg.combinators import Every, Partition, Several, SkipNonFinite
from functavg.rules.lawa import LAWA
from tests.nn.helpers import (
    EVERY_WAY,
    REMEMBERING,
    bits,
    contents,
    fill,
    is_weight,
    parameters_of,
    randomise,
    scalar,
    unchanged,
)
from tests.nn.test_saving import DTYPES, averaged_net, through_file, train

# ---- another rule


def averaged_scalar(*values, dtype=torch.float32, **arguments):
    """Return a model and its average after an update with each value."""
    model = scalar(values[0] if values else 0.0, dtype)
    averaged = AveragedModel(model, **arguments)
    for value in values:
        fill(model, value)
        averaged.update_parameters(model)
    return averaged, model


def value_of(averaged, *keys):
    average = averaged.state.average
    for key in keys:
        average = average[key]
    return average["weight"].item()


@DTYPES
def test_a_plain_average_goes_on_as_the_first_of_several(dtype):
    """The clocks of all take its count, the others start from its values, and one warning says so."""
    old, _ = averaged_scalar(1.0, 1.0, dtype=dtype, rule=EMA(0.9))
    model = scalar(5.0, dtype)
    averaged = AveragedModel(model, rule=Several({"old": EMA(0.9), "new": EMA(0.99)}))
    with pytest.warns(UserWarning, match=r"written by a rule without memory.*read by Several.*go on") as caught:
        averaged.load_state_dict(through_file(old.state_dict()), strict=False)
    assert len(caught) == 1
    fill(model, 11.0)
    averaged.update_parameters(model)
    assert value_of(averaged, "old") == pytest.approx(2.0)
    assert value_of(averaged, "new") == pytest.approx(1.1)
    assert averaged.n_averaged.item() == 3
    assert [state.count for state in averaged.state.memory.values()] == [3, 3]


NEXT = {
    "LAWA": (LAWA(2), (1.0 + 11.0) / 2),
    "Every": (Every(EMA(0.9), 2), 1.0),
    "Every-start": (Every(EMA(0.9), 1, start=2), 2.0),
    "SkipNonFinite": (SkipNonFinite(EMA(0.9)), 2.0),
    "Partition": (Partition({"weights": EMA(0.9), "rest": SWA()}, is_weight), 2.0),
    "Several-LAWA": (Several({"a": LAWA(4), "b": EMA(0.9)}), (1.0 + 1.0 + 11.0) / 3),
    "EMA": (EMA(0.9), 2.0),
    "SWA": (SWA(), (1.0 + 1.0 + 11.0) / 3),
}


@pytest.mark.parametrize("name", NEXT)
def test_a_plain_average_and_its_count_go_on_under_any_rule(name):
    rule, expected = NEXT[name]
    old, _ = averaged_scalar(1.0, 1.0, rule=EMA(0.9))
    averaged, model = averaged_scalar(rule=rule)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        averaged.load_state_dict(old.state_dict(), strict=False)
    assert len(caught) == (name not in ("EMA", "SWA"))
    assert averaged.n_averaged.item() == averaged.state.count == 2
    assert averaged.module.weight.item() == 1.0
    fill(model, 11.0)
    averaged.update_parameters(model)
    assert averaged.module.weight.item() == pytest.approx(expected)
    assert averaged.n_averaged.item() == (2 if name == "Every" else 3)


SOURCES = ["EMA", "avg_fn", *REMEMBERING]


@DTYPES
@pytest.mark.parametrize("target", SOURCES)
@pytest.mark.parametrize("source", SOURCES)
def test_no_average_is_lost_between_any_two_rules(source, target, dtype):
    """Its values and its count go on, nothing of the model from before the load comes in, and one warning at most."""
    averaged, model = averaged_scalar(*[3.0] * 6, dtype=dtype, **EVERY_WAY[source])
    model = scalar(100.0, dtype)
    other = AveragedModel(model, **EVERY_WAY[target])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.load_state_dict(through_file(averaged.state_dict()), strict=False)
    assert len(caught) <= 1
    assert other.n_averaged.item() == averaged.n_averaged.item()
    for value in (3.0, 3.0, 3.0, 5.0, 5.0):
        fill(model, value)
        other.update_parameters(model)
        for average in other.state.average.values():
            average = average["weight"] if isinstance(average, dict) else average
            assert value == 5.0 or average.item() == pytest.approx(3.0)
            assert average.item() > 3.0 - 1e-6
            assert average.item() < 5.0 or "Several" in target or "Every" in target or "LAWA" in target
    assert other.n_averaged.item() > averaged.n_averaged.item()


def test_several_averages_hand_over_their_first_to_a_plain_rule():
    rule = Several({"fast": EMA(0.5), "slow": EMA(0.9)})
    several, _ = averaged_scalar(0.0, 1.0, rule=rule)
    averaged, model = averaged_scalar(rule=EMA(0.5))
    with pytest.warns(UserWarning, match=r"written by Several.*read by EMA.*unexpected average\.slow\.weight"):
        averaged.load_state_dict(several.state_dict(), strict=False)
    fill(model, 1.0)
    averaged.update_parameters(model)
    assert (averaged.module.weight.item(), averaged.n_averaged.item()) == (0.75, 3)


def test_averages_are_found_by_name_where_another_stands_first():
    several, _ = averaged_scalar(0.0, 1.0, rule=Several({"fast": EMA(0.5), "slow": EMA(0.75)}))
    averaged, _ = averaged_scalar(rule=Several({"slow": EMA(0.75), "mean": SWA(), "fast": EMA(0.5)}))
    with pytest.warns(UserWarning, match=r"missing average\.fast\.weight, average\.mean\.weight"):
        averaged.load_state_dict(several.state_dict(), strict=False)
    assert averaged.module.weight.item() == 0.25
    assert {name: value_of(averaged, name) for name in averaged.rule.rules} == {"slow": 0.25, "mean": 0.5, "fast": 0.5}


@pytest.mark.parametrize(
    ("window", "expected"), [(1, [9.0]), (2, [4.0, 9.0]), (3, [3.0, 4.0, 9.0]), (5, [2.0, 3.0, 4.0, 9.0])]
)
def test_a_window_of_another_size_keeps_its_newest_iterates(window, expected):
    old, _ = averaged_scalar(1.0, 2.0, 3.0, 4.0, rule=LAWA(3))
    averaged, model = averaged_scalar(rule=LAWA(window))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if window != 3 else "error")
        averaged.load_state_dict(old.state_dict(), strict=False)
    assert averaged.module.weight.item() == 3.0
    fill(model, 9.0)
    averaged.update_parameters(model)
    assert averaged.module.weight.item() == pytest.approx(sum(expected) / len(expected))


def test_a_memory_is_kept_where_a_gate_was_added_or_taken_away():
    ring, _ = averaged_scalar(1.0, 3.0, rule=LAWA(2))
    gated, model = averaged_scalar(rule=Every(LAWA(2), 1))
    with pytest.warns(UserWarning, match="written by LAWA"):
        gated.load_state_dict(ring.state_dict(), strict=False)
    bare, _ = averaged_scalar(rule=LAWA(2))
    with pytest.warns(UserWarning, match="written by Every"):
        bare.load_state_dict(gated.state_dict(), strict=False)
    fill(model, 5.0)
    for averaged in (gated, bare):
        averaged.update_parameters(model)
        assert averaged.module.weight.item() == 4.0


def test_memories_that_look_alike_are_told_apart_by_the_rule_that_wrote_them():
    """The one number of Every is steps that passed, that of SkipNonFinite updates that it skipped."""
    every, _ = averaged_scalar(1.0, 1.0, 1.0, rule=Every(EMA(0.9), 2))
    assert every.state.memory == (1, ())
    averaged, _ = averaged_scalar(rule=SkipNonFinite(EMA(0.9)))
    with unchanged(averaged), pytest.raises(RuntimeError, match=r"written by Every.* read by SkipNonFinite"):
        averaged.load_state_dict(every.state_dict())
    with pytest.warns(UserWarning, match="written by Every"):
        averaged.load_state_dict(every.state_dict(), strict=False)
    assert averaged.state.memory == (0, ())


def test_the_numbers_of_a_rule_may_change():
    averaged, model = averaged_net(torch.float32, rule=Several({"a": EMA(0.9), "b": Every(SWA(), 2)}))
    other = AveragedModel(model, rule=Several({"a": functavg.PowerEMA(3), "b": Every(EMA(0.5), 4)}))
    other.load_state_dict(averaged.state_dict())
    assert contents(other) == contents(averaged)


def test_an_average_of_nothing_hands_over_nothing():
    averaged, model = averaged_scalar(rule=LAWA(2))
    with pytest.warns(UserWarning, match="memory"):
        averaged.load_state_dict(AveragedModel(scalar(7.0)).state_dict(), strict=False)
    fill(model, 1.0)
    averaged.update_parameters(model)
    assert (averaged.module.weight.item(), averaged.n_averaged.item()) == (1.0, 1)


def test_an_average_inside_another_module_takes_over_as_it_does_alone():
    old, _ = averaged_scalar(1.0, 1.0, rule=EMA(0.9))
    parent = nn.ModuleDict({"ema": AveragedModel(scalar(5.0), rule=LAWA(3))})
    state = nn.ModuleDict({"ema": old}).state_dict()
    with pytest.warns(UserWarning, match="memory of the average was written by"):
        result = parent.load_state_dict(state, strict=False)
    assert result.missing_keys == ["ema._extra_state"]
    assert parent["ema"].state.memory[0] == parent["ema"].n_averaged.item() == 2
    with (
        pytest.warns(UserWarning, match="memory of the average"),
        pytest.raises(RuntimeError, match=r'Missing key.*"ema\._extra_state"'),
    ):
        parent.load_state_dict(state)


# ---- a model that grew


class Grown(nn.Module):
    def __init__(self, dtype, blocks):
        super().__init__()
        self.blocks = nn.ModuleList([scalar(0.0, dtype) for _ in range(blocks)])


GROWING = {
    "EMA": EMA(0.9),
    "LAWA": LAWA(2),
    "Several": Several({"a": EMA(0.9), "b": LAWA(3)}),
    "Partition": Partition({"weights": LAWA(2), "rest": EMA(0.9)}, is_weight),
    "Every": Every(LAWA(2), 2),
    "SkipNonFinite": SkipNonFinite(SWA()),
    "nested": Every(Several({"a": SWA(), "b": LAWA(2)}), 1),
}


@DTYPES
@pytest.mark.parametrize("name", GROWING)
def test_the_average_of_a_model_that_grew_is_what_extend_makes(name, dtype):
    """Old leaves and their memory go on to the bit, new ones start from the model."""
    rule = GROWING[name]
    small = Grown(dtype, 2)
    averaged = AveragedModel(small, rule=rule)
    train(averaged, small, range(5))
    grown = Grown(dtype, 3)
    randomise(grown, 9)
    grown.load_state_dict(small.state_dict(), strict=False)
    expected = rule.extend({key: value.detach() for key, value in grown.named_parameters()}, averaged.state)
    other = AveragedModel(grown, rule=rule)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = other.load_state_dict(through_file(averaged.state_dict()), strict=False)
    assert len(caught) == (averaged.get_extra_state() is not None and not name.startswith(("Skip",)))
    assert "module.blocks.2.weight" in result.missing_keys
    mine, theirs = functavg.to_state_dict(other.state), functavg.to_state_dict(expected)
    assert {key: bits(value) for key, value in mine.items()} == {key: bits(value) for key, value in theirs.items()}


# ---- loads that fail


def other_shape(averaged, state):
    state["module.scale"] = torch.zeros(5)


def missing(averaged, state):
    del state["module.norm.weight"]


def unexpected(averaged, state):
    state["module.more"] = torch.zeros(1)


def other_memory(averaged, state):
    state["_extra_state"] = AveragedModel(averaged.module, rule=LAWA(7)).get_extra_state()


def no_memory(averaged, state):
    state.pop("_extra_state", None)
    state["module.more"] = torch.zeros(1)


def reshaped_memory(averaged, state):
    extra = dict(state.get("_extra_state") or {})
    name = next((name for name, value in extra.items() if isinstance(value, torch.Tensor)), None)
    state["_extra_state"] = extra | ({name: torch.zeros(9)} if name else {"memory.9": 3})


def a_hook_that_raises(averaged, state):
    def hook(*args):
        raise RuntimeError("hook")

    averaged.module.scale_hook = averaged.module.hidden[1].register_load_state_dict_pre_hook(hook)


FAILURES = [other_shape, missing, unexpected, other_memory, no_memory, reshaped_memory, a_hook_that_raises]


@DTYPES
@pytest.mark.parametrize("assign", [False, True], ids=["", "assign"])
@pytest.mark.parametrize("change", FAILURES)
@pytest.mark.parametrize("way", ["EMA", "LAWA", "Several", "Every"])
def test_a_load_that_fails_changes_nothing(way, change, assign, dtype):
    averaged, model = averaged_net(dtype, **EVERY_WAY[way])
    donor, _ = averaged_net(dtype, range(20, 27), **EVERY_WAY[way])
    state = donor.state_dict()
    change(averaged, state)
    given = copy.copy(state)
    identities = {name: id(tensor) for name, tensor in averaged.module.named_parameters()}
    with unchanged(averaged), pytest.raises((RuntimeError, ValueError)):
        averaged.load_state_dict(state, assign=assign)
    assert state.keys() == given.keys()
    assert {name: id(tensor) for name, tensor in averaged.module.named_parameters()} == identities
    reference, _ = averaged_net(dtype, **EVERY_WAY[way])
    for each in (averaged, reference):
        train(each, model, range(4, 6))
    assert contents(averaged) == contents(reference)


@DTYPES
def test_a_load_that_fails_inside_another_module_changes_nothing_of_the_average(dtype):
    averaged, _ = averaged_net(dtype, rule=LAWA(2))
    donor, _ = averaged_net(dtype, range(20, 27), rule=LAWA(2))
    parent, other = nn.ModuleDict({"ema": averaged}), nn.ModuleDict({"ema": donor})
    state = other.state_dict()
    state["ema.module.scale"] = torch.zeros(5)
    with unchanged(averaged), pytest.raises(RuntimeError, match="size mismatch"):
        parent.load_state_dict(state, strict=False)


def test_the_error_tells_who_wrote_and_who_reads_and_what_to_do():
    averaged, model = averaged_net(torch.float32, rule=LAWA(2))
    other = AveragedModel(model, rule=LAWA(3))
    with pytest.raises(
        RuntimeError,
        match=r"written by LAWA\(window=2\) and is read by LAWA\(window=3\): missing memory\.1\.2\..*with strict=False",
    ):
        other.load_state_dict(averaged.state_dict())
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*written by a rule without memory.*is read by LAWA"):
        other.load_state_dict(AveragedModel(model).state_dict())
    with unchanged(averaged), pytest.raises(ValueError, match=r"written by LAWA\(window=2\) and is read by EMA"):
        AveragedModel(model, rule=EMA()).set_extra_state(averaged.get_extra_state())
    extra = averaged.get_extra_state()
    with (
        unchanged(averaged),
        pytest.raises(ValueError, match=r"reshaped memory\.1\.0\.inputs\.bias of shape \(5,\) for"),
    ):
        averaged.set_extra_state(extra | {"memory.1.0.inputs.bias": torch.zeros(5)})
    with unchanged(averaged), pytest.raises(ValueError, match=r"reshaped memory\.1\.0\.inputs\.bias of shape \(\)"):
        averaged.set_extra_state(extra | {"memory.1.0.inputs.bias": 3})


def test_a_memory_that_is_missing_is_missed_only_where_there_is_one():
    averaged, model = averaged_net(torch.float32, rule=LAWA(2))
    state = averaged.state_dict()
    del state["_extra_state"]
    with unchanged(averaged), pytest.raises(RuntimeError, match=r'(?s)"_extra_state".*written by a rule without'):
        averaged.load_state_dict(state)
    AveragedModel(model, rule=EMA()).load_state_dict(state)


def test_a_load_that_fails_may_be_followed_by_one_that_does_not():
    averaged, model = averaged_net(torch.bfloat16, rule=LAWA(2))
    state = through_file(averaged.state_dict())
    before, kept = contents(averaged), averaged.module.cache.clone()
    train(averaged, model, range(4, 6))
    with pytest.raises(RuntimeError):
        averaged.load_state_dict(state | {"module.scale": torch.zeros(5)})
    averaged.load_state_dict(state)
    averaged.module.cache = kept  # is in no state_dict
    assert contents(averaged) == before


def test_whole_state_dicts_of_torch_load_strictly_without_a_copy_of_the_average(monkeypatch):
    averaged, _ = averaged_net(torch.float32, rule=LAWA(2))
    monkeypatch.setattr("functavg.nn.loading.Backup", None)
    averaged.load_state_dict(averaged.state_dict())


# ---- hooks that rename


def rename_weight(layer):
    """Let a layer save its weight as ``kernel``."""

    def save(module, state, prefix, metadata):
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")

    def load(module, state, prefix, *args):
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    layer.register_state_dict_post_hook(save)
    layer.register_load_state_dict_pre_hook(load)
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("assign", [False, True], ids=["", "assign"])
@pytest.mark.parametrize("depth", [0, 1], ids=["itself", "inside"])
def test_a_layer_that_renames_its_weight_keeps_its_float32_average(dtype, assign, depth):
    def make():
        layer = rename_weight(scalar(1.0, dtype))
        return nn.Sequential(layer) if depth else layer

    model = make()
    averaged = AveragedModel(model, rule=EMA(0.9999))
    averaged.update_parameters(model)
    fill(model, 2.0)
    for _ in range(10):
        averaged.update_parameters(model)
    state = through_file(averaged.state_dict())
    key = "module.0.kernel" if depth else "module.kernel"
    assert state[key].item() == pytest.approx(1.0010, abs=1e-5)
    resumed = AveragedModel(make(), rule=EMA(0.9999))
    resumed.load_state_dict(state, assign=assign)
    assert contents(resumed) == contents(averaged)
    for each in (resumed, averaged):
        each.update_parameters(model)
    assert contents(resumed) == contents(averaged)
    assert {parameter.dtype for parameter in resumed.module.parameters()} == {dtype}


def test_a_hook_that_makes_other_tensors_of_low_precision_is_warned_of():
    layer = scalar(1.0, torch.bfloat16)

    def split(module, state, prefix, metadata):
        state[f"{prefix}half"] = state.pop(f"{prefix}weight") / 2

    layer.register_state_dict_post_hook(split)
    averaged = AveragedModel(layer, rule=EMA(0.9))
    with pytest.warns(UserWarning, match=r"module\.half of the state_dict.*saved in low precision"):
        averaged.state_dict()


ALIEN = {
    "of a wrapped average": lambda averaged, model: {f"module.{k}": v for k, v in averaged.state_dict().items()},
    "of a wrapped model": lambda averaged, model: {f"module.module.{k}": v for k, v in model.state_dict().items()},
    "of another model": lambda averaged, model: {"n_averaged": torch.tensor(50), "module.other": torch.ones(1)},
}


@DTYPES
@pytest.mark.parametrize("rule", [EMA(0.9), LAWA(2)], ids=repr)
@pytest.mark.parametrize("file", ALIEN)
def test_a_load_that_finds_no_weight_changes_nothing_and_says_so(file, rule, dtype):
    """The count of weights that were not loaded is not taken for that of weights that are there by chance."""
    averaged, model = averaged_net(dtype, rule=rule)
    new = AveragedModel(model, rule=rule)
    state_dict = ALIEN[file](averaged, model)
    for loaded in (averaged, new):
        message = r"nothing of the state_dict was taken over: it has module\..*, and the average module\..*Rename"
        with unchanged(loaded), pytest.warns(UserWarning, match=message):
            loaded.load_state_dict(state_dict, strict=False)
        around = nn.ModuleDict({"average": loaded})
        within = {f"average.{name}": value for name, value in state_dict.items()}
        with unchanged(loaded), pytest.warns(UserWarning, match="it has average.module"):
            around.load_state_dict(within, strict=False)
    new.update_parameters(model)
    assert new.n_averaged == 1


GO_ON = {
    "update": lambda averaged, model, saved: None,
    "swap": lambda averaged, model, saved: averaged.swapped(model).__enter__(),
    "load": lambda averaged, model, saved: averaged.load_state_dict(saved),
    "load around": lambda averaged, model, saved: nn.ModuleDict({"it": averaged}).load_state_dict(
        {f"it.{name}": value for name, value in saved.items()}
    ),
}


@DTYPES
@pytest.mark.parametrize("then", GO_ON)
@pytest.mark.parametrize("rule", [EMA(0.9), LAWA(2)], ids=repr)
def test_a_load_around_an_average_that_breaks_off_inside_it_changes_nothing(rule, then, dtype):
    averaged, model = averaged_net(dtype, rule=rule)
    spared = copy.deepcopy(averaged)
    other, _ = averaged_net(dtype, (4, 7), rule=rule)
    around = nn.ModuleDict({"average": averaged})

    def fail(*args):
        raise KeyError("a key of an old version")

    handle = averaged.module.hidden.register_load_state_dict_pre_hook(fail)
    with pytest.raises(KeyError, match="a key of an old version"):
        around.load_state_dict({f"average.{name}": value for name, value in other.state_dict().items()})
    handle.remove()
    GO_ON[then](averaged, model, spared.state_dict())
    for course in (averaged, spared):
        course.update_parameters(model)
    assert contents(averaged) == contents(spared)


@DTYPES
def test_an_average_of_nothing_warns_of_nothing_after_a_load_that_failed(dtype):
    averaged, model = averaged_net(dtype, (), rule=EMA(0.9))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        averaged.load_state_dict({**averaged.state_dict(), "module.other": torch.ones(1)})
    averaged.update_parameters(model)
    assert averaged.n_averaged == 1


# ---- weights loaded by hand into an average of nothing

BY_HAND = {
    "load_state_dict": lambda module, weights: module.load_state_dict(weights),
    "assign": lambda module, weights: module.load_state_dict(weights, assign=True),
    "copy_": lambda module, weights: module.weight.data.copy_(weights["weight"]) and module.weight.detach().add_(0),
    "Parameter": lambda module, weights: setattr(module, "weight", nn.Parameter(weights["weight"].clone())),
}


@DTYPES
@pytest.mark.parametrize("way", BY_HAND)
@pytest.mark.parametrize("rule", [EMA(0.9), SWA(), LAWA(2), Several({"a": EMA(0.9), "b": SWA()})], ids=repr)
def test_weights_put_into_an_average_of_nothing_are_not_lost_in_silence(rule, way, dtype):
    model = scalar(0.0, dtype)
    averaged = AveragedModel(model, rule=rule)
    BY_HAND[way](averaged.module, scalar(7.0, dtype).state_dict())
    expected = r"swapped leaves the model.*n_averaged is 0.*load_state_dict\(\{'module"
    with pytest.warns(UserWarning, match=expected), swapped(model, averaged):
        assert model.weight.item() == 0.0
    with pytest.warns(UserWarning, match="swapped leaves"), averaged.swapped(model):
        pass
    with pytest.warns(UserWarning, match="copy_to leaves"):
        averaged.copy_to(model)
    with pytest.warns(UserWarning, match="this update replaces the weights of averaged.module"):
        averaged.update_parameters(model)


@pytest.mark.parametrize("then", ["a move", "a load that failed"])
def test_weights_put_into_an_average_of_nothing_are_remembered_after(then):
    model = scalar()
    averaged = AveragedModel(model)
    fill(averaged.module, 7.0)
    if then == "a move":
        averaged.double()
    else:
        with pytest.raises(RuntimeError, match="size mismatch"):
            averaged.load_state_dict(averaged.state_dict() | {"module.weight": torch.zeros(3)})
    with pytest.warns(UserWarning, match="this update replaces the weights of averaged.module"):
        averaged.update_parameters(model)


def test_an_average_that_starts_from_what_init_saw_keeps_weights_put_into_it():
    averaged, model = averaged_scalar(rule=EMA(0.9, start="init"))
    fill(averaged.module, 10.0)
    averaged.update_parameters(model)
    assert averaged.module.weight.item() == pytest.approx(9.0)


def test_the_way_that_the_warning_shows_goes_on_from_the_weights():
    averaged, model = averaged_scalar(rule=EMA(0.9))
    weights = scalar(7.0).state_dict()
    with pytest.warns(UserWarning, match="taken for an average of count 1"):
        averaged.load_state_dict({"module." + name: value for name, value in weights.items()}, strict=False)
    averaged.update_parameters(model)
    assert averaged.module.weight.item() == pytest.approx(6.3)


@DTYPES
@pytest.mark.parametrize("way", EVERY_WAY)
def test_what_an_average_of_nothing_goes_through_by_itself_is_no_weight_put_into_it(way, dtype):
    """Moves, copies, loads of its own, closed gates and statistics warn of nothing."""
    averaged, model = averaged_net(dtype, (), **EVERY_WAY[way])
    averaged.load_state_dict(averaged.state_dict())
    averaged = copy.deepcopy(averaged).double().to(dtype)
    functavg.update_bn([torch.randn(4, 3, dtype=dtype)], averaged)
    with averaged.swapped(model):
        pass
    train(averaged, model, range(3))
    assert parameters_of(model).keys() == parameters_of(averaged.module).keys()


# ---- torch's own functions


@DTYPES
def test_a_distributed_load_takes_over_what_fits(dtype):
    averaged, model = averaged_net(dtype, rule=EMA(0.9))
    other = AveragedModel(model, rule=LAWA(2))
    options = StateDictOptions(full_state_dict=True, strict=False)
    with pytest.warns(UserWarning, match="memory of the average"):
        set_model_state_dict(other, get_model_state_dict(averaged, options=options), options=options)
    assert other.state.memory[0] == other.n_averaged.item() == 4
