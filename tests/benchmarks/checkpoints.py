"""Averages of files, against reading and writing as many bytes. As a process of its own, for its peak memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from functavg import checkpoints
from tests.benchmarks.measure import interleaved
from tests.benchmarks.report import markdown

FILES = 4
SIZE = 500_000_000
TENSORS = 20
SUFFIXES = (".safetensors", ".pt")


def of_files(summary: list[tuple[str, ...]], rounds: int = 9) -> str:
    """Return the section on files and add its rows to the summary; it needs 3 GB of disk for a while."""
    rows = []
    for suffix in SUFFIXES:
        with tempfile.TemporaryDirectory() as folder:
            for index in range(FILES):
                tensors = {f"layer{i}.weight": torch.randn(SIZE // TENSORS // 4) for i in range(TENSORS)}
                checkpoints.save_weights(Path(folder) / f"{index}{suffix}", tensors)
            del tensors
            command = [sys.executable, "-m", "tests.benchmarks.checkpoints", folder, suffix, str(rounds)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        ratio = found["average"] / found["copy"]
        rows.append(
            (
                suffix,
                f"{found['average']:.2f}",
                f"{found['copy']:.2f}",
                f"{ratio:.2f}",
                f"{found['peak'] / 2**20:.0f} MiB",
            )
        )
        work = f"{FILES} files of {SIZE // 10**6} MB, {suffix}"
        summary.append((work, "checkpoints.average", "read and write once", f"{ratio:.2f}", "the disk, and one sum"))
    return (
        f"## Averaging {FILES} files of {SIZE // 10**6} MB\n\n"
        f"{TENSORS} tensors of float32 a file. The limit reads all files and writes one of them again, to disk; "
        "times are wall times. "
        "Memory is what the process grows by at most after torch was imported.\n\n"
        + markdown(("format", "average, s", "read and write once, s", "× limit", "peak memory"), rows)
    )


def _copy(paths: list[Path], output: Path) -> None:
    """Read all files and write the last one again, to disk."""
    buffer = memoryview(bytearray(2**22))
    with open(output, "wb", buffering=0) as target:
        for path in paths:
            with open(path, "rb", buffering=0) as source:
                while count := source.readinto(buffer):
                    if path == paths[-1]:
                        target.write(buffer[:count])
        os.fsync(target.fileno())


def _peak() -> int:
    """Return how large this process was at most; 0 where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _measure(folder: Path, suffix: str, rounds: int) -> None:
    """Print times and memory of this process, which does nothing else."""
    paths = [folder / f"{index}{suffix}" for index in range(FILES)]
    output = folder / f"output{suffix}"

    def average() -> None:
        output.unlink(missing_ok=True)  # both write a file where there is none
        checkpoints.average(paths, output)

    def copy() -> None:
        output.unlink(missing_ok=True)
        _copy(paths, output)

    before = _peak()
    average()
    grown = _peak() - before  # of one average: rounds run without the collector of garbage
    times = interleaved({"average": average, "copy": copy}, rounds)
    print(json.dumps({name: time.least for name, time in times.items()} | {"peak": grown}))


if __name__ == "__main__":
    _measure(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
