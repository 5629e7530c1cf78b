"""Teachers: averages that need no gradients, in train or eval mode, whose momentum rises to 1."""

from __future__ import annotations

import copy
import io
import math

import numpy as np
import pytest
import torch
from torch import nn

import functavg
from functavg import EMA, AveragedModel
from functavg.schedules import Cosine
from tests import oracle
from tests.nn.helpers import FLOAT32, Net, bits, numbers, parameters_of, randomise, tensors

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def frozen(model: nn.Module, **arguments: object) -> AveragedModel:
    teacher = AveragedModel(model, rule=EMA(0.9), **arguments).requires_grad_(False)
    assert isinstance(teacher, AveragedModel)
    return teacher


def assert_needs_no_gradient(teacher: AveragedModel) -> None:
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


@DTYPES
def test_a_teacher_that_needs_no_gradient_averages_as_one_that_does(dtype):
    model = Net().to(dtype)
    teacher, averaged = frozen(model, use_buffers=True), AveragedModel(model, rule=EMA(0.9), use_buffers=True)
    for seed in range(4):
        randomise(model, seed)
        teacher.update_parameters(model)
        averaged.update_parameters(model)
    assert parameters_of(teacher) == parameters_of(averaged)
    for name, value in averaged.state.average.items():
        assert bits(teacher.state.average[name]) == bits(value)
    assert_needs_no_gradient(teacher)
    assert all(parameter.requires_grad for parameter in model.parameters())


@DTYPES
def test_it_stays_so_when_it_is_saved_loaded_copied_and_moved(dtype):
    model = Net().to(dtype)
    teacher = frozen(model)
    for seed in range(3):
        randomise(model, seed)
        teacher.update_parameters(model)
    file = io.BytesIO()
    torch.save(teacher.state_dict(), file)
    file.seek(0)
    for assign in (False, True):
        loaded = frozen(Net().to(dtype))
        loaded.load_state_dict(torch.load(file), assign=assign)
        file.seek(0)
        for other in (loaded, copy.deepcopy(teacher), copy.deepcopy(teacher).to("cpu")):
            assert_needs_no_gradient(other)
            randomise(model, 7)
            other.update_parameters(model)
            expected = copy.deepcopy(teacher)
            expected.update_parameters(model)
            assert parameters_of(other) == parameters_of(expected)


def test_a_swap_leaves_who_needs_a_gradient_as_it_was():
    model = nn.Linear(2, 1)
    teacher = frozen(model)
    teacher.update_parameters(model)
    randomise(model, 1)
    training = parameters_of(model)
    with functavg.swapped(model, teacher):
        assert parameters_of(model) == parameters_of(teacher.module)
        assert all(parameter.requires_grad for parameter in model.parameters())
    assert parameters_of(model) == training
    teacher.copy_to(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_it_answers_without_a_graph_while_the_student_is_trained():
    student = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    teacher = frozen(student, use_buffers=True).eval()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    teacher.attach(optimizer, student)
    for _ in range(3):
        inputs = torch.randn(8, 3)
        answers = teacher(inputs)
        assert answers.grad_fn is None
        assert torch.equal(answers, teacher(inputs))
        (student(inputs) - answers).square().mean().backward()
        optimizer.step()
    assert teacher.n_averaged == 3
    assert not any(part.training for part in teacher.modules())
    assert all(part.training for part in student.modules())


def test_in_train_mode_it_normalises_by_batches_and_takes_the_statistics_of_the_student():
    """Those of its own forward passes are gone with the next update."""
    student = nn.BatchNorm1d(2)
    teacher = frozen(student).train()
    teacher(torch.full((4, 2), 100.0) + torch.randn(4, 2))
    student(torch.randn(4, 2))
    teacher.update_parameters(student)
    assert torch.equal(teacher.module.running_mean, student.running_mean)


def test_an_average_of_a_frozen_student_needs_no_gradient():
    assert_needs_no_gradient(AveragedModel(Net().requires_grad_(False)))


def test_a_momentum_that_rises_to_1_along_a_cosine_is_the_weighted_sum():
    """``1 - (1 - m) (1 + cos(pi t)) / 2`` of BYOL and DINO, from what ``init`` saw on; at its end nothing moves."""
    steps = 20
    student = nn.Linear(3, 2)
    teacher = AveragedModel(student, rule=EMA(Cosine(0.9, 1.0, duration=steps))).requires_grad_(False)
    seen = [numbers(student)]
    for seed in range(steps):
        randomise(student, seed)
        seen.append(numbers(student))
        teacher.update_parameters(student)
    weights = oracle.of_weights(lambda n, d: 0.1 * (1 + math.cos(math.pi * n / steps)) / 2)([1] * steps)
    for name, value in tensors(teacher.module).items():
        wanted = oracle.average(weights, [values[name] for values in seen])
        np.testing.assert_allclose(value.detach().double(), wanted, rtol=FLOAT32, atol=4 * FLOAT32)
    before = parameters_of(teacher.module)
    randomise(student, 99)
    teacher.update_parameters(student)
    assert parameters_of(teacher.module) == before
