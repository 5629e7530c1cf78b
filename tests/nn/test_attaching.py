"""attach: one update for each step that an optimizer really took."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from functavg import EMA, SWA, AveragedModel
from tests.nn.helpers import Net, contents, fill, scalar


def moving_to(value):
    """Return a model of one weight and an optimizer whose every step puts it to ``value``."""
    model = scalar(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step():
        optimizer.zero_grad()
        model.weight.grad = model.weight.detach() - value
        optimizer.step()

    return model, optimizer, step


def test_accumulated_micro_batches_are_no_steps():
    model = scalar(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    averaged = AveragedModel(model, rule=EMA(0.99))
    averaged.update_parameters(model)
    averaged.attach(optimizer, model)
    for _ in range(100):
        optimizer.zero_grad()
        for _ in range(8):
            (model(torch.ones(1, 1)) - 1.0).square().div(2 * 8).sum().backward()
        optimizer.step()
    assert averaged.n_averaged.item() == 101
    assert averaged.module.weight.item() == pytest.approx(1 - 0.99**100, rel=1e-5)  # 0.634


OPTIMIZERS = {
    "SGD": lambda parameters, **kwargs: torch.optim.SGD(parameters, lr=0.1, **kwargs),
    "AdamW": lambda parameters, **kwargs: torch.optim.AdamW(parameters, lr=0.1, **kwargs),
}


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_that_a_scaler_skips_are_no_steps(name, fused):
    model = nn.Linear(2, 1)
    optimizer = OPTIMIZERS[name](model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    averaged = AveragedModel(model)
    averaged.attach(optimizer, model)
    seen = []
    for overflows in (False, True, True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        if overflows:
            model.weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        if not overflows:
            seen.append(model.weight.detach().clone())
    assert averaged.n_averaged.item() == 2
    torch.testing.assert_close(averaged.module.weight.detach(), (seen[0] + seen[1]) / 2)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()  # without the scaler
    assert averaged.n_averaged.item() == 3


def test_a_handle_ends_it():
    model, optimizer, step = moving_to(1.0)
    averaged = AveragedModel(model)
    handle = averaged.attach(optimizer, model)
    step()
    handle.remove()
    step()
    assert averaged.n_averaged.item() == 1
    with averaged.attach(optimizer, model):
        step()
    step()
    assert averaged.n_averaged.item() == 2


def two_optimizers():
    """Return a model, two optimizers for parts of it, and an average."""
    model = Net()
    first = torch.optim.SGD(model.inputs.parameters(), lr=0.1)
    second = torch.optim.Adam(model.norm.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    return model, first, second, AveragedModel(model)


def test_two_optimizers_attached_one_by_one_count_both():
    model, first, second, averaged = two_optimizers()
    for optimizer in (first, second):
        averaged.attach(optimizer, model)
    for optimizer in (first, second, second):
        optimizer.step()
    assert averaged.n_averaged.item() == 3


@pytest.mark.parametrize("container", [list, tuple, set, iter], ids=lambda kind: kind.__name__)
def test_two_optimizers_attached_together_make_one_update_when_both_have_stepped(container):
    model, first, second, averaged = two_optimizers()
    averaged.attach(container([first, second]), model)
    counts = []
    for optimizer in (first, second, second, first, first, first, second):
        optimizer.step()
        counts.append(averaged.n_averaged.item())
    assert counts == [0, 1, 1, 2, 2, 2, 3]


def test_of_two_optimizers_one_whose_step_is_skipped_has_not_stepped():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1, fused=True) for layer in model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    averaged = AveragedModel(model)
    averaged.attach([first, second], model)
    counts = []
    for overflows in (False, True, False):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        if overflows:
            model[1].weight.grad.fill_(torch.inf)
        for optimizer in (first, second):
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        counts.append(averaged.n_averaged.item())
    assert counts == [1, 1, 2]


def test_a_handle_of_two_optimizers_ends_both():
    model, first, second, averaged = two_optimizers()
    hooks = [len(optimizer._optimizer_step_post_hooks) for optimizer in (first, second)]
    averaged.attach([first, second], model).remove()
    assert [len(optimizer._optimizer_step_post_hooks) for optimizer in (first, second)] == hooks
    with averaged.attach([first, second, first], model):
        first.step()
        second.step()
    first.step()
    second.step()
    assert averaged.n_averaged.item() == 1


def test_two_averages_of_one_optimizer_are_both_updated():
    model, optimizer, step = moving_to(1.0)
    averages = [AveragedModel(model, rule=EMA(decay)) for decay in (0.5, 0.75)]
    for averaged in averages:
        averaged.attach(optimizer, model)
        averaged.update_parameters(model)
    step()
    assert [averaged.module.weight.item() for averaged in averages] == [0.5, 0.25]


def test_a_step_with_a_closure_is_one_step_however_often_it_is_called():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    averaged = AveragedModel(model)
    averaged.attach(optimizer, model)
    calls = []

    def closure():
        calls.append(averaged.n_averaged.item())
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure=closure)
    assert averaged.n_averaged.item() == 2
    assert calls.count(0) > 1


def test_schedulers_and_wrappers_may_come_before_or_after():
    model, optimizer, step = moving_to(1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    averaged = AveragedModel(model, rule=EMA(0.5))
    averaged.attach(optimizer, torch.compile(model, backend="eager"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step()
    scheduler.step()
    step()
    assert averaged.n_averaged.item() == 2


def test_an_update_that_fails_fails_the_step_and_names_why():
    model, optimizer, step = moving_to(1.0)
    averaged = AveragedModel(nn.Linear(1, 1))
    averaged.attach(optimizer, model)
    with pytest.raises(ValueError, match="missing bias"):
        step()
    assert averaged.n_averaged.item() == 0


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["deepcopy", "pickle"]
)
def test_an_attached_average_and_its_optimizer_can_be_copied(make):
    """A copy of the average is attached to nothing; the original goes on."""
    model, optimizer, step = moving_to(1.0)
    averaged = AveragedModel(model, rule=SWA())
    averaged.attach(optimizer, model)
    step()
    other = make(averaged)
    before = contents(other)
    make(optimizer)
    step()
    assert contents(other) == before
    assert averaged.n_averaged.item() == 2
    fill(model, 1.0)
    other.update_parameters(model)
    assert contents(other) == contents(averaged)


# ---- optimizers of all kinds


class Launcher(torch.optim.Optimizer):
    """What a launcher makes of an optimizer: it never initialises its base, and steps once in ``every`` calls."""

    def __init__(self, optimizer, every=2):
        self.optimizer, self.every, self.calls = optimizer, every, 0

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.calls += 1
        if self.calls % self.every == 0:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        if self.calls % self.every == 0:
            self.optimizer.zero_grad(set_to_none)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_optimizer_inside_the_wrapper_of_a_launcher_is_followed(depth):
    model, optimizer, _ = moving_to(1.0)
    wrapped = optimizer
    for every in (2, 1, 1)[:depth]:
        wrapped = Launcher(wrapped, every)
    averaged = AveragedModel(model, rule=EMA(0.5))
    handle = averaged.attach(wrapped, model)
    for _ in range(4):
        model(torch.ones(1, 1)).sum().backward()
        wrapped.step()
        wrapped.zero_grad()
    assert averaged.n_averaged.item() == 2
    handle.remove()
    wrapped.step()
    wrapped.step()
    assert averaged.n_averaged.item() == 2


def test_an_optimizer_and_its_wrapper_are_one():
    model, optimizer, step = moving_to(1.0)
    averaged = AveragedModel(model)
    averaged.attach([optimizer, Launcher(optimizer)], model)
    step()
    assert averaged.n_averaged.item() == 1


def test_accelerate_accumulates_without_updates():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    averaged = AveragedModel(model)
    averaged.attach(optimizer, model)
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert averaged.n_averaged.item() == 2


def test_the_optimizer_that_lightning_wraps_is_followed():
    core = pytest.importorskip("pytorch_lightning.core.optimizer")
    model, optimizer, step = moving_to(1.0)
    averaged = AveragedModel(model)
    averaged.attach(core.LightningOptimizer(optimizer), model)
    step()
    assert averaged.n_averaged.item() == 1


class Clipping(torch.optim.SGD):
    """Does more in its step than its base class."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(max=0.5)
        return loss


