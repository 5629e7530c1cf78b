"""The weighted mean of files, piece by piece."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functavg.checkpoints import progress as bars
from functavg.checkpoints.atomic import replacing
from functavg.checkpoints.errors import CheckpointError
from functavg.checkpoints.matching import check_match, common_ties
from functavg.checkpoints.opening import open_weights
from functavg.checkpoints.readers import Reader
from functavg.checkpoints.records import make_record
from functavg.checkpoints.tensors import Piece, TensorInfo
from functavg.checkpoints.writers import Writer, check_suffix, make_writer
from functavg.checks import check_number
from functavg.kernels import dtypes
from functavg.posthoc import Synthesis, combine

PIECE = 2**22
"""So many bytes are averaged at a time: they stay in the cache, and a tensor of any size takes no more memory."""

PathLike = str | os.PathLike[str]


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


def average(
    paths: Sequence[PathLike],
    output: PathLike,
    *,
    weights: Sequence[float] | None = None,
    normalize: bool = True,
    dtype: Any = None,
    key: str | None = None,
    progress: bool | Callable[[int, int], None] = False,
) -> Averaged:
    """Write the weighted mean of files: ``sum_i weights[i] * file_i / sum_i weights[i]``, tensor by tensor.

    A few MiB are read, averaged and written at a time, however many and large files and tensors are; only files of
    torch before 1.6 are loaded whole. It is computed in float32, in float64 where the
    tensors or ``dtype`` are, and stored in the dtypes of the files. Integers and bools take the value of the newest
    file, the last whose weight is not 0, and its metadata is kept, with a record of what was averaged. Tensors that
    are tied in all files stay tied.

    The output appears as a whole or not at all, whatever happens: it is written beside its place, brought to disk,
    then renamed.

    Args:
        paths: the files, oldest first: safetensors or files of ``torch.save``, the index of their shards, or a folder
            of transformers or diffusers that holds one of them. Of files of :func:`save_state`, the averages count.
        output: the file to write; a name in ``.safetensors``, or ``.pt``, ``.pth``, ``.bin``, ``.ckpt``.
        weights: one finite number for each file, whose sum is not 0; negative ones too. Default: all equal.
        normalize: whether to divide by the sum of the weights; without, ``sum_i weights[i] * file_i`` is written, as
            for differences of models. Default: ``True``.
        dtype: the dtype to store real tensors in, such as ``torch.bfloat16`` or its name; complex ones take its
            complex counterpart. Default: that of the files, which then have to agree.
        key: where in each file the weights are: keys of nested dicts, or what names begin with, joined by dots, such as
            ``"state_dict"``. Default: the tensors of the file, or its only dict of tensors.
        progress: ``True`` shows a bar with bytes and rate on stderr; a callable gets the bytes done and those in all.
            Default: ``False``.

    Returns:
        What was done.

    Raises:
        TypeError: ``paths`` is a single path, or a weight is no number.
        ValueError: there are no paths, not one weight for each, or weights that are not finite or sum to 0.
        CheckpointError: a file cannot be read, does not fit the others or is the output; the message names file and
            tensor, and the output is as it was.

    Example:
        >>> import functavg, tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> for step in (10, 20):
        ...     torch.save({"w": torch.full((2,), float(step)), "steps": torch.tensor(step)}, f"{folder}/{step}.pt")
        >>> done = functavg.checkpoints.average([f"{folder}/10.pt", f"{folder}/20.pt"], f"{folder}/mean.pt")
        >>> torch.load(f"{folder}/mean.pt")["w"], torch.load(f"{folder}/mean.pt")["steps"]
        (tensor([15., 15.]), tensor(20))

    Source: Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, 2018; Wortsman et al.,
    Model soups, 2022.
    """
    shares = check_weights(paths, weights, normalize)
    check_suffix(Path(output))
    readers = [open_weights(path, key) for path in paths]
    return write_sum(readers, output, shares, normalize=normalize, dtype=dtype, progress=progress)


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
    wanted = _check_dtype(dtype)
    check_match(readers, any_float=wanted is not None)
    _check_apart(readers, target)
    used = [(reader, weight) for reader, weight in zip(readers, weights, strict=True) if weight != 0]
    newest, ties = used[-1][0], common_ties(readers)
    infos = {name: _stored(info, wanted) for name, info in newest.infos.items()}
    files = [reader.path for reader in readers]
    record = make_record("average", files=list(map(str, files)), weights=list(weights), normalize=normalize, **facts)
    writer = make_writer(target, infos, ties, newest.metadata, newest.around, record)
    total = writer.nbytes + sum(reader.infos[name].nbytes for reader, _ in used for name in writer.names)
    with bars.reporting(progress, total) as advance, replacing(target, writer.nbytes) as file:
        writer.begin(file)
        for pieces in _pieces(writer, infos):
            sums = _sum(pieces, used, infos, normalize, advance)
            for piece in pieces:
                writer.write(file, piece, sums[piece.name])
                advance(sums[piece.name].nbytes)
    return Averaged(target, tuple(files), tuple(weights), len(writer.names), writer.nbytes)


def check_weights(paths: Sequence[PathLike], weights: Sequence[float] | None, normalize: bool) -> list[float]:
    """Return one weight for each path; they sum to 1 if they are to be normalised.

    Raises:
        TypeError: ``paths`` is a single path, or a weight is no number.
        ValueError: there are no paths, not one weight for each, or weights that are not finite or sum to 0.
    """
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise TypeError(f"paths must be a list of paths, got the one path {paths!r}")
    if not paths:
        raise ValueError("paths must hold at least one path, got none")
    numbers = [1.0] * len(paths) if weights is None else list(weights)
    if len(numbers) != len(paths):
        raise ValueError(f"weights must hold one number for each file, got {len(numbers)} for {len(paths)} files")
    numbers = [check_number(number, f"weights[{index}]") for index, number in enumerate(numbers)]
    for index, number in enumerate(numbers):
        if not math.isfinite(number):
            raise ValueError(f"weights[{index}] must be finite, got {number!r}")
    total = math.fsum(numbers)
    if not any(numbers) or (normalize and not abs(total) > 1e-12 * math.fsum(map(abs, numbers))):
        raise ValueError(f"weights must have a sum other than 0, which they are divided by, got {numbers}")
    return [number / total for number in numbers] if normalize else numbers


def _sum(
    pieces: list[Piece],
    used: list[tuple[Reader, float]],
    infos: dict[str, TensorInfo],
    normalize: bool,
    advance: Callable[[int], None],
) -> dict[str, Tensor]:
    """Return the weighted sum of some pieces of all files, in the dtypes that they are stored in."""
    wide = {
        piece.name: getattr(torch, _held(piece.name, used, infos[piece.name]))
        for piece in pieces
        if infos[piece.name].torch_dtype.is_floating_point or infos[piece.name].torch_dtype.is_complex
        if not normalize or any(reader.infos[piece.name].dtype != infos[piece.name].dtype for reader, _ in used)
    }

    def read(reader: Reader) -> dict[str, Tensor]:
        tensors = {}
        for piece in pieces:
            values = reader.read_piece(piece)
            advance(values.nbytes)
            # Where the sum is not stored as it is read, it must not be rounded in between.
            tensors[piece.name] = values.to(wide.get(piece.name))
        return tensors

    shares = [weight for _, weight in used]
    trees = (read(reader) for reader, _ in used)
    sums = combine(trees, shares) if normalize else _unnormalized(trees, shares)
    return {name: tensor.to(infos[name].torch_dtype) for name, tensor in sums.items()}


def _unnormalized(trees: Iterator[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    """Return the plain weighted sum; integers take the newest value."""
    sums: dict[str, Tensor] = {}
    for tree, weight in zip(trees, weights, strict=True):
        for name, tensor in tree.items():
            if not (tensor.is_floating_point() or tensor.is_complex()):
                sums[name] = tensor
            elif name in sums:
                sums[name].add_(tensor, alpha=weight)
            else:
                sums[name] = tensor.mul_(weight)
    return sums


def _pieces(writer: Writer, infos: dict[str, TensorInfo]) -> Iterator[list[Piece]]:
    """Yield all pieces in their order, as many at a time as are small together; no name stands twice among them."""
    group: list[Piece] = []
    size = 0
    for name in writer.names:
        info = infos[name]
        if group and size + info.nbytes > PIECE:
            yield group
            group, size = [], 0
        length = PIECE // info.torch_dtype.itemsize
        for start in range(0, info.numel - length, length):
            yield [Piece(name, start, start + length)]
        start = max(info.numel - 1, 0) // length * length
        group.append(Piece(name, start, info.numel))
        size += (info.numel - start) * info.torch_dtype.itemsize
    if group:
        yield group


def _held(name: str, used: list[tuple[Reader, float]], stored: TensorInfo) -> str:
    """Return the dtype to compute in: the widest of what is read and stored, at least float32 or complex64."""
    names = {dtypes.held_in(info.dtype, None) for info in [stored, *(reader.infos[name] for reader, _ in used)]}
    return max(names, key=dtypes.bits_of)


def _check_dtype(dtype: Any) -> str | None:
    """Return the name of a floating dtype, None where none was asked for."""
    if dtype is None:
        return None
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype must be a floating dtype of torch or its name, got {dtype!r}")
    return str(found).removeprefix("torch.")


def _stored(info: TensorInfo, wanted: str | None) -> TensorInfo:
    """Return what a tensor is stored as."""
    if wanted is None or not (info.torch_dtype.is_floating_point or info.torch_dtype.is_complex):
        return info
    if info.torch_dtype.is_complex:
        wanted = "complex128" if wanted == "float64" else "complex64"
    return TensorInfo(wanted, info.shape)


def _check_apart(readers: Sequence[Reader], output: Path) -> None:
    """Refuse an output that is one of the files that are read."""
    if not output.exists():
        return
    for reader in readers:
        for file in reader.files:
            if os.path.samefile(file, output):
                raise CheckpointError(f"{output}: the output is also an input, {file}; name another output")
