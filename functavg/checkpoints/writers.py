"""Writing files of weights as a stream, a piece of a tensor at a time."""

from __future__ import annotations

__all__: list[str] = []

import json
import struct
import zipfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from functavg.checkpoints import records, safetensors_format
from functavg.checkpoints.errors import CheckpointError
from functavg.checkpoints.readers import Around, some
from functavg.checkpoints.tensors import Piece, TensorInfo, write_all, write_tensor

TORCH = (".pt", ".pth", ".bin", ".ckpt")
KNOWN = (".safetensors", *TORCH)


class Writer(ABC):
    """A file of weights to be written: ``begin``, then all pieces of each of ``names`` in turn.

    Attributes:
        names: the tensors to write, in the order in which they have to come; of tied ones the first.
        nbytes: how many bytes they have in all.
    """

    names: list[str]
    nbytes: int

    @abstractmethod
    def begin(self, file: BinaryIO) -> None:
        """Write what goes before the tensors."""

    @abstractmethod
    def write(self, file: BinaryIO, piece: Piece, values: Tensor) -> None:
        """Write the next piece."""


class SafetensorsWriter(Writer):
    """A safetensors file, laid out as the library of that name does.

    A tied tensor is written once; its other names become metadata that map them to the first, as
    ``safetensors.torch.save_model`` records them.
    """

    def __init__(
        self, path: Path, infos: Mapping[str, TensorInfo], ties: Mapping[str, str], metadata: Mapping[str, str]
    ) -> None:
        for name, info in infos.items():
            if info.dtype not in safetensors_format.NAMES:
                raise CheckpointError(
                    f"{path}: {name!r} is {info.dtype}, which safetensors cannot hold; write a .pt file"
                )
        self._infos = {name: info for name, info in infos.items() if name not in ties}
        self._head = safetensors_format.encode(self._infos, {**metadata, **ties})
        self.names: list[str] = safetensors_format.order(self._infos)
        self.nbytes: int = sum(info.nbytes for info in self._infos.values())

    def begin(self, file: BinaryIO) -> None:
        write_all(file, self._head)

    def write(self, file: BinaryIO, piece: Piece, values: Tensor) -> None:
        write_tensor(file, values)


class TorchWriter(Writer):
    """A file as ``torch.save`` writes it; the space for tensors is left open at first, and filled one by one.

    Tied tensors share their storage. The other entries of the dicts around the tensors are written as they were.
    """

    def __init__(
        self,
        path: Path,
        infos: Mapping[str, TensorInfo],
        ties: Mapping[str, str],
        around: Around,
        record: dict[str, Any],
    ) -> None:
        self._path, self._infos, self._ties, self._around, self._record = path, infos, ties, around, record
        self.names: list[str] = [name for name in infos if name not in ties]
        self.nbytes: int = sum(infos[name].nbytes for name in self.names)
        self._offsets: dict[str, int] = {}

    def begin(self, file: BinaryIO) -> None:
        with torch.serialization.skip_data():
            torch.save(self._skeleton(), file)
        end = file.tell()
        with zipfile.ZipFile(file) as archive:
            entries = {Path(entry.filename).name: entry for entry in archive.infolist() if "/data/" in entry.filename}
        for index, name in enumerate(self.names):  # storages are numbered as they are met
            entry = entries[str(index)]
            if entry.file_size != self._infos[name].nbytes:
                raise CheckpointError(f"{self._path}: torch {torch.__version__} does not lay out files as expected")
            file.seek(entry.header_offset + 26)
            self._offsets[name] = entry.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        file.seek(end)

    def write(self, file: BinaryIO, piece: Piece, values: Tensor) -> None:
        file.seek(self._offsets[piece.name] + piece.start * values.itemsize)
        write_tensor(file, values)

    def _skeleton(self) -> Any:
        """Return the nested dicts with tensors that are given no memory until they are written to."""
        around = self._around
        tensors: dict[str, Tensor] = {}
        for name, info in self._infos.items():
            first = self._ties.get(name)
            new = torch.empty(info.shape, dtype=info.torch_dtype, device="cpu") if first is None else tensors[first]
            tensors[name] = new
        nest: Any = OrderedDict(tensors | around.among)
        vars(nest).update(around.attributes)
        if not around.keys:
            vars(nest)[records.ATTRIBUTE] = self._record
        for key, beside in zip(reversed(around.keys), reversed(around.beside), strict=True):
            nest = {**beside, key: nest}
        return {**nest, records.NAME: self._record} if around.keys else nest


def make_writer(
    path: Path,
    infos: Mapping[str, TensorInfo],
    ties: Mapping[str, str],
    metadata: Mapping[str, str],
    around: Around,
    record: dict[str, Any],
) -> Writer:
    """Return the writer for a name, ``.safetensors`` or one of torch's.

    Raises:
        CheckpointError: the name ends otherwise, or the format cannot hold what is to be written.
    """
    check_suffix(path)
    if path.suffix in TORCH:
        carried = {name: value for name, value in metadata.items() if name != records.NAME}
        return TorchWriter(path, infos, ties, around, record | ({"metadata": carried} if carried else {}))
    if around.among:
        raise CheckpointError(
            f"{path}: beside tensors there are {some(around.among)}, which safetensors cannot hold; write a .pt file"
        )
    strings = {name: value for name, value in metadata.items() if name not in infos}  # of ties, those kept
    for beside in around.beside:
        strings |= {name: str(value) for name, value in beside.items() if type(value) in (str, int, float, bool)}
    return SafetensorsWriter(path, infos, ties, {"format": "pt"} | strings | {records.NAME: json.dumps(record)})


def check_suffix(path: Path) -> None:
    """Refuse an output whose name tells no format.

    Raises:
        CheckpointError: it ends in none of the known suffixes.
    """
    if path.suffix not in KNOWN:
        raise CheckpointError(
            f"{path}: the output must end in one of {', '.join(KNOWN)}, got {path.suffix or 'no suffix'!r}"
        )
