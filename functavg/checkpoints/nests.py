"""Finding the tensors in the nested dicts of a checkpoint."""

from __future__ import annotations

__all__: list[str] = []

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from functavg.checkpoints.errors import CheckpointError
from functavg.checkpoints.readers import Around, some


def select(path: Path, checkpoint: Any, key: str | None) -> tuple[dict[str, Tensor], Around]:
    """Return the tensors by name that are meant, and what stands around them.

    Args:
        path: the file, for messages.
        checkpoint: what it holds.
        key: the keys that lead to the dict of tensors, joined by dots; the last ones may begin the names of tensors.
            Default: the dict itself if it holds tensors, or else the only dict of tensors inside it.

    Raises:
        CheckpointError: there is no such dict, or there are several.
    """
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f"{path}: expected a dict of tensors, got {type(checkpoint).__name__}")
    keys, prefix = _keys(path, checkpoint, key)
    nest, beside = checkpoint, []
    for each in keys:
        beside.append({name: value for name, value in nest.items() if name != each and is_plain(value)})
        nest = nest[each]
    tensors = {name: value for name, value in nest.items() if isinstance(value, Tensor)}
    if prefix:
        start = f"{prefix}."
        tensors = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
    if not tensors:
        raise CheckpointError(f"{path}: no tensor under {key!r}; there are {_described(checkpoint)}")
    if odd := [name for name in tensors if not isinstance(name, str)]:
        raise CheckpointError(f"{path}: expected tensors with names, got the keys {some(odd)}")
    if prefix:
        return tensors, Around(tuple(keys), tuple(beside))
    among = {name: value for name, value in nest.items() if name not in tensors}
    attributes = {name: value for name, value in getattr(nest, "__dict__", {}).items() if is_plain(value)}
    return tensors, Around(tuple(keys), tuple(beside), among, attributes)


def _keys(path: Path, checkpoint: Mapping[Any, Any], key: str | None) -> tuple[list[str], str]:
    """Return the keys of nested dicts, and the beginning of names in the last one."""
    if key is not None:
        keys, nest, left = [], checkpoint, key
        while left:
            heads = [name for name in nest if isinstance(name, str) and isinstance(nest[name], Mapping)]
            fitting = [name for name in heads if left == name or left.startswith(f"{name}.")]
            if not fitting:
                break
            keys.append(max(fitting, key=len))
            nest, left = nest[keys[-1]], left[len(keys[-1]) + 1 :]
        return keys, left
    if any(isinstance(value, Tensor) for value in checkpoint.values()):
        return [], ""
    found = list(tensor_dicts(checkpoint))
    if len(found) != 1:
        raise CheckpointError(
            f"{path}: expected one dict of tensors, got {_described(checkpoint)}"
            + ("; say by key= (--key) which one" if found else "")
        )
    return list(found[0]), ""


def tensor_dicts(nest: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the keys that lead to each dict of nothing but tensors with names."""
    if not isinstance(nest, Mapping) or not nest or not all(isinstance(name, str) for name in nest):
        return
    if all(isinstance(value, Tensor) for value in nest.values()):
        yield keys
        return
    for name, value in nest.items():
        yield from tensor_dicts(value, (*keys, name))


def all_tensors(nest: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the tensors with names in each of nested dicts, with the keys that lead to it joined by dots."""
    if not isinstance(nest, Mapping):
        return
    named = {name: value for name, value in nest.items() if isinstance(name, str)}
    if tensors := {name: value for name, value in named.items() if isinstance(value, Tensor)}:
        yield ".".join(keys), tensors
    for name, value in named.items():
        yield from all_tensors(value, (*keys, name))


def _described(checkpoint: Mapping[Any, Any]) -> str:
    found = [".".join(keys) for keys in tensor_dicts(checkpoint)]
    return f"dicts of tensors under {some(found)}" if any(found) else f"the keys {some(checkpoint)}"


def is_plain(value: Any) -> bool:
    """Tell whether a value is a number, a string or nothing, or is made of them."""
    if isinstance(value, Mapping):
        return all(is_plain(key) and is_plain(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or type(value) in (str, int, float, bool)
