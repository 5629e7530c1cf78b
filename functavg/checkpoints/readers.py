"""What a source of named tensors is, whatever the format of its files."""

from __future__ import annotations

__all__: list[str] = []

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functavg.checkpoints.errors import CheckpointError
from functavg.checkpoints.tensors import Piece, TensorInfo


class Around:
    """The dicts in which the tensors of a torch file stand, and what is kept of their other entries.

    Attributes:
        keys: the keys that lead to the tensors.
        beside: for each of these keys, the other entries of the dict that it is looked up in.
        among: the entries among the tensors that are none.
        attributes: those of the dict of tensors, such as the versions that torch's modules look for.
    """

    def __init__(
        self,
        keys: tuple[str, ...] = (),
        beside: tuple[dict[str, Any], ...] = (),
        among: Mapping[str, Any] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        self.keys = keys
        self.beside = beside
        self.among: dict[str, Any] = dict(among or {})
        self.attributes: dict[str, Any] = dict(attributes or {})


class Reader(ABC):
    """Named tensors in one file or several, of which a piece at a time is read.

    Attributes:
        path: what was opened, for messages.
        files: all files that are read.
        infos: dtype and shape of each tensor by name, in the order of the file.
        ties: for each name of a tensor that has several, all but the first, that first name.
        metadata: what a safetensors file says about itself.
        around: what else a torch file holds, to write it again around other tensors.
    """

    def __init__(
        self,
        path: Path,
        files: tuple[Path, ...],
        infos: Mapping[str, TensorInfo],
        ties: Mapping[str, str],
        *,
        metadata: Mapping[str, str] | None = None,
        around: Around | None = None,
    ) -> None:
        self.path = path
        self.files = files
        self.infos = infos
        self.ties = ties
        self.metadata: Mapping[str, str] = metadata or {}
        self.around: Around = around or Around()

    @abstractmethod
    def read_piece(self, piece: Piece, out: Tensor, /) -> Tensor:
        """Read a piece of a tensor into a vector of its dtype, and return that."""

    def read(self, name: str, /) -> Tensor:
        """Return a whole tensor, which is the caller's."""
        info = self.infos[name]
        out = torch.empty(info.numel, dtype=info.torch_dtype, device="cpu")
        return self.read_piece(Piece(name, 0, info.numel), out).reshape(info.shape)

    def read_all(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return tensors by name, all unless some are named; tied ones are one."""
        firsts = {name: self.ties.get(name, name) for name in (self.infos if names is None else names)}
        held = {first: self.read(first) for first in dict.fromkeys(firsts.values())}
        return {name: held[first] for name, first in firsts.items()}

    def outline(self) -> dict[str, Tensor]:
        """Return all tensors by name without their values, but for those of one element, such as counts."""
        return {
            name: self.read(name) if info.numel == 1 else torch.empty(info.shape, dtype=info.torch_dtype, device="meta")
            for name, info in self.infos.items()
        }


class Selected(Reader):
    """The tensors of a reader whose names begin with a prefix, without it."""

    def __init__(self, reader: Reader, prefix: str) -> None:
        start = f"{prefix}."
        self._reader = reader
        self._names = {name.removeprefix(start): name for name in reader.infos if name.startswith(start)}
        if prefix in reader.infos:  # a tree that is one array has no other name
            self._names[prefix] = prefix
        if not self._names:
            raise CheckpointError(f"{reader.path}: no tensor under {prefix!r}; there are {some(reader.infos)}")
        infos = {short: reader.infos[name] for short, name in self._names.items()}
        ties = ties_within(self._names, reader.ties)
        super().__init__(reader.path, reader.files, infos, ties, metadata=reader.metadata)

    def read_piece(self, piece: Piece, out: Tensor, /) -> Tensor:
        return self._reader.read_piece(replace(piece, name=self._names[piece.name]), out)


def ties_within(names: Mapping[str, str], ties: Mapping[str, str]) -> dict[str, str]:
    """Return the ties among some tensors of a source, by their new names."""
    firsts: dict[str, str] = {}
    found = {}
    for short, name in names.items():
        first = firsts.setdefault(ties.get(name, name), short)
        if first != short:
            found[short] = first
    return found


def some(names: Any, most: int = 5) -> str:
    """Return names for a message, cut where there are many."""
    listed = [repr(name) for name in names]
    shown = ", ".join(listed[:most]) or "none"
    return shown + (f" and {len(listed) - most} more" if len(listed) > most else "")
