"""The weighted sum of opened files, written as a stream."""

from __future__ import annotations

__all__ = ["Averaged"]

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functavg.checkpoints import pieces as parts
from functavg.checkpoints import progress as bars
from functavg.checkpoints.atomic import replacing, write_back
from functavg.checkpoints.matching import check_apart, check_match, common_ties
from functavg.checkpoints.readers import Reader
from functavg.checkpoints.records import make_record
from functavg.checkpoints.resources import Buffer, compute_ahead
from functavg.checkpoints.storage import check_dtype, stored_as
from functavg.checkpoints.tensors import Piece, TensorInfo
from functavg.checkpoints.writers import check_suffix, make_writer
from functavg.kernels import dtypes
from functavg.posthoc import Synthesis, combine

PathLike = str | os.PathLike[str]

_BACKLOG = 8
"""So many groups of pieces are written before the disk is asked to follow."""


@dataclass(frozen=True)
class Averaged:
    """What :func:`average`, :func:`posthoc` or :func:`greedy_soup` did.

    Attributes:
        output: the file that was written.
        files: the files that were averaged, the newest last.
        weights: the weight of each; they sum to 1 where they were normalised.
        tensors: how many tensors the output holds, of tied ones one.
        nbytes: how many bytes they have.
        synthesis: the coefficients and how close they come, where :func:`posthoc` solved for the weights.

    Example:
        >>> import os, tempfile, torch
        >>> from functavg import checkpoints
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = [os.path.join(folder, f"step-{step}.pt") for step in (1, 2)]
        ...     for file in files:
        ...         torch.save({"w": torch.zeros(3)}, file)
        ...     done = checkpoints.average(files, os.path.join(folder, "mean.pt"))
        >>> done.weights, done.tensors, done.nbytes
        ((0.5, 0.5), 1, 12)
    """

    output: Path
    files: tuple[Path, ...]
    weights: tuple[float, ...]
    tensors: int
    nbytes: int
    synthesis: Synthesis | None = None


def write_sum(
    readers: Sequence[Reader],
    output: PathLike,
    weights: Sequence[float],
    *,
    normalize: bool = True,
    dtype: Any = None,
    progress: bool | Callable[[int, int], None] = False,
    **facts: Any,
) -> Averaged:
    """Do what ``average`` does with opened files, and record some more facts."""
    target = Path(output)
    check_suffix(target)
    wanted = check_dtype(dtype)
    check_match(readers, any_float=wanted is not None)
    check_apart(readers, target)
    used = [(reader, weight) for reader, weight in zip(readers, weights, strict=True) if weight != 0]
    newest = used[-1][0]
    infos = {name: stored_as(info, wanted) for name, info in newest.infos.items()}
    files = [reader.path for reader in readers]
    record = make_record("average", files=list(map(str, files)), weights=list(weights), normalize=normalize, **facts)
    writer = make_writer(target, infos, common_ties(readers), newest.metadata, newest.around, record)
    forms = [*(reader.infos for reader, _ in used), infos]
    groups = list(parts.group_pieces(writer.names, infos))
    total = sum(parts.count_bytes(group, forms) for group in groups)
    with bars.reporting(progress, total) as advance, replacing(target, writer.nbytes) as file:
        writer.begin(file)
        with contextlib.closing(compute_ahead(_Sum(used, infos, normalize), groups)) as sums:
            for index, (group, tensors) in enumerate(zip(groups, sums, strict=True), 1):
                for piece in group:
                    writer.write(file, piece, tensors[piece.name])
                if index % _BACKLOG == 0:
                    write_back(file)
                advance(parts.count_bytes(group, forms))
    return Averaged(target, tuple(files), tuple(weights), len(writer.names), writer.nbytes)


class _Sum:
    """The weighted sum of pieces of all files, in the dtypes that they are stored in; several threads call it."""

    def __init__(self, used: Sequence[tuple[Reader, float]], infos: Mapping[str, TensorInfo], normalize: bool) -> None:
        self._readers = [reader for reader, _ in used]
        self._weights = [weight for _, weight in used]
        self._infos, self._normalize = infos, normalize
        # Where the sum is not stored as it is read, it must not be rounded in between.
        self._wide = {
            name: self._widest(name, info)
            for name, info in infos.items()
            if info.is_averaged
            if not normalize or any(reader.infos[name].dtype != info.dtype for reader in self._readers)
        }
        self._own = threading.local()

    def __call__(self, pieces: list[Piece]) -> dict[str, Tensor]:
        trees = self._read(pieces)
        sums = combine(trees, self._weights) if self._normalize else _add(trees, self._weights)
        return {name: tensor.to(self._infos[name].torch_dtype) for name, tensor in sums.items()}

    def _read(self, pieces: list[Piece]) -> Iterator[dict[str, Tensor]]:
        """Yield the pieces in one file after the other; each is good until the next but one is asked for."""
        if not hasattr(self._own, "buffers"):
            self._own.buffers = (Buffer(parts.PIECE), Buffer(parts.PIECE))
        for reader, buffer in zip(self._readers, itertools.cycle(self._own.buffers), strict=False):
            buffer.clear()
            tensors = {}
            for piece in pieces:
                out = buffer.take(piece.stop - piece.start, reader.infos[piece.name].torch_dtype)
                tensors[piece.name] = reader.read_piece(piece, out).to(self._wide.get(piece.name))
            yield tensors

    def _widest(self, name: str, info: TensorInfo) -> torch.dtype:
        """Return the dtype to compute in: the widest of what is read and stored, at least float32 or complex64."""
        names = {dtypes.held_in(each.dtype, None) for each in [info, *(reader.infos[name] for reader in self._readers)]}
        found: torch.dtype = getattr(torch, max(names, key=dtypes.bits_of))
        return found


def _add(trees: Iterator[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return the plain weighted sum; integers take the newest value."""
    sums: dict[str, Tensor] = {}
    for tree, weight in zip(trees, weights, strict=True):
        for name, tensor in tree.items():
            if not (tensor.is_floating_point() or tensor.is_complex()):
                sums[name] = tensor.clone()
            elif name in sums:
                sums[name].add_(tensor, alpha=weight)
            else:
                sums[name] = tensor * weight
    return sums
