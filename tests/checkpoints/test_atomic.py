"""Whatever happens to the process, the output is the old file or the new one, whole."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import types

import pytest
import torch

from functavg import checkpoints
from functavg.checkpoints import atomic, pieces
from tests.checkpoints.files import FORMATS, load, save
from tests.checkpoints.killed import average_forever

KILLS = 20


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="kills as Unix does")
@pytest.mark.parametrize("suffix", FORMATS)
def test_a_process_killed_at_random_moments_leaves_a_whole_output(tmp_path, suffix):
    inputs = [
        save(tmp_path / f"{value}{suffix}", {f"layer{index}": torch.full((50,), float(value)) for index in range(20)})
        for value in (0, 7)
    ]
    output = tmp_path / f"out{suffix}"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.checkpoints.killed"])
    halfway = 0
    for _ in range(KILLS):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=average_forever, args=(inputs, output, theirs))
        process.start()
        theirs.close()  # so that the end of the process is noticed
        ours.recv()
        time.sleep(random.uniform(0, 0.05))
        process.kill()
        process.join()
        tensors = load(output)
        assert len(tensors) == 20
        (value,) = {value for tensor in tensors.values() for value in tensor.tolist()}
        assert value in range(8)
        for path in tmp_path.glob(".*.tmp"):
            halfway += 1
            path.unlink()
    assert halfway > KILLS // 4  # otherwise the kills came between averages
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")
@pytest.mark.parametrize("suffix", FORMATS)
def test_the_disk_follows_while_the_file_is_written(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 400)
    advise, sizes = os.posix_fadvise, []

    def record(descriptor, offset, length, advice):
        sizes.append(os.fstat(descriptor).st_size)
        advise(descriptor, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", record)
    tensors = {f"layer{index}": torch.full((100,), float(index)) for index in range(20)}
    inputs = [save(tmp_path / f"{index}{suffix}", tensors) for index in range(2)]
    checkpoints.average(inputs, tmp_path / f"out{suffix}")
    assert len(sizes) == 2
    assert 0 < sizes[0] <= sizes[1] < os.path.getsize(inputs[0]) * 1.5
    assert all(torch.equal(value, tensors[name]) for name, value in load(tmp_path / f"out{suffix}").items())


def test_a_system_without_folders_to_sync_and_without_advice_has_the_file_all_the_same(tmp_path, monkeypatch):
    """As Windows is."""
    system = {name: value for name, value in vars(os).items() if name != "posix_fadvise"}
    monkeypatch.setattr(atomic, "os", types.SimpleNamespace(**system | {"name": "nt"}))
    path = save(tmp_path / "in.safetensors", {"w": torch.ones(2)})
    checkpoints.average([path], tmp_path / "out.safetensors")
    assert torch.equal(load(tmp_path / "out.safetensors")["w"], torch.ones(2))
