"""The example for the shell runs as its documentation says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_example_averages_the_checkpoints_of_a_run(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", str(ROOT / "examples" / "average_checkpoints.sh")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("step-500.safetensors  0.333333", "residual", "sigma rel", "average of", "functavg"):
        assert text in done.stdout
    assert not list(tmp_path.iterdir())
