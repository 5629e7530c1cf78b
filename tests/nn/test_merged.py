"""Layers that merge weights in eval mode are recognised by their code, and no other override of train is."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from functavg.nn.merged import can_merge, check_unmerged, unmerged
from tests.nn.helpers import parameters_of

# ---- layers that merge


class LoRA(nn.Linear):
    """What LoRA layers have in common; each heir merges in its own way."""

    def __init__(self):
        super().__init__(2, 2, bias=False)
        self.a, self.b = nn.Parameter(torch.randn(1, 2)), nn.Parameter(torch.randn(2, 1))

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


class OwnName(nn.Module):
    """Calls its weight otherwise."""

    def __init__(self):
        super().__init__()
        self.W, self.a, self.b = (nn.Parameter(torch.randn(shape)) for shape in ((2, 2), (1, 2), (2, 1)))

    def train(self, mode=True):
        if mode != self.training:
            with torch.no_grad():
                self.W += (-1 if mode else 1) * self.b @ self.a
        return super().train(mode)

    def forward(self, x):
        return x @ (self.W + (self.b @ self.a if self.training else 0.0)).T


class InPlace(LoRA):
    def train(self, mode=True):
        if mode != self.training:
            with torch.no_grad():
                self.weight.add_(self.delta, alpha=-1 if mode else 1)
        return super().train(mode)


class ThroughMethods(LoRA):
    def train(self, mode=True):
        if mode != self.training:
            self._move(-1 if mode else 1)
        return super().train(mode)

    def _move(self, sign):
        self._shift(self, [sign * self.delta for _ in range(1)])

    @staticmethod
    @torch.no_grad()
    def _shift(layer, deltas):
        layer.weight.copy_(sum(deltas, layer.weight))


def move(layer, sign):
    with torch.no_grad():
        torch.Tensor.add_(layer.weight, layer.delta, alpha=sign)


class ThroughFunction(LoRA):
    def train(self, mode=True):
        if mode != self.training:
            move(self, -1 if mode else 1)
        return super().train(mode)


class Heir(ThroughMethods):
    def train(self, mode=True):
        return super().train(mode)


class Around(nn.Module):
    """Merges into the weight of a layer that it holds."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def train(self, mode=True):
        if mode != self.training:
            delta = self.up.weight @ self.down.weight
            self.base.weight.data = self.base.weight.data + (-delta if mode else delta)
        return super().train(mode)

    def forward(self, x):
        return self.base(x) + (self.up(self.down(x)) if self.training else 0.0)


class OnDemand(LoRA):
    """Merges when told to, as the layers of peft do."""

    def __init__(self):
        super().__init__()
        self.merged_adapters = []

    @property
    def merged(self):
        return bool(self.merged_adapters)

    def merge(self):
        self.weight.data += self.delta
        self.merged_adapters.append("default")

    def unmerge(self):
        self.weight.data -= self.delta
        self.merged_adapters.pop()

    def forward(self, x):
        return nn.Linear.forward(self, x) + (0.0 if self.merged else x @ self.delta.T)


MERGING = [WithFlag, WithoutFlag, OwnName, InPlace, ThroughMethods, ThroughFunction, Heir, Around, OnDemand]


def merge(layer):
    """Return the layer, merged."""
    if isinstance(layer, OnDemand):
        layer.merge()
    return layer.eval()


@pytest.mark.parametrize("kind", MERGING)
def test_a_layer_with_merged_weights_is_named_with_the_reason_and_the_remedy(kind):
    layer = kind()
    check_unmerged(layer, "block.0", "average")
    merge(layer)
    message = rf"block\.0 \({kind.__name__}\) of the average holds merged weights.*averaged\.train\(\).*before model\.e"
    with pytest.raises(ValueError, match=message):
        check_unmerged(layer, "block.0", "average")
    with pytest.raises(ValueError, match=rf"^the whole \({kind.__name__}\) of the model"):
        check_unmerged(layer, "", "model")


