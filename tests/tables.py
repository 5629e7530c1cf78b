"""What the contract tests run over: rules, kinds of leaves, trees.

A new rule is one row of ``RULES``: the rule and the oracle of its weights (see ``tests.oracle``).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import optree
import torch

import functavg
from functavg import AveragingRule, WeightRule
from tests import oracle

try:
    import jax.numpy as jnp
except ImportError:
    jnp = None
try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

# ---- rules


@dataclass(frozen=True)
class RuleRow:
    """A rule and what the oracle knows of it."""

    rule: AveragingRule
    profile: oracle.Profile
    copies_first: bool = True
    """Whether the first update copies; those that trust a user's function from the first call do not."""
    count: Callable[[Sequence[int]], int] = sum
    """The count after updates of these steps."""

    @property
    def is_weight_rule(self) -> bool:
        return isinstance(self.rule, WeightRule)


def ramp(u: Any) -> Any:
    """A decay that warms up; a module's function, so that rules with it pickle."""
    return (u + 1) / (u + 9)


def quarter(count: Any, steps: Any) -> float:
    return 0.25


def fading(count: Any, steps: Any) -> Any:
    return steps / (count + steps + 1)


def ema_step(average: Any, new: Any, count: Any) -> Any:
    return 0.75 * average + 0.25 * new


def mean_step(average: Any, new: Any, count: Any) -> Any:
    return average + (new - average) / (count + 1)


RULES = {
    "EMA": RuleRow(functavg.EMA(0.9), oracle.ema(0.9)),
    "EMA-0": RuleRow(functavg.EMA(0.0), oracle.newest),
    "EMA-1": RuleRow(functavg.EMA(1.0), oracle.ema(1.0)),
    "EMA-debias": RuleRow(functavg.EMA(0.9, debias=True), oracle.debiased_ema(0.9)),
    "EMA-1-debias": RuleRow(functavg.EMA(1.0, debias=True), oracle.debiased_ema(1.0)),
    "EMA-callable": RuleRow(
        functavg.EMA(ramp), oracle.of_weights(lambda n, d: 1 - ((n + d + 1) / (n + d + 9)) ** d), copies_first=False
    ),
    "EMA-init": RuleRow(
        functavg.EMA(0.9, start="init"), oracle.of_weights(lambda n, d: 1 - 0.9**d), copies_first=False
    ),
    "EMA-callable-copy": RuleRow(
        functavg.EMA(ramp, start="copy"),
        oracle.of_weights(lambda n, d: 1 - ((n + d + 1) / (n + d + 9)) ** d if n else 1.0),
    ),
    "EMA-half-life": RuleRow(functavg.EMA.from_half_life(3), oracle.ema(2 ** (-1 / 3))),
    "SWA": RuleRow(functavg.SWA(), oracle.swa),
    "PowerEMA": RuleRow(functavg.PowerEMA(6.94), oracle.power(6.94)),
    "PowerEMA-0": RuleRow(functavg.PowerEMA(0), oracle.swa),
    "PowerEMA-sigma": RuleRow(functavg.PowerEMA.from_sigma_rel(0.15), oracle.power(oracle.gamma(0.15))),
    "WeightFn": RuleRow(functavg.WeightFn(quarter), oracle.of_weights(lambda n, d: 0.25), copies_first=False),
    "WeightFn-fading": RuleRow(
        functavg.WeightFn(fading), oracle.of_weights(lambda n, d: d / (n + d + 1)), copies_first=False
    ),
    "AvgFn": RuleRow(functavg.AvgFn(ema_step), oracle.of_calls(oracle.ema(0.75)), count=len),
    "AvgFn-mean": RuleRow(functavg.AvgFn(mean_step), oracle.of_calls(oracle.swa), count=len),
    "LAWA": RuleRow(functavg.LAWA(3), oracle.window(3)),
    "LAWA-1": RuleRow(functavg.LAWA(1), oracle.newest),
    "Latest": RuleRow(functavg.Latest(), oracle.newest),
    "Freeze": RuleRow(functavg.Freeze(), oracle.first, copies_first=False),
}
WEIGHT_RULES = {name: row for name, row in RULES.items() if row.is_weight_rule}

# Rows that take the same path through the code as another one: left out where each row costs a compilation.
ALIKE = {
    *("EMA-0", "EMA-1", "EMA-1-debias", "EMA-init", "EMA-half-life"),
    *("PowerEMA-0", "PowerEMA-sigma", "WeightFn", "LAWA-1"),
}

# ---- kinds of leaves


@dataclass(frozen=True)
class Kind:
    """A kind of leaves: how to make one of a numpy array, and what its average is held in."""

    make: Callable[[np.ndarray], Any]
    held: str
    kind: str = "f"
    """Of the values: f, c, i, u or b as in numpy."""
    mutable: bool = True

    @property
    def tolerance(self) -> float:
        return {"float32": 2e-6, "complex64": 2e-6, "float64": 1e-13, "complex128": 1e-13}.get(self.held, 0.0)


def _torch(dtype: torch.dtype) -> Callable[[np.ndarray], torch.Tensor]:
    return lambda array: torch.from_numpy(np.array(array)).to(dtype)


