"""Reading files of ``torch.save``, a piece of a tensor at a time."""

from __future__ import annotations

__all__: list[str] = []

import argparse
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functavg.checkpoints.arrays import memory_of
from functavg.checkpoints.errors import CheckpointError
from functavg.checkpoints.mapped import Mappings
from functavg.checkpoints.nests import select
from functavg.checkpoints.readers import Reader
from functavg.checkpoints.tensors import Piece, Stamp, info_of, read_piece, reading

SAFE: list[Any] = [argparse.Namespace]
"""Classes that come in checkpoints and do nothing when they are loaded: timm keeps the arguments of its command."""


def load(path: Path) -> Any:
    """Return what a file of ``torch.save`` holds, tensors mapped where they can be; no code of the file is run.

    Raises:
        CheckpointError: it is no whole file of ``torch.save``, or it holds something else than tensors, numbers,
            strings and their containers.
    """
    with reading(path):
        path.open("rb").close()  # not found, no permission: what torch says of these names no file
    try:
        with torch.serialization.safe_globals(SAFE), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap can only be used" not in str(error):
                    raise
                return torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except Exception as error:  # of many kinds: pickle, zip, storage
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    text = str(error)
    if found := re.search(r"GLOBAL ([\w.]+)", text):
        allow = "; or, where you trust it, allow it first with torch.serialization.add_safe_globals"
        return CheckpointError(
            f"{path}: holds {found[1]}, and to load it could run code, so it is not loaded. Save tensors, numbers and "
            f"strings only{'' if 'blocked' in text else allow}"
        )
    if isinstance(error, pickle.UnpicklingError) or not text:  # torch's text is long, and advises to run the code
        text = "it does not unpickle"
    return CheckpointError(f"{path}: truncated or corrupt, or no file of torch.save: {text.split('.')[0]}")


class TorchReader(Reader):
    """A :class:`Reader` of one file of ``torch.save``.

    Args:
        path: the file.
        key: the keys that lead to the dict of tensors, joined by dots. Default: the only such dict.

    Of contiguous tensors only their places in the file are kept, so no page of it stays in memory; others, which are
    rare, are copied. Where the system does not tell these places, tensors are read through the mapped file, and those
    of the format before torch 1.6 are all in memory.
    """

    def __init__(self, path: Path, key: str | None) -> None:
        with reading(path):
            self._stamp = Stamp.of(path)
        tensors, around = select(path, load(path), key)
        for name, tensor in tensors.items():
            check_dense(path, name, tensor)
        infos = {name: info_of(tensor) for name, tensor in tensors.items()}
        super().__init__(path, (path,), infos, ties_of(tensors), around=around)
        with reading(path):
            mappings = Mappings(path)
        self._offsets: dict[str, int] = {}
        self._held: dict[str, Tensor] = {}
        for name in tensors.keys() - self.ties.keys():
            offset = None
            tensor = tensors[name].detach()
            if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
                offset = mappings.offset(tensor.data_ptr(), tensor.nbytes)
            if offset is None:
                self._held[name] = tensor.resolve_conj().resolve_neg().contiguous()
            else:
                self._offsets[name] = offset

    def read_piece(self, piece: Piece, out: Tensor, /) -> Tensor:
        name = self.ties.get(piece.name, piece.name)
        if name in self._held:
            return out.copy_(self._held[name].reshape(-1)[piece.start : piece.stop])
        return read_piece(self.path, self._stamp, self._offsets[name], piece, out)


def check_dense(path: Path, name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose elements are not all in one strided memory.

    Raises:
        CheckpointError: it is sparse, quantized, on the meta device or one shard of a tensor.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "on the meta device" if tensor.is_meta else str(tensor.layout)
        raise CheckpointError(f"{path}: {name!r} is {kind}; expected a dense tensor")
    if hasattr(tensor, "to_local"):
        raise CheckpointError(f"{path}: {name!r} is a DTensor; save the full tensors, or average while training")


def ties_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return for each name of a tensor that has several, all but the first, that first name."""
    firsts: dict[Any, str] = {}
    ties = {}
    for name, tensor in tensors.items():
        first = firsts.setdefault(memory_of(tensor) or name, name)
        if first != name:
            ties[name] = first
    return ties
