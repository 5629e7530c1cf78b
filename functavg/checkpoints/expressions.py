"""Rules as text: ``ema:0.999`` on a command line, ``EMA(decay=0.999, debias=False)`` in a file. No code is run."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

from functavg import schedules
from functavg.combinators import Every, Partition, Several, SkipNonFinite
from functavg.rules.base import AveragingRule
from functavg.rules.constant import Freeze, Latest
from functavg.rules.ema import EMA
from functavg.rules.lawa import LAWA
from functavg.rules.power import PowerEMA
from functavg.rules.swa import SWA

_RULES: list[Any] = [EMA, SWA, PowerEMA, LAWA, Latest, Freeze, Every, SkipNonFinite, Several, Partition]
_SCHEDULES: list[Any] = [schedule for schedule in vars(schedules).values() if inspect.isclass(schedule)]
_KNOWN: dict[str, Callable[..., Any]] = {kind.__name__.lower(): kind for kind in [*_RULES, *_SCHEDULES]}
_KNOWN |= {"power": PowerEMA, "latest": Latest}
# Other ways to make a rule, by the argument that asks for them.
_MADE_FROM: dict[tuple[Any, str], Callable[..., Any]] = {
    (EMA, "half_life"): EMA.from_half_life,
    (PowerEMA, "sigma_rel"): PowerEMA.from_sigma_rel,
}
_NUMBERS = {"inf": math.inf, "nan": math.nan}


def parse_rule(text: str) -> AveragingRule:
    """Return the rule that an expression describes.

    It is a name with its arguments, ``ema:0.999``, ``power:sigma_rel=0.1``, ``lawa:5``, ``swa``; or the call that a
    rule prints as, ``EMA(decay=0.999, debias=False)``, with rules and schedules as arguments,
    ``every(swa(), 100)``. Capitals do not matter.

    Args:
        text: the expression.

    Raises:
        ValueError: it is no such expression, or its arguments are out of range.

    Example:
        >>> from functavg import checkpoints
        >>> checkpoints.parse_rule("ema:0.99")
        EMA(decay=0.99, debias=False, start='copy')
        >>> checkpoints.parse_rule("Every(ema(half_life=1), 10)")
        Every(rule=EMA(decay=0.5, debias=False, start='copy'), interval=10, start=0)
    """
    short = re.fullmatch(r"\s*(\w+)\s*(?::(.*))?", text, re.DOTALL)
    call = f"{short[1]}({short[2] or ''})" if short else text
    try:
        rule = _value(ast.parse(call.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{text!r} is no rule: {error}. Expected one such as {_EXAMPLES}") from error
    if not isinstance(rule, AveragingRule):
        raise ValueError(f"{text!r} is no rule but {rule!r}. Expected one such as {_EXAMPLES}")
    return rule


_EXAMPLES = "'ema:0.999', 'power:sigma_rel=0.1', 'lawa:5', 'swa', 'every(swa(), 100)'"


def _value(node: ast.expr) -> Any:
    """Return what an expression of calls of known names, literals and containers is."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
        if name.lower() not in _KNOWN:
            raise ValueError(f"{name!r} is unknown; known are {', '.join(sorted(_KNOWN))}")
        arguments = {keyword.arg or "**": _value(keyword.value) for keyword in node.keywords}
        kind: Callable[..., Any] = _KNOWN[name.lower()]
        for (made, argument), make in _MADE_FROM.items():
            kind = make if made is kind and argument in arguments else kind
        return kind(*map(_value, node.args), **arguments)
    if isinstance(node, ast.Name) and node.id in _NUMBERS:
        return _NUMBERS[node.id]
    if isinstance(node, ast.Dict):
        keys = [_value(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.List):
        return list(map(_value, node.elts))
    if isinstance(node, ast.Tuple):
        return tuple(map(_value, node.elts))
    return ast.literal_eval(node)
