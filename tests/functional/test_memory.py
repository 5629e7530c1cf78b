"""An update in place of 100 million parameters needs less than 16 MiB beside the average and the params."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

resource = pytest.importorskip("resource", reason="peak memory is read from the operating system")

SCRIPT = """
import resource, sys
import functavg, torch

torch.set_num_threads(1)

def tree(size, dtype):  # a large leaf, and many small ones that are taken together
    return {{"large": torch.ones(size // 2, dtype=dtype), "small": list(torch.ones(100, size // 200, dtype=dtype))}}

def peak():
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024

functavg.lerp(tree(10**4, torch.{average}), tree(10**4, torch.{params}), 0.5, inplace=True)
average, params = tree(10**8, torch.{average}), tree(10**8, torch.{params})
before = peak()  # the trees are all in memory and nothing larger ever was, so that the peak is what is in use
functavg.lerp(average, params, 0.001, inplace=True)
print((peak() - before) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("average", "params"), [("float32", "float32"), ("float32", "bfloat16")], ids=["same dtype", "mixed precision"]
)
def test_an_update_in_place_takes_little_memory(average: str, params: str) -> None:
    script = SCRIPT.format(average=average, params=params)
    # What is freed goes back to the system at once, so that the peak is what is in use, and not what glibc keeps.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 16
