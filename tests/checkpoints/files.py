"""Small files of weights, and how the libraries of their formats read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

FORMATS = (".safetensors", ".pt")


def save(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    """Write tensors with the library of the format; return the path."""
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(dict(tensors), path, metadata)
    else:
        torch.save(dict(tensors), path)
    return path


def load(path: Path) -> dict[str, Tensor]:
    """Read tensors with the library of the format."""
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    return torch.load(path, weights_only=True)


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def names_in(folder: Path) -> set[str]:
    """Return the names of all files in a folder, temporary ones too."""
    return {path.name for path in folder.iterdir()}


def run_code(code: str) -> Any:
    """An object whose pickle runs code when it is loaded."""

    class Code:
        def __reduce__(self) -> Any:
            return (exec, (code,))

    return Code()
