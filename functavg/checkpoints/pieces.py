"""How tensors are cut, to be dealt with a few MiB at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from functavg.checkpoints.tensors import Piece, TensorInfo

PIECE = 2**21
"""So many bytes are averaged at a time: they stay in the cache, and a tensor of any size takes no more memory."""


def group_pieces(names: Iterable[str], infos: Mapping[str, TensorInfo]) -> Iterator[list[Piece]]:
    """Yield all pieces in their order, as many at a time as are small together; no name stands twice among them."""
    group: list[Piece] = []
    size = 0
    for name in names:
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


def count_bytes(pieces: Sequence[Piece], forms: Sequence[Mapping[str, TensorInfo]]) -> int:
    """Return how many bytes pieces have in several forms together."""
    return sum((it.stop - it.start) * infos[it.name].torch_dtype.itemsize for it in pieces for infos in forms)
