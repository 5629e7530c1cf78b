"""The layout of a safetensors file: the length of a header in 8 bytes, the header in JSON, the bytes of the tensors."""

from __future__ import annotations

__all__: list[str] = []

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from functavg.checkpoints.errors import CheckpointError
from functavg.checkpoints.tensors import TensorInfo

# Names in a file and in torch, in the order of the format's own list: larger elements are written first, so that all
# are aligned.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
NAMES = {name: code for code, name in DTYPES.items()}
_RANKS = {name: rank for rank, name in enumerate(NAMES)}

METADATA = "__metadata__"
MOST_HEADER = 100_000_000
"""The reference implementation refuses longer headers too: nothing else would bound what a corrupt length allocates."""


@dataclass(frozen=True)
class Layout:
    """What the header of a file says: the tensors, where each begins, and the metadata."""

    infos: dict[str, TensorInfo]
    offsets: dict[str, int]
    metadata: dict[str, str]


def decode(path: Path, file: BinaryIO, size: int) -> Layout:
    """Return the layout of a file of ``size`` bytes.

    Raises:
        CheckpointError: it is no whole safetensors file: truncated, with holes, or of a dtype that torch has not.
    """
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if length > MOST_HEADER:
        raise CheckpointError(f"{path}: corrupt: its header would have {length} bytes, more than {MOST_HEADER}")
    if len(start) < 8 or 8 + length > size:
        raise CheckpointError(f"{path}: truncated: {size} bytes do not hold its header, of {length} bytes after 8")
    try:
        header = json.loads(file.read(length), object_pairs_hook=_unique)
        metadata = header.pop(METADATA, None) or {}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError("metadata must be strings")
        return _layout(path, header, metadata, 8 + length, size)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: corrupt: its header is not that of safetensors ({error})") from error


def _layout(path: Path, header: dict[str, Any], metadata: dict[str, str], start: int, size: int) -> Layout:
    infos, offsets, spans = {}, {}, []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not hasattr(torch, DTYPES.get(entry["dtype"], "")):
            raise CheckpointError(f"{path}: {name!r} is of dtype {entry['dtype']}, which this torch does not have")
        info = TensorInfo(DTYPES[entry["dtype"]], tuple(entry["shape"]))
        if not all(type(length) is int and length >= 0 for length in info.shape):
            raise CheckpointError(f"{path}: corrupt: {name!r} has the shape {entry['shape']}")
        if end - begin != info.nbytes:
            raise CheckpointError(
                f"{path}: corrupt: {name!r} of {info.dtype} and shape {info.shape} takes {info.nbytes} bytes, "
                f"the header gives it those from {begin} to {end}"
            )
        infos[name], offsets[name] = info, start + begin
        spans.append((begin, end, name))
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            raise CheckpointError(f"{path}: corrupt: {name!r} begins at byte {begin} of the data, expected {reached}")
        reached = end
    if start + reached != size:
        state = "truncated" if start + reached > size else "corrupt"
        raise CheckpointError(f"{path}: {state}: its header tells of {start + reached} bytes, the file has {size}")
    return Layout(infos, offsets, metadata)


def order(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names in the order in which their tensors are written: the largest elements first, then by name."""
    return sorted(infos, key=lambda name: (-_RANKS[infos[name].dtype], name))


def encode(infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return all that goes before the tensors of a file, which follow in their ``order``."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    reached = 0
    for name in order(infos):
        info, begin, reached = infos[name], reached, reached + infos[name].nbytes
        header[name] = {"dtype": NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [begin, reached]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found