def _numpy(dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.array(array).astype(dtype)


KINDS = {
    "torch-float32": Kind(_torch(torch.float32), "float32"),
    "torch-float64": Kind(_torch(torch.float64), "float64"),
    "torch-bfloat16": Kind(_torch(torch.bfloat16), "float32"),
    "torch-float16": Kind(_torch(torch.float16), "float32"),
    "torch-float8": Kind(_torch(torch.float8_e4m3fn), "float32"),
    "torch-complex64": Kind(_torch(torch.complex64), "complex64", "c"),
    "torch-complex128": Kind(_torch(torch.complex128), "complex128", "c"),
    "torch-int64": Kind(_torch(torch.int64), "int64", "i"),
    "torch-uint8": Kind(_torch(torch.uint8), "uint8", "u"),
    "torch-bool": Kind(_torch(torch.bool), "bool", "b"),
    "torch-parameter": Kind(lambda array: torch.nn.Parameter(_torch(torch.float32)(array)), "float32"),
    "numpy-float32": Kind(_numpy(np.float32), "float32"),
    "numpy-float64": Kind(_numpy(np.float64), "float64"),
    "numpy-float16": Kind(_numpy(np.float16), "float32"),
    "numpy-complex64": Kind(_numpy(np.complex64), "complex64", "c"),
    "numpy-int8": Kind(_numpy(np.int8), "int8", "i"),
    "numpy-bool": Kind(_numpy(np.bool_), "bool", "b"),
}
if ml_dtypes is not None:
    KINDS |= {
        "numpy-bfloat16": Kind(_numpy(ml_dtypes.bfloat16), "float32"),
        "numpy-float8": Kind(_numpy(ml_dtypes.float8_e4m3fn), "float32"),
    }
if jnp is not None:
    KINDS |= {
        "jax-float32": Kind(lambda array: jnp.asarray(array, jnp.float32), "float32", mutable=False),
        "jax-bfloat16": Kind(lambda array: jnp.asarray(array, jnp.bfloat16), "float32", mutable=False),
        "jax-float16": Kind(lambda array: jnp.asarray(array, jnp.float16), "float32", mutable=False),
        "jax-float8": Kind(lambda array: jnp.asarray(array, jnp.float8_e4m3fn), "float32", mutable=False),
        "jax-complex64": Kind(lambda array: jnp.asarray(array, jnp.complex64), "complex64", "c", mutable=False),
        "jax-int32": Kind(lambda array: jnp.asarray(array, jnp.int32), "int32", "i", mutable=False),
        "jax-bool": Kind(lambda array: jnp.asarray(array, jnp.bool_), "bool", "b", mutable=False),
    }
SCALARS = {
    "python-float": Kind(float, "float64"),
    "python-complex": Kind(complex, "complex128", "c"),
    "python-int": Kind(int, "int64", "i"),
    "python-bool": Kind(bool, "bool", "b"),
    "numpy-scalar": Kind(np.float32, "float32"),
}
LIBRARIES = {name: KINDS[name] for name in ("torch-float32", "numpy-float32", "jax-float32") if name in KINDS}

# ---- trees


class Layer(NamedTuple):
    weight: Any
    bias: Any


Leaf = Callable[..., Any]
TREES: dict[str, Callable[[Leaf], Any]] = {
    "leaf": lambda leaf: leaf(2, 3),
    "dict": lambda leaf: {"weight": leaf(3, 2), "bias": leaf(3), "scale": leaf()},
    "list": lambda leaf: [leaf(2), (leaf(), [leaf(1, 2)])],
    "ordered": lambda leaf: collections.OrderedDict(z=leaf(2), a=leaf(3)),
    "namedtuple": lambda leaf: {"encoder": Layer(leaf(2, 2), leaf(2)), "head": Layer(leaf(2), None)},
    "hollow": lambda leaf: {"none": None, "empty": {}, "size0": leaf(0, 2), "w": leaf(2)},
    "no leaves": lambda leaf: {},
}

# ---- streams of iterates


def values(kind: str, shape: Sequence[int], generator: np.random.Generator) -> np.ndarray:
    """Return random values that every dtype of this kind holds exactly."""
    if kind == "b":
        return generator.integers(0, 2, shape).astype(bool)
    if kind in "iu":
        return generator.integers(0, 100, shape)
    steps = np.asarray(generator.integers(-8, 9, shape) / 4.0)
    return steps + 1j * generator.integers(-8, 9, shape) / 4.0 if kind == "c" else steps


def stream(tree: Callable[[Leaf], Any], kind: str, length: int, seed: int = 0) -> list[Any]:
    """Return successive trees of numpy arrays: what ``init`` sees, then the iterates."""
    generator = np.random.default_rng(seed)
    return [tree(lambda *shape: values(kind, shape, generator)) for _ in range(length)]


def made(kind: Kind, tree: Any) -> Any:
    """Return a tree of numpy arrays as one of leaves of a kind."""
    return optree.tree_map(kind.make, tree)


def read(leaf: Any) -> np.ndarray:
    """Return the values of a leaf, real ones in float64."""
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach()
        if leaf.dtype.is_floating_point:
            leaf = leaf.double()
        return leaf.resolve_conj().numpy()
    array = np.asarray(leaf)
    return array if array.dtype.kind in "biuc" else array.astype(np.float64)


def dtype_name(leaf: Any) -> str:
    return str(leaf.dtype).removeprefix("torch.")


def expected(weights: np.ndarray, iterates: Sequence[Any]) -> Any:
    """Return the oracle's average of trees of numpy arrays."""
    return optree.tree_map(lambda *leaves: oracle.average(weights, leaves), *iterates)


def assert_close(tree: Any, wanted: Any, tolerance: float) -> None:
    """Assert that a tree has the structure and the values of a tree of numpy arrays."""
    assert optree.tree_structure(tree) == optree.tree_structure(wanted)
    for leaf, value in zip(optree.tree_leaves(tree), optree.tree_leaves(wanted), strict=True):
        assert read(leaf).shape == value.shape
        np.testing.assert_allclose(read(leaf), value, rtol=tolerance, atol=4 * tolerance)
