"""The public names as a user writes them; mypy and pyright check this file, nothing runs it."""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import assert_type

import functavg
from functavg import posthoc, schedules, swa_utils, units

# ---- rules keep the type of the tree

rule = functavg.EMA(0.999)
params: dict[str, Tensor] = {"weight": torch.zeros(2)}
state = rule.init(params, dtype=torch.float64, device="cpu")
assert_type(state, functavg.AverageState[dict[str, Tensor]])
state = rule.update(params, state, steps=2, inplace=True)
assert_type(state.average, dict[str, Tensor])
arrays: list[NDArray[np.float32]] = [np.zeros(2, np.float32)]
assert_type(functavg.SWA().init(arrays).average, list[NDArray[np.float32]])
assert_type(functavg.lerp(params, params, 0.5), dict[str, Tensor])
assert_type(functavg.cast_like(params, params), dict[str, Tensor])
assert_type(rule.extend(params, state), functavg.AverageState[dict[str, Tensor]])
named: dict[str, nn.Parameter] = dict(nn.Linear(2, 2, bias=False).named_parameters())
assert_type(rule.update(named, state).average, dict[str, Tensor])  # the average keeps the type that it has


class Layer(NamedTuple):
    """A tree of the user's."""

    weight: Tensor
    bias: Tensor


layer = Layer(torch.zeros(2, 2), torch.zeros(2))
assert_type(functavg.PowerEMA(6.94).init(layer).average.weight, Tensor)
assert_type(functavg.Every(functavg.EMA(0.9), 10).init(layer), functavg.AverageState[Layer])
assert_type(functavg.Partition({"all": rule}, lambda name, leaf: "all").init(layer).average, Layer)
several = functavg.Several({"fast": functavg.EMA(0.9), "slow": functavg.EMA(0.999)})
averages = several.update(params, several.init(params), inplace=True)
print(averages.average["fast"]["weight"], several.extend(params, averages).average["slow"]["weight"])
saved: dict[str, Any] = functavg.to_state_dict(state)
assert_type(functavg.from_state_dict(state, saved), functavg.AverageState[dict[str, Tensor]])

# ---- rules are values

rules: list[functavg.AveragingRule] = [
    functavg.EMA.from_half_life(1000.0),
    functavg.EMA(schedules.TFWarmup(0.999)),
    functavg.PowerEMA.from_sigma_rel(0.1),
    functavg.LAWA(10),
    functavg.WeightFn(lambda count, steps: steps / (count + steps)),
    functavg.AvgFn(lambda average, new, count: average + (new - average) / (count + 1)),
    functavg.AvgFn(functavg.get_swa_multi_avg_fn(), grouped=True),
    functavg.Every(functavg.SkipNonFinite(functavg.SWA()), 10, start=100),
    functavg.Several({"fast": functavg.EMA(0.9), "slow": functavg.Freeze()}),
    functavg.Partition({"all": functavg.Latest()}, lambda name, leaf: "all"),
]


@dataclass(frozen=True)
class Half(functavg.WeightRule):
    """A rule of the user's."""

    def weight(self, count: Any, steps: Any) -> Any:
        return 0.5


profile = functavg.profile(Half(), 10, progress=lambda done, total: None)
assert_type(profile, functavg.Profile)
assert_type(functavg.profile(functavg.LAWA(3), [1, 2]), functavg.Profile)
assert_type(functavg.profile(functavg.Several({"fast": functavg.EMA(0.9)}), 10), dict[str, Any])
assert_type(functavg.profile(functavg.Partition({1: functavg.EMA(0.9)}, {"w": 1}), 10), dict[Any, Any])
assert_type(functavg.profile(functavg.Every(functavg.SWA(), 2), 10), Any)
assert_type(profile.mean_age, float)
assert_type(profile.weights, NDArray[np.float64])
assert_type(units.decay_from_half_life(10.0), float)
assert_type(posthoc.combine([params, params], [-1, 2], progress=True), dict[str, Tensor])
assert_type(posthoc.merge_coefficients("linear", 5), NDArray[np.float64])

# ---- modules

model = nn.Linear(2, 2)
averaged = functavg.AveragedModel(model, rule=rule, dtype=torch.float32, share=lambda name, tensor: name == "bias")
assert_type(averaged, functavg.AveragedModel[nn.Linear])
assert_type(averaged.module, nn.Linear)
assert_type(averaged.to("cpu").module.in_features, int)
averaged.update_parameters(model, steps=3)
handle = averaged.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
handle.remove()
with functavg.swapped(model, averaged) as inside:
    assert_type(inside, nn.Linear)
with averaged.swapped(model, backup_device="cpu") as inside:
    assert_type(inside, nn.Linear)
averaged.copy_to(model)
assert_type(averaged.rule, functavg.AveragingRule)
functavg.update_bn([torch.zeros(2, 2)], averaged, device="cpu")
functavg.update_bn(({"x": torch.zeros(2, 2)} for _ in range(2)), averaged)
functavg.soft_update(averaged.module, model, 0.005)
functavg.soft_update([averaged.module], (model,), torch.tensor(0.005), buffers="average")
swa_utils.AveragedModel(model, None, swa_utils.get_ema_avg_fn(0.9), use_buffers=lambda name, buffer: "mean" in name)


def evaluate(weights: Mapping[str, Tensor]) -> None:
    """Take an average where weights are wanted."""
    with functavg.swapped(model, weights):
        pass


def holds(average: functavg.AveragedModel) -> nn.Module:
    """Name the class without that of its module."""
    return average.module


def average_of(average: functavg.AveragedModel[nn.Linear]) -> Tensor:
    """Name the class with that of its module."""
    return average.module.weight


assert_type(holds(averaged), nn.Module)
assert_type(average_of(averaged), Tensor)


# ---- what is wrong is found: an ignore without an error is an error

functavg.EMA("0.9")  # type: ignore[arg-type]
functavg.SWA().init([1.0]).average.keys()  # type: ignore[attr-defined]
functavg.SWA().update([1.0], [1.0])  # type: ignore[arg-type]
functavg.Several({"fast": functavg.EMA})  # type: ignore[dict-item]
functavg.AveragedModel(1)  # type: ignore[type-var]
functavg.AveragedModel(nn.Linear(1, 1)).module.nonsense()  # type: ignore[operator]
with functavg.swapped(model, averaged) as inside:
    inside.out_features.nonsense()  # type: ignore[attr-defined]
