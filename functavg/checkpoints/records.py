"""What functavg writes into files about how they came about."""

from __future__ import annotations

__all__: list[str] = []

import json
from collections.abc import Mapping
from typing import Any

from functavg.checkpoints.readers import Reader

NAME = "functavg"
"""The entry in the metadata of safetensors files, and of dicts around tensors in torch files."""

ATTRIBUTE = "_functavg"
"""The attribute of a dict of tensors that stands in a torch file by itself: an entry would be loaded as a weight."""

VERSION = 1


def make_record(kind: str, **facts: Any) -> dict[str, Any]:
    """Return a record of a file of some kind."""
    return {"kind": kind, "version": VERSION, **facts}


def record_of(reader: Reader) -> dict[str, Any]:
    """Return the record in a file, empty where there is none."""
    found = _of_torch(reader)
    if found is None:
        try:
            found = json.loads(reader.metadata[NAME])
        except (KeyError, ValueError):
            found = None
    return found if isinstance(found, dict) else {}


def record_in(checkpoint: Any) -> dict[str, Any]:
    """Return the record in what a torch file holds, empty where there is none."""
    found = getattr(checkpoint, ATTRIBUTE, None)
    if found is None and isinstance(checkpoint, Mapping):
        found = checkpoint.get(NAME)
    return found if isinstance(found, dict) else {}


def _of_torch(reader: Reader) -> Any:
    around = reader.around
    return around.beside[0].get(NAME) if around.beside else around.attributes.get(ATTRIBUTE)
