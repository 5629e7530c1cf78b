"""Three ways to begin an EMA with a long memory, early in training."""

from matplotlib.figure import Figure

import functavg
from functavg import EMA
from functavg.schedules import TFWarmup

STEPS = 300
RULES = {
    "EMA(0.999)": (EMA(0.999), "#d55e00"),
    "EMA(0.999, debias=True)": (EMA(0.999, debias=True), "#0072b2"),
    "EMA(TFWarmup(0.999))": (EMA(TFWarmup(0.999)), "#009e73"),
}


def draw() -> Figure:
    figure = Figure(figsize=(8, 3.2))
    axes = figure.subplots()
    for name, (rule, colour) in RULES.items():
        profile = functavg.profile(rule, STEPS)
        axes.plot(profile.times, profile.weights, color=colour, linewidth=2, label=name)
    axes.set(xlabel="step", ylabel=f"weight after {STEPS} steps", yscale="log", ylim=(1e-6, 2))
    axes.annotate("the first iterate, 0.74 of the average", (1, 0.74), (25, 0.35), arrowprops={"arrowstyle": "-"})
    axes.legend(loc="center", bbox_to_anchor=(0.6, 0.72), prop={"family": "monospace", "size": 9})
    return figure
