"""Reading safetensors files, one tensor at a time."""

from __future__ import annotations

__all__: list[str] = []

from pathlib import Path

from torch import Tensor

from functavg.checkpoints.readers import Reader
from functavg.checkpoints.records import NAME
from functavg.checkpoints.safetensors_format import decode
from functavg.checkpoints.tensors import Piece, Stamp, read_piece, reading

_OF_LIBRARIES = {"format", NAME}
"""Entries that are no tie even if a tensor should be called "pt"."""


class SafetensorsReader(Reader):
    """A :class:`Reader` of one safetensors file.

    The format has no names for one tensor twice. A metadata entry that maps a name to the name of a tensor is read as
    a tie: so ``safetensors.torch.save_model`` records the names that it leaves out, and so does functavg.
    """

    def __init__(self, path: Path) -> None:
        with reading(path), open(path, "rb") as file:
            self._stamp = Stamp.of(file.fileno())
            layout = decode(path, file, self._stamp.size)
        self._offsets = layout.offsets
        ties = {
            name: first
            for name, first in layout.metadata.items()
            if first in layout.infos and name not in layout.infos and name not in _OF_LIBRARIES
        }
        infos = layout.infos | {name: layout.infos[first] for name, first in ties.items()}
        super().__init__(path, (path,), infos, ties, metadata=layout.metadata)

    def read_piece(self, piece: Piece, out: Tensor, /) -> Tensor:
        name = self.ties.get(piece.name, piece.name)
        return read_piece(self.path, self._stamp, self._offsets[name], piece, out)
