"""An EMA over samples when the batch grows eightfold, with the old decay and with the scaled one."""

import numpy as np
from matplotlib.figure import Figure

import functavg
from functavg import EMA, units

DECAY, BATCH, FACTOR, SAMPLES = 0.999, 32, 8, 200_000
LARGE = BATCH * FACTOR


def draw() -> Figure:
    figure = Figure(figsize=(8, 3.2))
    axes = figure.subplots()
    contenders = [
        (f"batch {BATCH}, decay {DECAY}", DECAY, BATCH, "0.55", "-"),
        (f"batch {LARGE}, the same decay", DECAY, LARGE, "#d55e00", "-"),
        (f"batch {LARGE}, scale_decay({DECAY}, {FACTOR})", units.scale_decay(DECAY, FACTOR), LARGE, "#0072b2", "--"),
    ]
    for label, decay, batch, colour, style in contenders:
        profile = functavg.profile(EMA(decay, debias=True), SAMPLES // batch)
        samples = profile.times * batch
        axes.plot(samples, np.cumsum(profile.weights), color=colour, linestyle=style, linewidth=2, label=label)
    axes.set(xlabel="samples seen", ylabel="part of the average made\nby iterates up to there", ylim=(0, 1))
    axes.legend(loc="upper left")
    return figure
