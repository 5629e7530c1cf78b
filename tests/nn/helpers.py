"""What the tests of the adapters share: models, averages beside the oracle, snapshots that tell every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functavg
from functavg import AveragedModel
from functavg.combinators import Every, Partition, Several, SkipNonFinite
from functavg.rules.lawa import LAWA
from tests import oracle
from tests.tables import RULES, ema_step, mean_step

LOW = (torch.bfloat16, torch.float16)
FLOAT32 = 2e-6
"""What float32 averages of numbers around 1 may differ from the float64 sum."""

# ---- models


class Net(nn.Module):
    """A little of what models have: layers, a BatchNorm, a tied parameter, an integer and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.hidden = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.hidden[1].weight = self.inputs.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("ids", torch.arange(4))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inputs(x))
        for layer in self.hidden:
            x = layer(x)
        return x * self.scale


def scalar(value: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """Return a Linear with one weight and nothing else."""
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    fill(model, value)
    return model


@torch.no_grad()
def fill(model: nn.Module, value: float) -> None:
    """Give all parameters one value."""
    for parameter in model.parameters():
        parameter.fill_(value)


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Give all parameters and buffers new values, as a training step would."""
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items()):
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        else:
            tensor.copy_(torch.randint(0, 9, tensor.shape, generator=generator))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by all their names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def numbers(model: nn.Module) -> dict[str, np.ndarray]:
    """Return copies of the values of all parameters and buffers, real ones in float64."""
    return {
        name: (tensor.detach().double() if tensor.is_floating_point() else tensor.detach()).numpy().copy()
        for name, tensor in tensors(model).items()
    }


# ---- ways to average

FUNCTIONS: dict[str, tuple[dict[str, Any], oracle.Profile]] = {
    "get_ema_avg_fn": ({"avg_fn": functavg.get_ema_avg_fn(0.9)}, oracle.ema(0.9)),
    "get_ema_multi_avg_fn": ({"multi_avg_fn": functavg.get_ema_multi_avg_fn(0.9)}, oracle.ema(0.9)),
    "get_swa_avg_fn": ({"avg_fn": functavg.get_swa_avg_fn()}, oracle.swa),
    "get_swa_multi_avg_fn": ({"multi_avg_fn": functavg.get_swa_multi_avg_fn()}, oracle.swa),
    "default": ({}, oracle.swa),
    "avg_fn": ({"avg_fn": ema_step}, oracle.ema(0.75)),
}
RULE_ARGUMENTS: dict[str, tuple[dict[str, Any], oracle.Profile]] = {
    name: ({"rule": row.rule}, row.profile) for name, row in RULES.items()
}


def multi_step(averages: list[Tensor], news: list[Tensor], count: Tensor) -> None:
    """A user's multi_avg_fn: an EMA of decay 0.75."""
    torch._foreach_lerp_(averages, news, 0.25)


def is_weight(name: str, leaf: Any) -> str:
    """Label leaves for a Partition."""
    return "weights" if name.endswith("weight") else "rest"


WAYS = FUNCTIONS | RULE_ARGUMENTS
"""Arguments that make an AveragedModel without memory, with the profile of its weights over the steps."""
WAYS["multi_avg_fn"] = ({"multi_avg_fn": multi_step}, oracle.ema(0.75))
WAYS["AvgFn-grouped"] = ({"rule": functavg.AvgFn(multi_step, grouped=True)}, oracle.ema(0.75))

REMEMBERING: dict[str, dict[str, Any]] = {
    "LAWA": {"rule": LAWA(3)},
    "Every": {"rule": Every(functavg.EMA(0.9), 2)},
    "Every-AvgFn": {"rule": Every(functavg.AvgFn(mean_step), 2)},
    "Every-start": {"rule": Every(LAWA(2), 2, start=1)},
    "SkipNonFinite": {"rule": SkipNonFinite(functavg.EMA(0.9))},
    "Several": {"rule": Several({"fast": functavg.EMA(0.5), "slow": LAWA(2)})},
    "Several-nested": {"rule": Every(Several({"a": functavg.SWA(), "b": functavg.EMA(0.9)}), 2)},
    "Partition": {"rule": Partition({"weights": functavg.EMA(0.9), "rest": LAWA(2)}, is_weight)},
}
"""Those with a memory beside the module."""
EVERY_WAY = {name: arguments for name, (arguments, _) in WAYS.items()} | REMEMBERING


class Course:
    """A model that changes at every step, its average, and what the oracle makes of the same iterates.

    ``averaged`` has to be a new average of ``model``.
    """

    def __init__(
        self, averaged: AveragedModel, model: nn.Module, profile: oracle.Profile, seed: int = 0, buffers: bool = False
    ) -> None:
        self.averaged, self.model, self.profile, self.seed, self.buffers = averaged, model, profile, seed, buffers
        self.iterates = [numbers(averaged.module)]
        self.steps: list[int] = []

    def go(self, updates: int = 3, steps: int = 1) -> Course:
        for _ in range(updates):
            self.seed += 1
            randomise(self.model, self.seed)
            self.iterates.append(numbers(self.model))
            self.steps.append(steps)
            self.averaged.update_parameters(self.model, steps=steps)
        return self

    def expected(self) -> dict[str, np.ndarray]:
        """Return the averages of the parameters (and averaged buffers), and the newest values of the other buffers."""
        weights, newest = self.profile(self.steps), oracle.newest(self.steps)
        averaged = set(dict(self.model.named_parameters(remove_duplicate=False)))
        if self.buffers:
            real = {name for name, buffer in self.model.named_buffers() if buffer.is_floating_point()}
            averaged |= real & self.model.state_dict().keys()  # what is not persistent is copied
        return {
            name: oracle.average(weights if name in averaged else newest, [it[name] for it in self.iterates])
            for name in self.iterates[-1]
        }

    def check(self, tolerance: float = FLOAT32, rounding: float = 0.0) -> None:
        """Assert that the average is that of the oracle, that the module holds it, and that the count is right.

        ``rounding`` is what conversions since the last update may have taken from buffers that are only copied.
        """
        wanted, average = self.expected(), self.averaged.state.average
        held = tensors(self.averaged.module)
        assert held.keys() == wanted.keys()
        assert average.keys() >= set(dict(self.averaged.module.named_parameters()))
        for name, value in wanted.items():
            if name in average:
                np.testing.assert_allclose(
                    average[name].double().numpy(), value, rtol=tolerance, atol=4 * tolerance, err_msg=name
                )
                assert torch.equal(average[name].to(held[name].dtype), held[name])
            else:
                own = held[name].double() if held[name].is_floating_point() else held[name]
                copied = max(rounding, torch.finfo(held[name].dtype).eps) if held[name].is_floating_point() else 0.0
                np.testing.assert_allclose(own.numpy(), value, rtol=copied, err_msg=name)
        counted = self.averaged.n_averaged
        assert counted.dtype == torch.int64
        assert counted.shape == ()
        assert int(counted) == sum(self.steps)


def quarter(model: nn.Module, **arguments: Any) -> AveragedModel:
    """Return an average of a model that has seen 0 once; the next value, which the model has now, weighs 0.25."""
    averaged = AveragedModel(model, rule=functavg.EMA(0.75), **arguments)
    fill(model, 0.0)
    averaged.update_parameters(model)
    fill(model, 1.0)
    return averaged


def all_values(averaged: AveragedModel) -> set[float]:
    """Return all numbers that the parameters of an average hold."""
    return {value for parameter in averaged.module.parameters() for value in parameter.flatten().tolist()}


# ---- snapshots


def bits(value: Any) -> Any:
    """Return a value in a form that is equal only if every bit of it is."""
    if not isinstance(value, Tensor):
        return value
    dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
    flat = dense.contiguous().reshape(-1)
    return value.dtype, value.shape, flat.view(torch.uint8).tolist() if flat.numel() else []


def contents(averaged: AveragedModel) -> dict[str, Any]:
    """Return all that an update may change, bit by bit."""
    state = averaged.state
    paths, leaves, _ = optree.tree_flatten_with_path((state.average, state.memory))
    found = {"n_averaged": bits(averaged.n_averaged), "count": state.count}
    found |= {f"module.{name}": bits(tensor) for name, tensor in tensors(averaged.module).items()}
    return found | {f"state{path}": bits(leaf) for path, leaf in zip(paths, leaves, strict=True)}


def parameters_of(model: nn.Module) -> dict[str, Any]:
    """Return all tensors of a model, bit by bit."""
    return {name: bits(tensor) for name, tensor in tensors(model).items()}


@contextmanager
def unchanged(*models: nn.Module) -> Iterator[None]:
    """Assert that models, averages among them, have the same bits afterwards, whatever is raised."""
    before = [_snapshot(model) for model in models]
    try:
        yield
    finally:
        assert [_snapshot(model) for model in models] == before


def _snapshot(model: nn.Module) -> dict[str, Any]:
    return contents(model) if isinstance(model, AveragedModel) else parameters_of(model)


# ---- distributed


@contextmanager
def alone() -> Iterator[None]:
    """A process group of gloo with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _GROUPS.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


_GROUPS: list[Any] = []
"""Groups are kept alive: one that is freed waits for its thread with the GIL held, for which the thread may wait."""


Method = Callable[[AveragedModel], Any]
