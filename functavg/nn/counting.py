"""The count of an average, held in a buffer and known to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCount:
    """What a count in a buffer is, read off an accelerator only where it may have changed.

    A buffer on the CPU is read each time, which waits for nothing. Elsewhere the count that was last read or written is
    trusted while the buffer is the same tensor at the same version. A meta buffer has no value: the host's counts.
    """

    def __init__(self) -> None:
        self._value = 0
        self._mark: tuple[Tensor, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the count for copies and pickles, in which no version is that of the original."""
        return {"_value": self._value, "_mark": None}

    def read(self, buffer: Tensor) -> int:
        """Return the count."""
        if buffer.device.type == "cpu":
            self._value = int(buffer)
        elif not buffer.is_meta and not self._is_known(buffer):
            self._value = int(buffer)
            self._remember(buffer)
        return self._value

    def write(self, buffer: Tensor, count: int) -> Tensor:
        """Write the count; return the buffer, a new one where the old cannot be written to."""
        if buffer.is_inference():
            with torch.inference_mode(False):
                buffer = torch.full_like(buffer, count)
        else:
            buffer.fill_(count)
        self._value = count
        if buffer.device.type != "cpu":
            self._remember(buffer)
        return buffer

    def _remember(self, buffer: Tensor) -> None:
        self._mark = None if buffer.is_inference() else (buffer, buffer._version)

    def _is_known(self, buffer: Tensor) -> bool:
        if self._mark is None or buffer.is_inference():
            return False
        known, version = self._mark
        return known is buffer and version == buffer._version
