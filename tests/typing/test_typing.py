"""A user's code passes strict type checks, and wrong code does not."""

from __future__ import annotations

from pathlib import Path

from mypy import api

ROOT = Path(__file__).parents[2]


def check(file: Path) -> tuple[str, int]:
    report, errors, status = api.run(
        ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache"), str(file)]
    )
    return report + errors, status


def test_the_public_names_are_typed_as_users_write_them() -> None:
    report, status = check(Path(__file__).with_name("api.py"))
    assert status == 0, report


def test_wrong_code_is_found(tmp_path: Path) -> None:
    """One run for all lines: most of its time goes into reading torch."""
    wrong = [
        "functavg.EMA('0.9')",
        "functavg.SWA().init([1.0]).average.keys()",
        "functavg.AveragedModel(1)",
        "functavg.SWA().update([1.0], [1.0])",
    ]
    file = tmp_path / "wrong.py"
    file.write_text("\n".join(["import functavg", *wrong]) + "\n")
    report, status = check(file)
    assert status == 1
    for number, line in enumerate(wrong, 2):
        assert f"wrong.py:{number}" in report, line
