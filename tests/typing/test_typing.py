"""A user's code passes strict type checks, and wrong code does not; ``tox -e types`` asks pyright too."""

from __future__ import annotations

from pathlib import Path

from mypy import api

ROOT = Path(__file__).parents[2]


def test_the_public_names_are_typed_as_users_write_them() -> None:
    """What is wrong in the file is ignored there by its code; an ignore without an error would be one."""
    report, errors, status = api.run(
        [
            *("--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")),
            str(Path(__file__).with_name("api.py")),
        ]
    )
    assert status == 0, report + errors
