"""What rules remember: the memory of a state, taken apart and checked."""

from __future__ import annotations

from typing import Any

from functavg.checks import check_count
from functavg.counts import match_count
from functavg.state import AverageState, Count


def split_memory(rule: object, state: AverageState[Any], least: int = 0) -> tuple[Count, Any]:
    """Return the two parts of a memory: a count of the rule's own, in the form of the state's count, and the rest.

    Raises:
        TypeError, ValueError: the state was made by another rule.
    """
    memory = state.memory
    if not (isinstance(memory, (tuple, list)) and len(memory) == 2):
        raise state_mismatch(rule, f"a memory of two parts, got {type(memory).__name__}")
    return match_count(check_count(memory[0], "state.memory[0]", least), state.count), memory[1]


def state_mismatch(rule: object, problem: str) -> ValueError:
    """Return the error for a state that another rule made."""
    name = type(rule).__name__
    return ValueError(
        f"the state was not made by {name}: expected {problem}. Pass what {name}(...).init or .update returned"
    )
