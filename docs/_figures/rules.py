"""The weight that each of a thousand iterates has in an average, rule by rule."""

from matplotlib.figure import Figure

import functavg
from functavg import EMA, LAWA, SWA, Every, PowerEMA

STEPS = 1000
RULES = {
    "EMA.from_half_life(100)": (EMA.from_half_life(100), "recent iterates, older ones less and less"),
    "EMA(…, debias=True)": (EMA.from_half_life(700, debias=True), "the same, fair to the first ones"),
    "Every(SWA(), 1, start=500)": (Every(SWA(), 1, start=500), "all iterates from a step on, equally"),
    "PowerEMA.from_sigma_rel(0.1)": (PowerEMA.from_sigma_rel(0.1), "as wide as training is long"),
    "Every(LAWA(5), 50)": (Every(LAWA(5), 50), "the last five snapshots, equally"),
    "Every(EMA.from_half_life(100), 50)": (Every(EMA.from_half_life(100), 50), "an EMA of snapshots, as long a memory"),
}


def draw() -> Figure:
    figure = Figure(figsize=(9, 5.2))
    for axes, (name, (rule, says)) in zip(figure.subplots(2, 3, sharex=True).flat, RULES.items(), strict=True):
        functavg.profile(rule, STEPS).plot(axes, color="#0072b2")
        axes.get_legend().remove()
        axes.set_title(f"{name}\n", fontsize=9, family="monospace", loc="left")
        axes.text(0, 1.03, says, fontsize=8.5, color="0.35", transform=axes.transAxes)
        axes.set(xlabel="", ylabel="", ylim=(0, None), yticks=[])
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("weight in the average after 1000 steps", fontsize=10)
    return figure
