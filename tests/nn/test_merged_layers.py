"""Layers that merge weights in eval mode are averaged, swapped and copied apart, whatever modes models are in."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from functavg import EMA, AveragedModel, Several, swapped
from tests.nn.helpers import bits, parameters_of, tensors


class LoRA(nn.Linear):
    """What LoRA layers have in common; each heir merges in its own way. Sums of its weights are exact."""

    def __init__(self):
        super().__init__(2, 2, bias=False)
        self.a, self.b = nn.Parameter(torch.ones(1, 2)), nn.Parameter(torch.ones(2, 1))
        nn.init.constant_(self.weight, 4.0).requires_grad_(False)

    @property
    def delta(self):
        return self.b @ self.a

    def forward(self, x):
        return super().forward(x) + (x @ self.delta.T if self.training else 0.0)


class WithFlag(LoRA):
    merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.weight.data += -self.delta if mode else self.delta
            self.merged = not mode
        return self


class WithoutFlag(LoRA):
    def train(self, mode=True):
        if mode != self.training:
            with torch.no_grad():
                self.weight += -self.delta if mode else self.delta
        return super().train(mode)


class NewMemory(LoRA):
    def train(self, mode=True):
        if mode != self.training:
            self.weight.data = self.weight.data + (-self.delta if mode else self.delta).detach()
        return super().train(mode)


class NewParameter(LoRA):
    def train(self, mode=True):
        if mode != self.training:
            delta = (-self.delta if mode else self.delta).detach()
            self.weight = nn.Parameter(self.weight + delta, requires_grad=False)
        return super().train(mode)


class Heir(WithoutFlag):
    pass


class Around(nn.Module):
    """Merges into the weight of a layer that it holds."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = (nn.Linear(2, 2, bias=False) for _ in range(3))
        for value, layer in ((4.0, self.base), (1.0, self.down), (0.5, self.up)):
            nn.init.constant_(layer.weight, value)
        self.base.requires_grad_(False)

    def train(self, mode=True):
        if mode != self.training:
            delta = self.up.weight @ self.down.weight
            self.base.weight.data += -delta if mode else delta
        return super().train(mode)

    def forward(self, x):
        return self.base(x) + (self.up(self.down(x)) if self.training else 0.0)


MERGING = [WithFlag, WithoutFlag, NewMemory, NewParameter, Heir, Around]
X = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
each_kind = pytest.mark.parametrize("kind", MERGING)


def make(kind):
    return nn.Sequential(nn.Identity(), kind())


@torch.no_grad()
def train(model, value):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.fill_(value)


def apart(model):
    """Return all tensors of a copy of a model in training mode, bit by bit."""
    return parameters_of(copy.deepcopy(model).train())


def start(kind, **arguments):
    """Return a model, its average of 1 and 3, and the same average of a model that was never merged."""
    found = []
    for _ in range(2):
        model = make(kind)
        averaged = AveragedModel(model, rule=EMA(0.5), **arguments)
        for value in (1.0, 3.0):
            train(model, value)
            averaged.update_parameters(model)
        found += [model, averaged]
    return found


@each_kind
@pytest.mark.parametrize("modes", [(True, False), (False, True), (False, False)], ids=str)
def test_updates_are_those_in_training_mode(kind, modes):
    model, averaged, plain_model, plain = start(kind)
    for value in (7.0, 5.0, 9.0):
        train(model.train(), value)
        train(plain_model, value)
        model.train(modes[0])
        averaged.train(modes[1])
        averaged.update_parameters(model)
        plain.update_parameters(plain_model)
        assert (model[1].training, averaged.module[1].training) == modes
        assert apart(averaged.module) == apart(plain.module)
        assert apart(model) == apart(plain_model)
        torch.testing.assert_close(averaged(X), plain.eval()(X))
        plain.train()


