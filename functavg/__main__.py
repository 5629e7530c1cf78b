"""The command ``functavg``, also ``python -m functavg``."""

from __future__ import annotations

__all__: list[str] = []

import signal
import sys
from collections.abc import Sequence
from types import FrameType

NEEDS = {"typer", "rich"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; it ends in ``SystemExit``.

    The code is 0 for success, 1 for files and values that cannot be used, 2 for a call that is none, 130 and 143 for
    interrupts. Whatever ends it, temporary files are removed.
    """
    try:
        from functavg.commands import app
    except ModuleNotFoundError as error:
        if error.name not in NEEDS:
            raise
        sys.exit(f"functavg: the command needs {error.name}, which is not installed: pip install 'functavg[cli]'")
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app(args=arguments, prog_name="functavg", standalone_mode=True)
    except (ValueError, ImportError, OSError) as error:
        sys.exit(f"functavg: {error}")


def _terminate(number: int, frame: FrameType | None) -> None:
    """End as an exception does, so that temporary files are removed."""
    del frame
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
