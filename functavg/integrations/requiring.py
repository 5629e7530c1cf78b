"""What to say where a framework is not installed."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, extra: str) -> Any:
    """Import a module of a framework.

    Args:
        module: its name.
        extra: the extra of functavg that brings it.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the framework itself lacks
        raise ImportError(
            f"functavg.integrations.{extra} needs {module}, which is not installed: pip install 'functavg[{extra}]'"
        ) from error