@each_kind
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_swaps_do_not_depend_on_when_modes_change(kind, before, after, mode):
    """The model is in eval before the block or inside it, and in training again inside it or after."""
    model, averaged, _plain_model, plain = start(kind)
    averaged.train(mode)
    expected = plain.eval()(X)
    kept, shown = apart(model), model(X)
    if before:
        model.eval()
    with swapped(model, averaged):
        torch.testing.assert_close(model.eval()(X), expected)
        if after:
            model.train()
    assert model[1].training is after
    assert apart(model) == kept
    torch.testing.assert_close(model(X), shown)
    assert averaged.module[1].training is mode
    torch.testing.assert_close(averaged(X), expected)


@each_kind
@pytest.mark.parametrize("modes", [(True, False), (False, True), (False, False)], ids=str)
def test_copy_to_is_that_in_training_mode(kind, modes):
    model, averaged, _plain_model, plain = start(kind)
    model.train(modes[0])
    averaged.train(modes[1])
    averaged.copy_to(model)
    assert apart(model) == apart(plain.module)


@each_kind
def test_an_average_is_made_of_merged_weights_too(kind):
    model = make(kind)
    kept = apart(model)
    model.eval()
    for arguments in ({}, {"module": make(kind)}, {"module": make(kind).eval()}):
        averaged = AveragedModel(model, **arguments)
        assert apart(averaged.module) == kept
        averaged.update_parameters(model)
        assert apart(averaged.module) == apart(model) == kept


def test_memories_and_shared_bases_are_kept_apart_too():
    model = make(WithFlag)
    averaged = AveragedModel(
        model, rule=Several({"a": EMA(0.5), "b": EMA(0.25)}), share=lambda name, tensor: "a" in name
    )
    averaged.update_parameters(model.eval())
    train(model.train(), 3.0)
    averaged.eval()
    averaged.update_parameters(model.eval())
    assert averaged.state.average["b"]["1.b"].flatten().tolist() == [2.5, 2.5]


class FrozenBackbone(nn.Module):
    """Keeps a part in eval mode."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Sequential(WithoutFlag(), nn.BatchNorm1d(2)), WithFlag()

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self


@pytest.mark.parametrize("mode", [True, False])
def test_modes_are_those_of_before_afterwards(mode):
    """Also where a module inside is in another mode than the one around it."""
    model = FrozenBackbone().train()
    averaged = AveragedModel(model, rule=EMA(0.5)).train(mode)
    averaged.module.head.train()
    model.train(mode)
    kept, modes = apart(model), [[part.training for part in module.modules()] for module in (model, averaged)]
    averaged.update_parameters(model)
    with swapped(model, averaged):
        pass
    averaged.copy_to(model)
    assert [[part.training for part in module.modules()] for module in (model, averaged)] == modes
    assert apart(model) == apart(averaged.module) == kept


def test_an_override_that_raises_changes_nothing():
    class Raising(nn.Linear):
        def train(self, mode=True):
            if mode and not self.training:
                raise RuntimeError("no way back")
            return super().train(mode)

    model = nn.Sequential(WithFlag(), Raising(2, 2)).eval()
    averaged = AveragedModel(model)
    before = {name: bits(tensor) for name, tensor in tensors(averaged).items()}, parameters_of(model)
    with pytest.raises(RuntimeError, match="no way back"):
        averaged.update_parameters(model)
    assert ({name: bits(tensor) for name, tensor in tensors(averaged).items()}, parameters_of(model)) == before
    assert not any(part.training for part in model.modules())


def test_a_merged_layer_gets_back_the_modes_of_all_its_parts():
    """Also of one that was set to train in a layer in eval mode."""
    model = nn.Sequential(WithFlag())
    model[0].append = nn.ModuleDict({"trains": nn.Dropout(), "rests": nn.Dropout()})
    model.eval()
    model[0].append["trains"].train()
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    assert model[0].append["trains"].training
    assert not model[0].append["rests"].training
    assert not model[0].training
