"""What is known of a tensor before it is read, and how its bytes are read and written."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from functavg.checkpoints.errors import CheckpointError


@dataclass(frozen=True)
class TensorInfo:
    """The dtype, by torch's name for it, and the shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the elements."""
        return self.numel * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def is_averaged(self) -> bool:
        """Whether it is real or complex; others take the value of the newest file."""
        return self.torch_dtype.is_floating_point or self.torch_dtype.is_complex


def info_of(tensor: Tensor) -> TensorInfo:
    """Return dtype and shape of a tensor."""
    return TensorInfo(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


@dataclass(frozen=True)
class Stamp:
    """What changes when a file is replaced or written to."""

    device: int
    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, file: int | Path) -> Stamp:
        """Return the stamp of a path or of an open file."""
        found = os.stat(file)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file that the system could not read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True)
class Piece:
    """The elements of a tensor from one index to another, in row-major order."""

    name: str
    start: int
    stop: int


def read_piece(path: Path, stamp: Stamp, offset: int, piece: Piece, out: Tensor) -> Tensor:
    """Read a piece of the tensor at an offset of a file into a vector, and return that.

    It is read and not mapped: pages of a mapped file would count as memory of this process.

    Raises:
        CheckpointError: the file is not the one that the stamp was taken of, or ends too early.
    """
    left = out.view(torch.uint8).numpy().data
    with reading(path), open(path, "rb", buffering=0) as file:
        file.seek(offset + piece.start * out.itemsize)
        while left and (count := file.readinto(left)):
            left = left[count:]
        if Stamp.of(file.fileno()) != stamp:
            raise CheckpointError(f"{path}: the file was changed while it was being read; average files at rest")
        if left:
            raise CheckpointError(f"{path}: truncated: {len(left)} bytes of {piece.name!r} are missing")
    return out


def write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    """Write the elements of a tensor in row-major order."""
    write_all(file, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all bytes; one call to the system need not take them all."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
