"""Names of tensors without the prefixes that wrappers around modules leave."""

from __future__ import annotations

__all__: list[str] = []

from collections.abc import Mapping
from typing import TypeVar

V = TypeVar("V")

# No module of a user's is called so.
_ANYWHERE = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_BEFORE_ALL = "module."


def strip_wrappers(tensors: Mapping[str, V]) -> dict[str, V]:
    """Return tensors by the names that they have in the module inside all wrappers.

    The names that torch.compile, activation checkpoints and FSDP put in are taken out wherever they stand; ``module.``,
    of DataParallel and DistributedDataParallel, only where all names begin with it.

    Raises:
        ValueError: two names become one.
    """
    names = {name: ".".join(part for part in name.split(".") if part not in _ANYWHERE) for name in tensors}
    while names and all(short.startswith(_BEFORE_ALL) for short in names.values()):
        names = {name: short.removeprefix(_BEFORE_ALL) for name, short in names.items()}
    stripped = {short: tensors[name] for name, short in names.items()}
    if len(stripped) < len(names):
        twice = next(short for short in stripped if list(names.values()).count(short) > 1)
        raise ValueError(f"{[name for name in names if names[name] == twice]} all become {twice!r} without wrappers")
    return stripped
