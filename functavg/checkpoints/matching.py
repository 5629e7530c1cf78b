"""Checking that files hold the same tensors, before any is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from functavg.checkpoints.errors import CheckpointError
from functavg.checkpoints.readers import Reader, some
from functavg.checkpoints.tensors import TensorInfo


def check_match(readers: Sequence[Reader], *, any_float: bool = False) -> None:
    """Refuse files that do not hold tensors of the names, shapes and dtypes of the first.

    Args:
        readers: the files.
        any_float: whether floating dtypes may differ, since the result has one that was asked for.

    Raises:
        CheckpointError: they differ; the message names file and tensor.
    """
    first = readers[0]
    for reader in readers[1:]:
        missing = [name for name in first.infos if name not in reader.infos]
        unexpected = [name for name in reader.infos if name not in first.infos]
        if missing or unexpected:
            raise CheckpointError(
                f"{reader.path}: does not hold the tensors of {first.path}: "
                f"missing {some(missing)}; unexpected {some(unexpected)}"
            )
        for name, expected in first.infos.items():
            info = reader.infos[name]
            if info.shape != expected.shape:
                raise CheckpointError(
                    f"{reader.path}: {name!r} has shape {info.shape}, expected {expected.shape} as in {first.path}"
                )
            if info.dtype != expected.dtype and not (any_float and _is_float(info) and _is_float(expected)):
                raise CheckpointError(
                    f"{reader.path}: {name!r} is {info.dtype}, expected {expected.dtype} as in {first.path}"
                    + ("; say by dtype= (--dtype) what to store" if _is_float(info) and _is_float(expected) else "")
                )


def check_apart(readers: Sequence[Reader], output: Path) -> None:
    """Refuse an output that is one of the files that are read.

    Raises:
        CheckpointError: it is, perhaps under another name.
    """
    if not output.exists():
        return
    for reader in readers:
        for file in reader.files:
            if os.path.samefile(file, output):
                raise CheckpointError(f"{output}: the output is also an input, {file}; name another output")


def common_ties(readers: Sequence[Reader]) -> dict[str, str]:
    """Return the ties that all files have; tensors that are tied in some files only are averaged each by itself."""
    groups: dict[tuple[str, ...], str] = {}
    ties = {}
    for name in readers[-1].infos:
        first = groups.setdefault(tuple(reader.ties.get(name, name) for reader in readers), name)
        if first != name:
            ties[name] = first
    return ties


def _is_float(info: TensorInfo) -> bool:
    return info.torch_dtype.is_floating_point
