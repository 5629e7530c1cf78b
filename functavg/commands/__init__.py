"""The command line: what files to take, and how results are shown. The work is done by ``functavg.checkpoints``."""

from __future__ import annotations

__all__: list[str] = []

import typer

from functavg.commands.average import average
from functavg.commands.convert import convert
from functavg.commands.inspect import inspect
from functavg.commands.posthoc import posthoc
from functavg.commands.profile import profile
from functavg.commands.soup import soup
from functavg.commands.spreading import SpreadingCommand

app: typer.Typer = typer.Typer(
    help="Average checkpoint files, a few MiB at a time, and look at what averages remember.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=SpreadingCommand)(average)
app.command()(posthoc)
app.command()(soup)
app.command()(convert)
app.command(name="inspect")(inspect)
app.command()(profile)
