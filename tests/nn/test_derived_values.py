"""After a write into a module nothing goes on computing with what was derived from its weights before."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from functavg import SWA, AveragedModel, swapped
from functavg.nn.writing import drop_derived_values
from tests.nn.helpers import fill, scalar

ONE = torch.ones(1, 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_autocast_casts_weights_anew(depth):
    model = scalar(1.0)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for _ in range(depth):
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        assert model(ONE).item() == 1.0
        fill(model, 2.0)
        assert model(ONE).item() == 1.0  # that is why
        drop_derived_values()
        assert model(ONE).item() == 2.0


def doubled():
    """Return a model whose weight is twice its parameter."""
    model = nn.Sequential(scalar(1.0))
    parametrize.register_parametrization(model[0], "weight", Double())
    return model


class Double(nn.Module):
    """A parametrization."""

    def forward(self, x):
        return 2 * x


def test_cached_parametrizations_are_computed_anew():
    model = doubled()
    with torch.no_grad(), parametrize.cached():
        assert model(ONE).item() == 2.0
        fill(model, 2.0)
        assert model(ONE).item() == 2.0  # that is why
        drop_derived_values()
        assert model(ONE).item() == 4.0
    assert model(ONE).item() == 4.0


@pytest.mark.slow
def test_nothing_is_imported_to_look_into():
    script = "import sys, functavg.nn.writing as d, torch; del sys.modules['torch.nn.utils.parametrize']; "
    script += "d.drop_derived_values(); assert 'torch.nn.utils.parametrize' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


CACHES = {
    "autocast": (lambda: scalar(1.0), lambda: torch.autocast("cpu", torch.bfloat16)),
    "parametrize": (doubled, parametrize.cached),
}


@pytest.mark.parametrize("cache", CACHES)
def test_the_average_computes_with_its_new_weights_after_an_update(cache):
    make, cached = CACHES[cache]
    model = make()
    averaged = AveragedModel(model, rule=SWA())
    with torch.no_grad(), cached():
        before = averaged(ONE).item()
        for value in (3.0, 5.0):
            fill(model, value)
            averaged.update_parameters(model)
        assert averaged(ONE).item() == 4 * before


def test_a_model_and_its_average_do_not_share_cached_parametrizations():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)), *doubled())
    averaged = AveragedModel(model, rule=SWA())
    fill(model, 0.5)
    expected = [each[0].weight.clone() for each in (model, averaged.module)]
    with parametrize.cached():
        assert model[0].weight is model[0].weight
        assert torch.equal(model[0].weight, expected[0])
        assert torch.equal(averaged.module[0].weight, expected[1])
    assert isinstance(averaged.module[0], nn.Linear)
    assert type(averaged.module[0]).__name__ == type(model[0]).__name__
    parametrize.remove_parametrizations(averaged.module[0], "weight")
    assert type(averaged.module[0]) is nn.Linear
    assert parametrize.is_parametrized(model[0], "weight")


@pytest.mark.parametrize("cache", CACHES)
def test_the_model_computes_with_what_swapped_and_copy_to_put_into_it(cache):
    make, cached = CACHES[cache]
    model = make()
    averaged = AveragedModel(model, rule=SWA())
    fill(model, 3.0)
    averaged.update_parameters(model)
    fill(model, 1.0)
    with torch.no_grad(), cached():
        before = model(ONE).item()
        with swapped(model, averaged):
            assert model(ONE).item() == 3 * before
        assert model(ONE).item() == before
        averaged.copy_to(model)
        assert model(ONE).item() == 3 * before
