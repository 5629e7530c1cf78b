"""An update in place of 100 million parameters needs less than 16 MiB beside the average and the params."""

from __future__ import annotations

import subprocess
import sys

import pytest

resource = pytest.importorskip("resource", reason="peak memory is read from the operating system")

SCRIPT = """
import resource, sys
import functavg

def peak():
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024

def check(average, params):
    before = peak()  # everything is in memory by now, so that the peak is what is in use
    functavg.lerp(average, params, 0.001, inplace=True)
    print((peak() - before) / 2**20)

{body}
"""
TORCH = """
import torch
torch.set_num_threads(1)

def tree(size, dtype):  # a large leaf, and many small ones that are taken together
    return {{"large": torch.ones(size // 2, dtype=dtype), "small": list(torch.ones(100, size // 200, dtype=dtype))}}

functavg.lerp(tree(10**4, torch.{average}), tree(10**4, torch.{params}), 0.5, inplace=True)
check(tree(10**8, torch.{average}), tree(10**8, torch.{params}))
"""
NUMPY = """
import numpy as np
functavg.lerp(np.ones(9), np.ones(9, np.float32), 0.5, inplace=True)
check(np.ones(10**8, np.{average}), np.ones(10**8, np.{params}))
"""


@pytest.mark.parametrize(
    ("body", "average", "params"),
    [
        (TORCH, "float32", "float32"),
        (TORCH, "float32", "bfloat16"),
        (NUMPY, "float32", "float16"),
    ],
    ids=["torch, same dtype", "torch, mixed precision", "numpy"],
)
def test_an_update_in_place_takes_little_memory(body: str, average: str, params: str) -> None:
    script = SCRIPT.format(body=body.format(average=average, params=params))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 16
