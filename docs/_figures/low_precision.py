"""An EMA of bfloat16 weights that go from 1 to 2: held in bfloat16, and held in float32 as functavg does by default."""

import torch
from matplotlib.figure import Figure

import functavg

STEPS = 3000
DECAYS = {0.99: "#56b4e9", 0.999: "#d55e00", 0.9999: "#332288"}


def averages(decay: float, dtype: torch.dtype | None) -> list[float]:
    rule = functavg.EMA(decay)
    before, after = (torch.full((), value, dtype=torch.bfloat16) for value in (1.0, 2.0))
    state = rule.update(before, rule.init(before, dtype=dtype))
    values = [1.0]
    for _ in range(STEPS):
        state = rule.update(after, state, inplace=True)
        values.append(state.average.item())
    return values


def draw() -> Figure:
    figure = Figure(figsize=(8, 3.4))
    axes = figure.subplots()
    for decay, colour in DECAYS.items():
        axes.plot(averages(decay, None), color=colour, linewidth=2, label=f"{decay}, float32")
        axes.plot(averages(decay, torch.bfloat16), color=colour, linewidth=2, linestyle=":", label=f"{decay}, bfloat16")
    axes.axhline(2, color="0.8", zorder=0)
    axes.set(xlabel="steps after the weights went from 1 to 2", ylabel="average", ylim=(0.95, 2.05))
    axes.legend(title="decay, dtype of the average", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure
