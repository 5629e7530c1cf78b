"""What to install for the parts of the library that need more than numpy."""

from __future__ import annotations

__all__: list[str] = []


def check_torch(user: str) -> None:
    """Raise a ModuleNotFoundError that says what to install, unless torch is installed.

    Args:
        user: the name that needs torch.
    """
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":  # torch is there, and misses something of its own
            raise
        message = f"{user} needs torch, which is not installed: pip install 'functavg[torch]'"
        raise ModuleNotFoundError(message, name="torch") from error
