"""Power-function EMA."""

from __future__ import annotations

__all__ = ["PowerEMA"]

from dataclasses import dataclass

from functavg import units
from functavg.checks import check_at_least
from functavg.rules.base import WeightRule
from functavg.scalars import expm1, log1p
from functavg.state import Weight


@dataclass(frozen=True)
class PowerEMA(WeightRule):
    """Power-function EMA: iterate ``t`` of ``N`` weighs as ``t^gamma``, so the width grows with training.

    With ``n`` the count before and ``D`` the steps since the last update, the weight of the newest iterate is
    ``1 - (n / (n + D))^(gamma + 1)``, computed as ``-expm1((gamma + 1) log1p(-D / (n + D)))``, which keeps its digits
    at any count. ``gamma = 0`` is the equal mean.

    Args:
        gamma: exponent of the profile, at least 0.

    Raises:
        TypeError: ``gamma`` is not a number.
        ValueError: ``gamma`` is negative, infinite or NaN.

    Example:
        >>> import functavg
        >>> functavg.PowerEMA(6.94).weight(0, 1), round(functavg.PowerEMA(6.94).weight(99, 1), 6)
        (1.0, 0.076699)

    Source: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, 2024 (EDM2).
    """

    gamma: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", check_at_least(self.gamma, "gamma", 0))

    @classmethod
    def from_sigma_rel(cls, sigma_rel: float) -> PowerEMA:
        """Return the power-function EMA of this relative width, the profile's standard deviation over its length.

        Args:
            sigma_rel: in (0, 12^(-1/2)], the upper end being the equal mean.

        Example:
            >>> import functavg
            >>> round(functavg.PowerEMA.from_sigma_rel(0.05).gamma, 4)
            16.9722
        """
        return cls(units.gamma_from_sigma_rel(sigma_rel))

    def weight(self, count: Weight, steps: Weight) -> Weight:
        """Return the weight of the newest iterate (see the class)."""
        return -expm1((self.gamma + 1.0) * log1p(-steps / (count + steps)))
