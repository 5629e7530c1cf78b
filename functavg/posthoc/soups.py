"""Soups: means of models, chosen by how well they do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from functavg.checks import check_number
from functavg.plan import Lerp, copy_leaves, run
from functavg.posthoc.combining import bring_back, name_errors
from functavg.state import AverageState, T


def greedy_soup(trees: Iterable[T], score: Callable[[T], Any]) -> tuple[T, list[int]]:
    """Return the mean of those models that make it better, and which they are.

    Models are taken in the order of their scores, the best first and equal ones as given. With ``s`` the mean of the
    ``n`` that are in so far, a model ``x`` comes in if ``score((n * s + x) / (n + 1)) > score(s)``. Nothing is random.

    Args:
        trees: the weights of the models, pytrees of one structure. Of a ``Sequence``, one tree at a time is asked for,
            twice each, so one that loads them from disk need not hold them; an iterator is read into a list.
        score: how well weights do on held-out data; higher is better, NaN is worst. It is called on each tree, then
            on each mean that is tried, in the dtypes of the trees; it must not write to them.

    Returns:
        ``(soup, chosen)``: the mean and the indices of its models in ``trees``, in the order in which they came in.

    Raises:
        TypeError: ``trees`` is itself a tree, ``score`` is not callable or does not return a number.
        ValueError: there is no tree, no score is a number other than NaN, or the trees differ in structure.

    Example:
        >>> import functavg, numpy as np
        >>> models = [np.array(1.0), np.array(4.0), np.array(-1.0)]
        >>> functavg.posthoc.greedy_soup(models, lambda w: -abs(float(w)))
        (array(0.), [0, 2])

    Source: Wortsman et al., Model soups: averaging weights of multiple fine-tuned models improves accuracy without
    increasing inference time, 2022.
    """
    if isinstance(trees, (Mapping, AverageState)) or not isinstance(trees, Iterable):
        raise TypeError(f"trees must be a sequence or an iterator of trees, got {type(trees).__name__}")
    if not callable(score):
        raise TypeError(f"score must be callable, got {score!r} of {type(score).__name__}")
    models = trees if isinstance(trees, Sequence) else list(trees)
    scores = [check_score(score(models[index]), f"score(trees[{index}])") for index in range(len(models))]
    order = sorted((index for index, it in enumerate(scores) if it > -math.inf), key=lambda index: -scores[index])
    if not order:
        raise ValueError(f"trees must hold at least one tree with a score above -inf, got the scores {scores}")
    chosen, best = order[:1], scores[order[0]]
    newest = models[order[0]]
    soup = copy_leaves(newest)
    for index in order[1:]:
        model = models[index]
        with name_errors(f"trees[{index}]"):
            tried = run(Lerp(soup, model, 1.0 / (len(chosen) + 1)))
        reached = check_score(score(bring_back(tried, model)), f"score of the mean of trees {[*chosen, index]}")
        if reached > best:
            soup, best, newest = tried, reached, model
            chosen.append(index)
    return bring_back(soup, newest), chosen


def check_score(value: Any, name: str) -> float:
    """Return a score as a host float, NaN as the worst.

    Raises:
        TypeError: it is no number.
    """
    number = check_number(value, name)
    return -math.inf if math.isnan(number) else number
