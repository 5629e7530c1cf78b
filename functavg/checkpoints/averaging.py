"""The weighted mean of files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from functavg.checkpoints.opening import open_weights
from functavg.checkpoints.summing import Averaged, PathLike, write_sum
from functavg.checkpoints.writers import check_suffix
from functavg.checks import check_number


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
    torch before 1.6 are loaded whole. It is computed in float32, in float64 where the tensors or ``dtype`` are, and
    stored in the dtypes of the files. Integers and bools take the value of the newest file, the last whose weight is
    not 0, and its metadata is kept, with a record of what was averaged. Tensors that are tied in all files stay tied.

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
