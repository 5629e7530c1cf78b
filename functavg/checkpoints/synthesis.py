"""Averages that were not tracked, from files of those that were."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from functavg.checkpoints.errors import CheckpointError
from functavg.checkpoints.expressions import parse_rule
from functavg.checkpoints.opening import open_file, open_weights, weights_file
from functavg.checkpoints.readers import Reader
from functavg.checkpoints.records import record_of
from functavg.checkpoints.summing import Averaged, PathLike, write_sum
from functavg.checkpoints.writers import check_suffix
from functavg.combinators import Several
from functavg.posthoc import solve
from functavg.rules.base import AveragingRule

Snapshot = PathLike | tuple[PathLike, AveragingRule, int]


def posthoc(
    snapshots: Iterable[Snapshot],
    output: PathLike,
    target: AveragingRule | tuple[AveragingRule, int],
    *,
    dtype: Any = None,
    key: str | None = None,
    progress: bool | Callable[[int, int], None] = False,
) -> Averaged:
    """Write the sum of snapshots of tracked averages that comes closest to another average.

    :func:`functavg.posthoc.solve` finds the coefficients from the rules and steps alone; then the files are summed as
    :func:`average` does, a few MiB at a time.

    Args:
        snapshots: files of :func:`save_state`, which know rule and steps, and of a ``Several`` give all its averages;
            or triples of a file, the rule that made the average in it and the steps that it had averaged.
        output: the file to write.
        target: the rule whose average is wanted, after as many steps as the latest snapshot has; or a pair of the rule
            and the steps.
        dtype: the dtype to store real tensors in. Default: that of the files. Mind the ``amplification`` of rounding
            errors with files of low precision.
        key: where in each file the weights are, as for :func:`average`.
        progress: as for :func:`average`.

    Returns:
        What was done; ``synthesis`` holds the coefficients and how close they come.

    Raises:
        CheckpointError: a file cannot be read, says no rule or does not fit the others; the output is as it was.
        TypeError, ValueError: rules and steps are none that can be solved for.

    Example:
        >>> import functavg, os, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> rule = functavg.Several({name: functavg.PowerEMA(gamma) for name, gamma in (("narrow", 17), ("wide", 7))})
        >>> state = rule.init({"w": torch.zeros(1)})
        >>> paths = []
        >>> for step in range(1, 101):
        ...     state = rule.update({"w": torch.full((1,), float(step))}, state)
        ...     if step % 10 == 0:
        ...         paths.append(os.path.join(folder, f"step-{step}.safetensors"))
        ...         functavg.checkpoints.save_state(paths[-1], state, rule)
        >>> done = functavg.checkpoints.posthoc(paths, os.path.join(folder, "out.pt"), functavg.PowerEMA(10))
        >>> len(done.weights), done.synthesis.residual < 0.02
        (20, True)
        >>> torch.load(done.output)["w"].round(decimals=1)  # 100 * 11 / 12, and a little
        tensor([92.2000])

    Source: Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models, 2024 (EDM2), section 3.
    """
    check_suffix(Path(output))
    found = [each for snapshot in snapshots for each in _opened(snapshot, key)]
    if not found:
        raise ValueError("snapshots must hold at least one snapshot, got none")
    latest = max(steps for _, _, steps in found)
    wanted = target if isinstance(target, tuple) else (target, latest)
    synthesis = solve([(rule, steps) for _, rule, steps in found], wanted)
    done = write_sum(
        [reader for reader, _, _ in found],
        output,
        [float(coefficient) for coefficient in synthesis.coefficients],
        dtype=dtype,
        progress=progress,
        snapshots=[[repr(rule), steps] for _, rule, steps in found],
        target=[repr(wanted[0]), wanted[1]],
        residual=synthesis.residual,
    )
    return replace(done, synthesis=synthesis)


def _opened(snapshot: Snapshot, key: str | None) -> list[tuple[Reader, AveragingRule, int]]:
    """Return the averages in a file with their rules and steps."""
    if isinstance(snapshot, tuple):
        path, rule, steps = snapshot
        return [(open_weights(path, key), rule, steps)]
    file = weights_file(Path(snapshot))
    whole = open_file(file)
    record = record_of(whole)
    if record.get("kind") != "state":
        raise CheckpointError(
            f"{file}: does not say by what rule and how many steps it was averaged, as files of save_state do; "
            "pass (path, rule, steps), or on the command line --rule"
        )
    rule = parse_rule(record["rule"])
    steps = int(record["numbers"]["count"] if "count" in record["numbers"] else whole.read("count"))
    if not isinstance(rule, Several):
        return [(open_weights(file, key), rule, steps)]
    chosen = list(rule.rules) if key is None else [key]
    return [(open_weights(file, name), rule.rules[name], steps) for name in chosen if name in rule.rules]