class Twice(Clipping):
    """Does so once more."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", [Clipping, Twice])
def test_a_step_that_calls_the_step_of_its_base_class_is_one_step(kind):
    """The hooks run for each of them, once the base class has had an instance of its own."""
    model, optimizer, step = moving_to(1.0)
    step()
    Clipping(model.parameters(), lr=1.0)
    optimizer = kind(model.parameters(), lr=1.0)
    averaged = AveragedModel(model)
    averaged.attach(optimizer, model)
    ran = []
    optimizer.register_step_post_hook(lambda *args: ran.append(1))
    for _ in range(2):
        model.weight.grad = model.weight.detach() - 1.0
        optimizer.step()
    assert len(ran) > 2
    assert averaged.n_averaged.item() == 2
    assert averaged.module.weight.item() == 0.5  # the whole step was done


def test_after_a_step_that_fails_the_next_one_counts():
    model, optimizer, _ = moving_to(1.0)
    optimizer = Clipping(model.parameters(), lr=1.0)
    averaged = AveragedModel(model)
    averaged.attach(optimizer, model)

    def failing():
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        optimizer.step(failing)
    optimizer.step()
    assert averaged.n_averaged.item() == 1


class Hookless(torch.optim.Optimizer):
    """An optimizer that makes a dict of hooks and never runs one, as some look-aheads do."""

    def __init__(self, base):
        self._optimizer_step_post_hooks = {}
        self._base = base

    def step(self, closure=None):
        return self._base.step(closure)


class Loop:
    """No optimizer, but it holds one."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def circular(optimizer):
    wrapped = Launcher(optimizer)
    wrapped.optimizer = wrapped
    return wrapped


