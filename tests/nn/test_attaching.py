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


def test_accumulated_micro_batches_are_no_steps():  # C3
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
def test_steps_that_a_scaler_skips_are_no_steps(name, fused):  # C4
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


def test_two_optimizers_of_one_model_count_both():
    model = Net()
    first = torch.optim.SGD(model.inputs.parameters(), lr=0.1)
    second = torch.optim.Adam(model.norm.parameters(), lr=0.1)
    averaged = AveragedModel(model)
    for optimizer in (first, second):
        averaged.attach(optimizer, model)
    model(torch.randn(4, 3)).sum().backward()
    for optimizer in (first, second, second):
        optimizer.step()
    assert averaged.n_averaged.item() == 3


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
