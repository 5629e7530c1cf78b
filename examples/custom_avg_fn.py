"""Averages of your own: an avg_fn, a multi_avg_fn and a weight rule, all of them inside AveragedModel.

Each is a value that pickles, so a checkpoint can hold the whole AveragedModel.

    python examples/custom_avg_fn.py
"""

import io
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import functavg


@dataclass(frozen=True)
class ClippedEMA:
    """An avg_fn: an EMA whose steps are at most ``limit`` long in each coordinate, so that no outlier pulls it away."""

    decay: float
    limit: float

    def __call__(self, average: Tensor, new: Tensor, n_averaged: Tensor) -> Tensor:
        return average + ((1 - self.decay) * (new - average)).clamp(-self.limit, self.limit)


@dataclass(frozen=True)
class StartAfter:
    """A multi_avg_fn made of another one, which gets to see all models but the first ``start``."""

    fn: Callable[[list[Tensor], list[Tensor], Tensor], object]
    start: int

    def __call__(self, averages: list[Tensor], news: list[Tensor], n_averaged: Tensor) -> None:
        if n_averaged < self.start:
            torch._foreach_copy_(averages, news)
        else:
            self.fn(averages, news, n_averaged - self.start)


@dataclass(frozen=True)
class MeanThenEMA(functavg.WeightRule):
    """A rule of one formula: the equal mean until its weights are as small as those of the EMA, and then that."""

    decay: float

    def weight(self, count: float, steps: float) -> float:
        return max(steps / (count + steps), 1 - self.decay**steps)


def main() -> None:
    model = nn.Linear(1, 1, bias=False)
    variants = {
        "avg_fn": functavg.AveragedModel(model, avg_fn=ClippedEMA(0.5, limit=1.0)),
        "multi_avg_fn": functavg.AveragedModel(model, multi_avg_fn=StartAfter(functavg.get_swa_multi_avg_fn(), 2)),
        "rule": functavg.AveragedModel(model, rule=MeanThenEMA(0.75)),
    }
    for step, value in enumerate((0.0, 1.0, 2.0, 30.0, 4.0)):
        nn.init.constant_(model.weight, value)
        for name, averaged in variants.items():
            if step == 2:  # as if the run had been interrupted here
                file = io.BytesIO()
                torch.save(averaged, file)
                file.seek(0)
                averaged = variants[name] = torch.load(file, weights_only=False)
            averaged.update_parameters(model)
    print("average of the weights 0, 1, 2, 30, 4, saved and loaded after the second")
    for name, averaged in variants.items():
        print(f"{name:12}  {averaged.module.weight.item():6.3f}  {averaged.rule}")


if __name__ == "__main__":
    main()