@pytest.mark.parametrize("kind", MERGING)
def test_merged_weights_are_taken_apart_and_merged_again(kind):
    model = nn.Sequential(nn.Linear(2, 2), kind())
    base, x = copy.deepcopy(model), torch.randn(3, 2)
    merge(model[1])
    modes = {name: module.training for name, module in model.named_modules()}
    with unmerged(model):
        torch.testing.assert_close(model.state_dict(), base.state_dict())
        model[1].load_state_dict(kind().state_dict())
        base.load_state_dict(model.state_dict())
    assert {name: module.training for name, module in model.named_modules()} == modes
    torch.testing.assert_close(model(x), base(x))
    with pytest.raises(ValueError, match="holds merged weights"):
        check_unmerged(model[1], "1", "model")


@pytest.mark.parametrize("kind", MERGING)
def test_what_is_not_merged_is_not_touched(kind):
    model = nn.Sequential(kind())
    before = parameters_of(model)
    with unmerged(model):
        assert parameters_of(model) == before
    assert parameters_of(model) == before


def test_a_layer_that_never_merges_what_it_could_is_not_merged():
    class Never(WithFlag):
        def train(self, mode=True):
            return nn.Linear.train(self, mode)

    check_unmerged(Never().eval(), "", "model")


# ---- and those that do not


class FrozenBackbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1))
        self.backbone, self.head = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), nn.Linear(1, 1)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self


class FrozenNorms(FrozenBackbone):
    def train(self, mode=True):
        super().train(mode)
        if mode and self.cls_token.requires_grad:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()
                    module.weight.requires_grad = False
                    module.bias.requires_grad_(False)
        return self


class Stages(FrozenBackbone):
    def train(self, mode=True):
        super().train(mode)
        self._freeze_stages()
        return self

    def _freeze_stages(self):
        for parameter in self.backbone.parameters():
            parameter.requires_grad = False


class Resetting(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.register_buffer("hidden", torch.zeros(1))

    def train(self, mode=True):
        self.hidden.zero_()
        self.steps = 0
        return super().train(mode)


class Noisy(nn.Linear):
    def train(self, mode=True):
        self.loss_weight = 0.1 if mode else 0.0
        return super().train(mode)


class Logging(nn.Module):
    def eval(self):
        self.history = [name for name, _ in self.named_parameters()]
        return super().eval()


class MergingTokens(nn.Linear):
    def train(self, mode=True):
        self.merge_tokens = not mode
        return super().train(mode)


class Mixing(nn.Module):
    """Has a method of that name that is about something else."""

    def merge(self, x):
        return x.data


ORDINARY = [FrozenBackbone, FrozenNorms, Stages, Resetting, Noisy, Logging, MergingTokens, Mixing]
OF_TORCH = [kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, nn.Module)]


@pytest.mark.parametrize("kind", ORDINARY)
def test_other_overrides_of_train_are_let_be(kind):
    module = kind(1, 1) if kind in (Noisy, MergingTokens) else kind()
    for mode in (True, False):
        check_unmerged(module.train(mode), "", "average")


def test_only_classes_whose_override_assigns_something_are_looked_into():
    assert [kind for kind in ORDINARY if can_merge(kind)] == [Resetting, Noisy, Logging, MergingTokens]
    assert all(map(can_merge, MERGING))


def test_classes_are_not_kept_alive():
    kind = weakref.ref(type("Made", (FrozenBackbone,), {}))
    assert not can_merge(kind())
    gc.collect()
    assert kind() is None


def test_no_class_of_torch_is_taken_for_one_that_merges():
    quantized = [torch.ao.nn.intrinsic.qat.ConvBn2d, torch.fx.GraphModule, torch.jit.ScriptModule]
    assert len(OF_TORCH) > 100
    assert not any(map(can_merge, [*OF_TORCH, *quantized, nn.SyncBatchNorm, nn.parallel.DistributedDataParallel]))
