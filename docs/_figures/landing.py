"""What averages of weights gain: SGD with a constant learning rate on a loss of two weights, and two averages."""

import numpy as np
from matplotlib.figure import Figure

import functavg

CURVATURE = np.array([1.0, 0.6])
STEPS, LEARNING_RATE, NOISE = 600, 0.25, 2.0
COLOURS = {"weights": "0.6", "SWA": "#0072b2", "EMA": "#d55e00"}


def loss(x: np.ndarray) -> np.ndarray:
    return (CURVATURE * x**2).sum(-1) / 2


def paths() -> dict[str, np.ndarray]:
    """Return the weights of each step and the averages of them."""
    rng = np.random.default_rng(3)
    rule = functavg.Several({"SWA": functavg.Every(functavg.SWA(), 1, start=100), "EMA": functavg.EMA(0.98)})
    x = np.array([-5.0, 6.0])
    state = rule.init({"x": x})
    found = {name: [x] for name in COLOURS}
    for _ in range(STEPS):
        x = x - LEARNING_RATE * (CURVATURE * x + NOISE * rng.normal(size=2))
        state = rule.update({"x": x}, state)
        found["weights"].append(x)
        for name, average in state.average.items():
            found[name].append(average["x"] if state.memory[name].count else np.full(2, np.nan))
    return {name: np.array(rows) for name, rows in found.items()}


def draw() -> Figure:
    figure = Figure(figsize=(9, 3.8))
    plane, curves = figure.subplots(1, 2)
    grid = np.stack(np.meshgrid(np.linspace(-6, 4, 200), np.linspace(-4, 7, 200)), -1)
    plane.contour(grid[..., 0], grid[..., 1], np.sqrt(loss(grid)), levels=10, colors="0.88", linewidths=0.8)
    for name, path in paths().items():
        plain = name == "weights"
        plane.plot(*path.T, color=COLOURS[name], linewidth=0.7 if plain else 2, label=name)
        plane.plot(*path[-1], "o", color=COLOURS[name], markersize=6)
        curves.plot(loss(path), color=COLOURS[name], linewidth=0.8 if plain else 2, label=name)
    plane.plot(0, 0, "+", color="black", markersize=12)
    plane.set(title="two weights during training", xlabel="first weight", ylabel="second weight")
    plane.grid(False)
    curves.set(title="loss", xlabel="step", yscale="log", ylim=(5e-4, 30))
    curves.legend(loc="upper right", ncols=3)
    return figure
