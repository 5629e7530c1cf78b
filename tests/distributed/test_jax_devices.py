"""Averages of arrays that are sharded over devices of JAX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_averages_of_sharded_params_are_sharded_like_them() -> None:
    """Eagerly, jitted with donation and in a scan, with the values of one device; see ``two_jax_devices``."""
    pytest.importorskip("jax")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.distributed.two_jax_devices"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
