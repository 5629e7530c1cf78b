"""Decays and the half-lives that they are, and what is left of an iterate after so many steps."""

import numpy as np
from matplotlib.figure import Figure

from functavg import units

DECAYS = {0.9: "#56b4e9", 0.99: "#0072b2", 0.999: "#d55e00", 0.9999: "#332288"}


def draw() -> Figure:
    figure = Figure(figsize=(8, 3.2))
    axes = figure.subplots()
    ages = np.geomspace(1, 1e5, 400)
    for decay, colour in DECAYS.items():
        half_life = units.half_life_from_decay(decay)
        axes.plot(ages, decay**ages, color=colour, linewidth=2, label=f"{decay}")
        axes.plot(half_life, 0.5, "o", color=colour)
        axes.annotate(f"{half_life:,.0f}", (half_life, 0.5), (6, 4), textcoords="offset points", color=colour)
    axes.axhline(0.5, color="0.7", linestyle=":", zorder=0)
    axes.set(xscale="log", xlabel="age of an iterate, in steps", ylabel="what is left of its weight", xlim=(1, 1e5))
    axes.legend(title="decay", loc="upper right")
    return figure
