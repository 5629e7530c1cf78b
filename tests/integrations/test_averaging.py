"""What the callbacks have in common: the average of what is trained in a model, beside it and inside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from functavg import EMA, LAWA, SWA, Every, Several, SkipNonFinite, from_state_dict, to_state_dict
from functavg.integrations.averaging import ModelAverage
from functavg.integrations.requiring import require
from tests.distributed.processes import Net, everywhere, sharded
from tests.nn.helpers import alone, bits


def tied():
    """Return a model in which one parameter has two names, and one is frozen."""
    model = nn.ModuleDict({"inputs": nn.Linear(2, 2, bias=False), "outputs": nn.Linear(2, 2)})
    model["outputs"].weight = model["inputs"].weight
    model["frozen"] = nn.Linear(2, 2).requires_grad_(False)
    return model


def test_tied_parameters_are_averaged_once_and_frozen_ones_not_at_all():
    model = tied()
    average = ModelAverage(model, SWA())
    average.update()
    assert list(average.state.average) == ["inputs.weight", "outputs.bias"]
    with average.inside():
        assert model["outputs"].weight is model["inputs"].weight


def test_the_average_goes_in_and_out_once():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    average = ModelAverage(model, EMA(0.5), backup_device="cpu")
    average.update()
    nn.init.constant_(model.weight, 3.0)
    average.update()
    seen = []
    for step in (average.enter, average.enter, average.leave, average.leave, average.enter, average.stay):
        step()
        seen.append((average.is_inside, model.weight.item()))
    assert seen == [(True, 2.0), (True, 2.0), (False, 3.0), (False, 3.0), (True, 2.0), (False, 2.0)]


def test_buffers_that_were_changed_inside_are_there_again_after_a_while_outside():
    model = nn.BatchNorm1d(1)
    average = ModelAverage(model, SWA())
    average.update()
    average.enter(average.copy_buffers())
    model.running_mean.fill_(5.0)
    with average.outside():
        assert model.running_mean.item() == 0.0
    assert model.running_mean.item() == 5.0
    average.stay()
    assert model.running_mean.item() == 5.0


def test_masks_and_caches_are_not_averaged():
    model = nn.BatchNorm1d(1)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    average = ModelAverage(model, SkipNonFinite(EMA(0.5)), use_buffers=True)
    for _ in range(2):
        average.update()
    assert average.state.count == 2
    assert average.state.average.keys() == {"weight", "bias", "running_mean", "running_var"}


def test_before_the_first_update_nothing_goes_in():
    model = nn.Linear(1, 1)
    average = ModelAverage(model, Every(SWA(), 2))
    average.update()
    before = model.weight.item() + 1.0
    nn.init.constant_(model.weight, before)
    with average.inside():
        assert model.weight.item() == pytest.approx(before)


def test_of_several_averages_the_first_goes_in():
    rule = Several({"outer": Several({"slow": SWA(), "fast": EMA(0.0)}), "other": EMA(0.0)})
    model = nn.Linear(1, 1, bias=False)
    average = ModelAverage(model, rule)
    for value in (1.0, 3.0):
        nn.init.constant_(model.weight, value)
        average.update()
    assert {name: value.item() for name, value in average.weights().items()} == {"weight": 2.0}
    assert average.keys() == {"weight": "average.outer.slow.weight"}


def test_parameters_that_are_frozen_later_stay_in_the_average():
    model = nn.Linear(1, 1)
    average = ModelAverage(model, SWA())
    average.update()
    model.bias.requires_grad_(False)
    average.update()
    assert list(average.state.average) == ["weight", "bias"]


@pytest.mark.parametrize("rule", [EMA(0.5), Several({"a": EMA(0.5), "b": LAWA(2)})], ids=repr)
@pytest.mark.parametrize("is_trained", [(True, False), (False, True)], ids=["more", "fewer"])
def test_a_saved_average_goes_on_though_other_tensors_are_trained_where_it_is_loaded(is_trained, rule):
    def set_trained(model, flag):
        model[1].requires_grad_(flag)

    def step(value, *averages):
        for average in averages:
            for parameter in average.model.parameters():
                nn.init.constant_(parameter, value)
            average.update()

    model, other = (nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(2))
    set_trained(model, is_trained[0])
    set_trained(other, is_trained[1])
    average, loaded = ModelAverage(model, rule), ModelAverage(other, rule)
    step(1.0, average, loaded)
    step(2.0, average)
    saved = to_state_dict(average.state)
    with pytest.raises(ValueError, match="does not have the structure"):
        loaded.load(average.keys(), lambda like: from_state_dict(like, {}))
    assert loaded.state.count == 1
    loaded.load(average.keys(), lambda like: from_state_dict(like, saved))
    assert loaded.keys() == average.keys()
    set_trained(model, True)
    set_trained(other, True)
    step(4.0, average, loaded)
    wanted, got = to_state_dict(average.state), to_state_dict(loaded.state)
    assert wanted.keys() == got.keys()
    assert all(bits(wanted[key]) == bits(got[key]) for key in wanted)


def test_sharded_parameters_are_refused():
    with alone():
        model = sharded(Net(), everywhere())
        with pytest.raises(TypeError, match=r"scale.* are sharded \(FSDP2\), which callbacks do not average"):
            ModelAverage(model, SWA())


def test_what_a_framework_itself_lacks_is_no_missing_framework(tmp_path, monkeypatch):
    (tmp_path / "broken_framework.py").write_text("import something_that_it_needs")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="No module named 'something_that_it_needs'"):
        require("broken_framework", "extra")
    with pytest.raises(ImportError, match=r"needs missing_framework.part, .* pip install 'functavg\[extra\]'"):
        require("missing_framework.part", "extra")
    assert require("torch.nn", "extra") is torch.nn
