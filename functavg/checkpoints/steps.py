"""The steps at which files were written, and the weights that a rule gives to iterates of these steps."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from functavg.profiles import Profile, profile
from functavg.rules.base import AveragingRule

_SHARD = re.compile(r"-\d+-of-\d+$")
_STEP = re.compile(r"step[-_=]?(\d+)", re.IGNORECASE)


def step_of(path: str | os.PathLike[str]) -> int | None:
    """Return the step in the name of a file, or else in that of its folder; None if there is no number.

    It is the number after ``step``, or else the last one: 500 in ``step-500.pt``, in ``epoch=3-step=500.ckpt`` and in
    ``checkpoint-500/model.safetensors``.

    Example:
        >>> from functavg import checkpoints
        >>> checkpoints.step_of("run/checkpoint-500/model.safetensors")
        500
    """
    file = Path(path)
    for name in (_SHARD.sub("", file.name.split(".")[0]), file.parent.name):
        found = _STEP.findall(name) or re.findall(r"\d+", name)
        if found:
            return int(found[-1])
    return None


def sort_by_step(paths: Iterable[Path]) -> list[Path]:
    """Return paths in the order of the steps in their names, those without one first, by name.

    Example:
        >>> from pathlib import Path
        >>> from functavg import checkpoints
        >>> [path.name for path in checkpoints.sort_by_step(map(Path, ("step-20.pt", "step-3.pt", "last.pt")))]
        ['last.pt', 'step-3.pt', 'step-20.pt']
    """
    return sorted(paths, key=lambda path: (-1 if (step := step_of(path)) is None else step, str(path)))


def profile_weights(rule: AveragingRule, steps: Sequence[int]) -> list[float]:
    """Return the weight that a rule gives to each iterate when it averages those of the given steps.

    Args:
        rule: the rule, which has one average.
        steps: the step of each iterate, increasing from above 0.

    Raises:
        ValueError: the steps do not increase, or the rule has several averages.

    Example:
        >>> import functavg
        >>> functavg.checkpoints.profile_weights(functavg.SWA(), [100, 200, 400])
        [0.25, 0.25, 0.5]
    """
    gaps = [step - before for step, before in zip(steps, [0, *steps], strict=False)]
    if not steps or min(gaps) < 1:
        raise ValueError(f"steps must increase from above 0, got {list(steps)}")
    found = profile(rule, gaps)
    if not isinstance(found, Profile):
        raise ValueError(f"the rule must have one average, got {rule!r}")
    return [float(weight) for weight in found.weights]
