"""The handwritten digits of scikit-learn, split once, and what the tests measure on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import oracle


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images of 8 x 8 with their labels: 512 to train on and 256 to test with."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels, dtype=torch.int64)
    return x[:512], y[:512], x[512:768], y[512:768]


def snapshot(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters that are trained."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def weighted(profile: oracle.Profile, iterates: Sequence[Mapping[str, Tensor]]) -> dict[str, np.ndarray]:
    """Return the average of iterates, one step apart, as a weighted sum in float64."""
    weights = profile([1] * len(iterates))[1:]
    return {
        name: oracle.average(weights, [iterate[name].double().numpy() for iterate in iterates]) for name in iterates[0]
    }


def assert_close(average: Mapping[str, Tensor], expected: Mapping[str, np.ndarray]) -> None:
    assert average.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(average[name].double().numpy(), value, rtol=1e-5, atol=1e-7, err_msg=name)


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Assert that two flat dicts of numbers and tensors are equal to the bit."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, Tensor):
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name
