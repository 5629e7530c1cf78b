"""Greedy soups of files, chosen by a score."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from functavg.checkpoints.averaging import average, check_weights
from functavg.checkpoints.summing import Averaged, PathLike
from functavg.checkpoints.writers import check_suffix
from functavg.posthoc.soups import check_score


def greedy_soup(
    paths: Sequence[PathLike],
    output: PathLike,
    score: Callable[[Path], float],
    *,
    dtype: Any = None,
    key: str | None = None,
) -> Averaged:
    """Write the mean of those files that make it better.

    Files are taken in the order of their scores, the best first. One comes in if the mean with it has a higher score
    than the mean so far; each mean that is tried is written to a temporary file, a few MiB at a time.

    Args:
        paths: the files, oldest first.
        output: the file to write.
        score: how well the weights in a file do on held-out data; higher is better, NaN is worst. It is called on each
            file, then on each mean that is tried.
        dtype: as for :func:`average`.
        key: as for :func:`average`.

    Returns:
        What was done; ``files`` are those that came in, oldest first.

    Raises:
        TypeError: ``score`` does not return a number.
        ValueError: there is no path, or no score is a number.
        CheckpointError: a file cannot be read or does not fit; the output is as it was.

    Example:
        >>> import functavg, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> for value in (1.0, 4.0, -1.0):
        ...     torch.save({"w": torch.tensor([value])}, f"{folder}/{value}.pt")
        >>> paths = [f"{folder}/{value}.pt" for value in (1.0, 4.0, -1.0)]
        >>> score = lambda path: -abs(torch.load(path)["w"].item())
        >>> done = functavg.checkpoints.greedy_soup(paths, f"{folder}/soup.pt", score)
        >>> [path.name for path in done.files], torch.load(done.output)["w"]
        (['1.0.pt', '-1.0.pt'], tensor([0.]))

    Source: Wortsman et al., Model soups, 2022.
    """
    check_weights(paths, None, True)
    target = Path(output)
    check_suffix(target)
    scores = [check_score(score(Path(path)), f"score({path})") for path in paths]
    order = sorted((index for index, it in enumerate(scores) if it > -math.inf), key=lambda index: -scores[index])
    if not order:
        raise ValueError(f"one score at least must be above -inf, got {scores}")
    chosen, best = order[:1], scores[order[0]]
    with tempfile.TemporaryDirectory(prefix=".functavg-", dir=target.parent) as folder:
        tried = Path(folder) / f"mean{target.suffix}"
        for index in order[1:]:
            average([paths[each] for each in sorted([*chosen, index])], tried, dtype=dtype, key=key)
            reached = check_score(score(tried), f"score of the mean of files {sorted([*chosen, index])}")
            if reached > best:
                best = reached
                chosen.append(index)
    return average([paths[each] for each in sorted(chosen)], target, dtype=dtype, key=key)
