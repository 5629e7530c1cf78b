"""Writing arrays that are in memory to a file."""

from __future__ import annotations

__all__ = ["save_weights"]

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from functavg.checkpoints.arrays import to_tensor
from functavg.checkpoints.atomic import replacing
from functavg.checkpoints.readers import Around
from functavg.checkpoints.records import make_record
from functavg.checkpoints.tensors import Piece, info_of
from functavg.checkpoints.torch_reader import ties_of
from functavg.checkpoints.writers import make_writer


def save_weights(path: str | os.PathLike[str], weights: Mapping[str, Any]) -> None:
    """Write named arrays to a file, as a whole or not at all; those that share memory are stored once.

    Args:
        path: the file, in ``.safetensors``, ``.pt``, ``.pth``, ``.bin`` or ``.ckpt``.
        weights: arrays of any library by name, such as what :func:`convert` returns.

    Raises:
        TypeError: an array cannot be stored.
        CheckpointError: the file cannot be written; it is then as it was.

    Example:
        >>> import functavg, os, tempfile, torch
        >>> path = os.path.join(tempfile.mkdtemp(), "weights.safetensors")
        >>> functavg.checkpoints.save_weights(path, {"w": torch.ones(2)})
        >>> functavg.checkpoints.inspect(path).holds[0].tensors
        1
    """
    store(Path(path), weights, make_record("weights"))


def store(path: Path, arrays: Mapping[str, Any], record: dict[str, Any]) -> None:
    """Write named arrays and a record to a file."""
    tensors: dict[str, Tensor] = {}
    for name, value in arrays.items():
        try:
            tensors[name] = to_tensor(value)
        except TypeError as error:
            raise TypeError(f"{name!r} cannot be stored: {error}") from error
    infos = {name: info_of(tensor) for name, tensor in tensors.items()}
    writer = make_writer(path, infos, ties_of(tensors), {}, Around(), record)
    with replacing(path, writer.nbytes) as file:
        writer.begin(file)
        for name in writer.names:
            writer.write(file, Piece(name, 0, infos[name].numel), tensors[name].reshape(-1))
