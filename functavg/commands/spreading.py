"""Options that take any number of values: ``--weights 0.5 0.3 0.2``."""

from __future__ import annotations

__all__: list[str] = []

from typing import Any

import typer.core

MANY = {"--weights", "-w"}


class SpreadingCommand(typer.core.TyperCommand):
    """A command whose ``--weights`` takes all numbers that follow it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each of its values, as the parser wants it."""
        spread: list[str] = []
        option = ""
        for index, token in enumerate(args):
            if token in MANY:
                option = token
            elif option and index and args[index - 1] != option and is_numbers(token):
                spread.append(option)
            elif args[index - 1] != option:
                option = ""
            spread.append(token)
        return super().parse_args(ctx, spread)


def is_numbers(token: str) -> bool:
    """Tell whether a token is a number, or several with commas between them."""
    try:
        return bool([float(part) for part in token.split(",")])
    except ValueError:
        return False
