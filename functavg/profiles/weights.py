"""The profile of an average, and what follows from it."""

from __future__ import annotations

__all__ = ["Profile"]

import math
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEMS = 60
"""Up to so many iterates, each is drawn as a line of its own."""


@dataclass(frozen=True, eq=False, repr=False)
class Profile:
    """The weight that each past iterate has in an average: ``average = initial * a_0 + sum_i weights[i] * x_i``.

    With ``p_i`` the ``weights``, ``t_i`` the ``times``, ``T`` the last of them (``steps``), ``p_0`` the ``initial``
    weight, on the model at ``t_0 = 0``, and every sum over all ``i`` from 0, the derived figures are those of the
    distribution ``q_i = p_i / total``, ``total = sum_i p_i``.

    Attributes:
        weights: float64, one weight an update, the oldest first. Together with ``initial`` they sum to 1, if the
            average keeps constants, as those of rules do.
        times: the step at which each iterate was averaged in, the sum of the gaps so far; of the shape of ``weights``.
        initial: the weight left on the model that the average started from. Default: 0.
        name: what was averaged by, for tables and plots. Default: ``"average"``.

    Raises:
        ValueError: ``weights`` and ``times`` are not vectors of one length of at least 1, a weight is not finite, or
            ``times`` do not increase from above 0.

    Example:
        >>> import functavg
        >>> ema = functavg.profile(functavg.EMA(0.9), 1000)
        >>> print(ema)
        EMA(decay=0.9, debias=False, start='copy') after 1000 steps
          mean age            9 steps
          std                 9.487 steps
          sigma_rel           0.009487
          half-life           6.579 steps
          effective iterates  19
          newest weight       0.1
          initial weight      0

    Source: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, 2024 (EDM2), for the
    profile and its relative width.
    """

    weights: NDArray[np.float64]
    times: NDArray[np.int64]
    _: KW_ONLY
    initial: float = 0.0
    name: str = "average"

    def __post_init__(self) -> None:
        weights = np.array(self.weights, dtype=np.float64)
        times = np.array(self.times, dtype=np.int64)
        if weights.ndim != 1 or weights.shape != times.shape or not weights.size:
            raise ValueError(
                "weights and times must be vectors of one length of at least 1, "
                f"got shapes {weights.shape} and {times.shape}"
            )
        if not (np.isfinite(weights).all() and math.isfinite(self.initial)):
            raise ValueError(f"weights and initial must be finite, got {weights} and {self.initial!r}")
        if not (times[0] > 0 and (np.diff(times) > 0).all()):
            raise ValueError(f"times must increase from above 0, got {times}")
        for name, array in (("weights", weights), ("times", times)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        object.__setattr__(self, "initial", float(self.initial))

    @property
    def steps(self) -> int:
        """``T``, the step after which the profile was taken."""
        return int(self.times[-1])

    @cached_property
    def total(self) -> float:
        """``sum_i p_i``, 1 for every average that keeps constants."""
        return math.fsum([self.initial, *self.weights.tolist()])

    @cached_property
    def mean_age(self) -> float:
        """``m = sum_i q_i (T - t_i)``, in steps: how old the average is; 0 for the newest iterate itself."""
        ages = float(self.weights @ (self.times[-1] - self.times).astype(np.float64))
        return self._divide(ages + self.initial * self.steps)

    @cached_property
    def std(self) -> float:
        """``sqrt(sum_i q_i (T - t_i - m)^2)``, in steps; NaN where negative weights leave no variance."""
        squares = float(self.weights @ (self.times[-1] - self.times - self.mean_age) ** 2)
        variance = self._divide(squares + self.initial * (self.steps - self.mean_age) ** 2)
        return math.sqrt(variance) if variance >= 0 else math.nan

    @property
    def sigma_rel(self) -> float:
        """``std / T``: the width relative to the length of training (EDM2)."""
        return self.std / self.steps

    @property
    def half_life(self) -> float:
        """``ln 2 / ln(1 + 1/m)``, in steps: the half-life of the long-running EMA that has the same mean age ``m``."""
        if not self.mean_age > 0:
            return 0.0 if self.mean_age == 0 else math.nan
        return math.log(2) / math.log1p(1 / self.mean_age)

    @cached_property
    def effective_iterates(self) -> float:
        """``1 / sum_i q_i^2``: an equal mean of so many iterates would suppress their independent noise as much."""
        squares = float(self.weights @ self.weights) + self.initial**2
        return self.total**2 / squares if squares else math.nan

    def _divide(self, value: float) -> float:
        return value / self.total if self.total else math.nan

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the weights over the steps.

        Args:
            ax: what to draw into. Default: a new figure's.
            options: colours, widths and the like, for ``Axes.plot``. Default of ``label``: the name.

        Returns:
            What was drawn into.

        Raises:
            ImportError: matplotlib is not installed.

        Example:
            >>> import functavg, matplotlib
            >>> matplotlib.use("Agg")
            >>> functavg.profile(functavg.EMA(0.9), 100).plot().get_ylabel()
            'weight'
        """
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ImportError(
                "Profile.plot needs matplotlib, which is not installed: pip install 'functavg[plot]'"
            ) from error
        if ax is None:
            _, ax = pyplot.subplots(layout="constrained")
        # Iterates that are not in the average would make a comb of the line.
        present = np.flatnonzero(self.weights)
        times, weights = self.times[present], self.weights[present]
        few = len(present) <= STEMS
        (line,) = ax.plot(times, weights, **{"label": self.name, "marker": "." if few else "", **options})
        if few:
            ax.vlines(times, 0, weights, color=line.get_color(), alpha=0.3, linewidth=1)
        else:
            ax.fill_between(times, 0, weights, color=line.get_color(), alpha=0.1, linewidth=0)
        if self.initial:
            ax.plot([0], [self.initial], marker="s", color=line.get_color())
        ax.update_datalim([(0, 0), (self.steps, 0)])
        ax.autoscale_view()
        ax.set_xlabel("step")
        ax.set_ylabel("weight")
        ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), fontsize="small")  # above: names may be long
        return ax

    def __str__(self) -> str:
        rows = [
            ("mean age", f"{self.mean_age:.4g} steps"),
            ("std", f"{self.std:.4g} steps"),
            ("sigma_rel", f"{self.sigma_rel:.4g}"),
            ("half-life", f"{self.half_life:.4g} steps"),
            ("effective iterates", f"{self.effective_iterates:.4g}"),
            ("newest weight", f"{self.weights[-1]:.4g}"),
            ("initial weight", f"{self.initial:.4g}"),
        ]
        if abs(self.total - 1) > 1e-6:
            rows.append(("total", f"{self.total:.4g}"))
        return "\n".join([f"{self.name} after {self.steps} steps", *(f"  {key:<18}  {value}" for key, value in rows)])

    def __repr__(self) -> str:
        return (
            f"Profile({self.name}, steps={self.steps}, mean_age={self.mean_age:.4g}, "
            f"sigma_rel={self.sigma_rel:.4g}, effective_iterates={self.effective_iterates:.4g})"
        )
