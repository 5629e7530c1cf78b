"""Every example runs from a shell as its documentation says, prints its results and writes its picture."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PNG = b"\x89PNG\r\n\x1a\n"

# What makes a run short, and what it must print.
RUNS = {
    "quickstart": (["--epochs", "2", "--output", "curves.png"], ["raw", "SWA", "EMA", "accuracy", "loss"]),
    "functional": (["--epochs", "1"], ["test accuracy, raw", "test accuracy, EMA", "75 steps averaged"]),
    "jax_loop": (["--epochs", "2"], ["raw", "SWA", "EMA", "accuracy", "loss"]),
    "numpy_only": (["--epochs", "2"], ["last iterate", "SWA()", "torch was not imported"]),
    "custom_avg_fn": ([], ["3.125  AvgFn(", "12.000  AvgFn(", "7.188  MeanThenEMA("]),
    "several_averages": (["--steps", "150"], ["raw", "half-life 20", "half-life 500", "last 5 snapshots"]),
    "fsdp2": (["--steps", "40"], ["2 ranks", "raw", "EMA", "resumed at step 20", "at step 40", "the same bits"]),
    "posthoc": (["--steps", "300"], ["8 snapshots", "0.05", "0.10", "best"]),
    "mean_teacher": (["--steps", "40"], ["labels and teacher", "student", "Test accuracy, 40 labels"]),
}
# Examples for several processes, which a launcher starts.
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHED = {"fsdp2"}
PICTURES = {
    "quickstart": ["curves.png"],
    "jax_loop": ["jax_loop.png"],
    "several_averages": ["several_averages.png"],
    "posthoc": ["posthoc.png"],
}
NEEDS = {"jax_loop": "jax"}
"""A library that an example is about, and is skipped without."""


def run(name: str, *options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run an example with warnings as errors, in an empty folder."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "MPLBACKEND": "Agg", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    environment |= {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    launcher = LAUNCHER if name in LAUNCHED else []
    return subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *options],
        cwd=cwd,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )


def test_every_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_an_example_runs_and_prints_its_results(name, tmp_path):
    pytest.importorskip(NEEDS.get(name, "functavg"))
    options, expected = RUNS[name]
    done = run(name, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for text in expected:
        assert text in done.stdout
    assert not re.search(r"\b(nan|inf)\b", done.stdout)
    assert [path.name for path in tmp_path.iterdir()] == PICTURES.get(name, [])
    for picture in tmp_path.iterdir():
        assert picture.read_bytes().startswith(PNG)
        assert str(picture) in done.stdout


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fsdp2", ["--steps", "3"], "--steps must be at least 4, got 3"),
        ("quickstart", ["--epochs", "0"], "--epochs must be at least 1, got 0"),
        ("jax_loop", ["--epochs", "0"], "--epochs must be at least 1, got 0"),
        ("several_averages", ["--steps", "74"], "--steps must be at least 75, got 74"),
        ("posthoc", ["--steps", "74"], "--steps must be at least 75, got 74"),
        ("mean_teacher", ["--steps", "0"], "--steps must be at least 1, got 0"),
    ],
)
def test_an_example_refuses_a_run_too_short_to_show_anything(name, options, message, monkeypatch, capsys):
    pytest.importorskip(NEEDS.get(name, "functavg"))
    monkeypatch.setattr(sys, "argv", [name, *options])
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message in capsys.readouterr().err