WRONG = {
    "swapped": (lambda model, optimizer: (model, optimizer), r"arguments are swapped.*optimizer comes first"),
    "module": (lambda model, optimizer: (nn.Sequential(model), model), "optimizer must be no module, got Sequential"),
    "no model": (lambda model, optimizer: (optimizer, None), "model must be the torch.nn.Module.*got NoneType"),
    "twice": (lambda model, optimizer: (optimizer, optimizer), "model must be the torch.nn.Module.*got SGD"),
    "none": (lambda model, optimizer: (None, model), "must be a torch.optim.Optimizer or a list.*got NoneType"),
    "class": (lambda model, optimizer: (torch.optim.SGD, model), "must be a torch.optim.Optimizer.*got type"),
    "parameters": (lambda model, optimizer: (model.parameters(), model), "got Parameter"),
    "empty": (lambda model, optimizer: ([], model), "an optimizer or several, got none"),
    "one of two": (
        lambda model, optimizer: ([optimizer, "adam"], model),
        r"got str. .*update_parameters\(model\) after",
    ),
    "holder": (lambda model, optimizer: (Loop(optimizer), model), r"got Loop. Pass .* the Loop's \.optimizer"),
    "scheduler": (
        lambda model, optimizer: (torch.optim.lr_scheduler.StepLR(optimizer, 1), model),
        r"got StepLR. Pass .* the StepLR's \.optimizer",
    ),
    "hookless": (lambda model, optimizer: (Hookless(optimizer), model), "Hookless runs no hooks.*Attach to the optim"),
    "circular": (lambda model, optimizer: (circular(optimizer), model), "Launcher runs no hooks"),
    "wraps nothing": (lambda model, optimizer: (Launcher(None), model), "Launcher runs no hooks"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_attached_is_named_and_nothing_is_attached(wrong):
    arguments, message = WRONG[wrong]
    model, optimizer, step = moving_to(1.0)
    averaged = AveragedModel(model)
    with pytest.raises(TypeError, match=message):
        averaged.attach(*arguments(model, optimizer))
    step()
    assert averaged.n_averaged.item() == 0
