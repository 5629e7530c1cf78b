"""What an installed wheel must do, with torch and without: run it where functavg is installed, outside the repository.

python -I tests/smoke.py --without-torch
python -I tests/smoke.py
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import functavg


def check_installation() -> None:
    root = Path(functavg.__file__).parent
    assert root.parent.name == "site-packages", f"{root} is no installed package"
    assert (root / "py.typed").is_file()
    metadata = importlib.metadata.metadata("functavg")
    assert metadata["Version"] == functavg.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    relative = re.findall(r"\]\((?!https?:|#)[^)]*\)", str(metadata.get_payload() or metadata["Description"]))
    assert not relative, f"links that break outside the repository: {relative}"
    # Core and extras apart: "numpy>=1", but 'torch>=2; extra == "torch"'.
    needed = {line for line in importlib.metadata.requires("functavg") or () if "extra ==" not in line}
    assert {line.split(">")[0] for line in needed} == {"numpy", "optree"}, needed


def check_rules(make: Any) -> None:
    """Average trees of arrays that ``make`` makes of lists."""
    for rule, wanted in [
        (functavg.EMA(0.5), [2.25, 4.0]),
        (functavg.SWA(), [2.0, 4.0]),
        (functavg.Every(functavg.SWA(), 1), [2.0, 4.0]),
        (functavg.LAWA(2), [2.5, 4.0]),
    ]:
        state = rule.init({"w": make([0.0, 4.0])})
        for value in (1.0, 2.0, 3.0):
            state = rule.update({"w": make([value, 4.0])}, state)
        assert [float(value) for value in state.average["w"]] == wanted, (rule, state)
        again = functavg.from_state_dict(rule.init({"w": make([0.0, 0.0])}), functavg.to_state_dict(state))
        assert again.count == 3
        assert [float(value) for value in again.average["w"]] == wanted, (rule, again)
    assert functavg.profile(functavg.SWA(), 4).weights.tolist() == [0.25] * 4
    assert abs(functavg.schedules.TFWarmup(0.999)(1) - 2 / 11) < 1e-12


def check_without_torch() -> None:
    assert importlib.util.find_spec("torch") is None, "torch is installed"
    assert "AveragedModel" not in dir(functavg)
    for name in ("AveragedModel", "swapped", "update_bn", "checkpoints", "swa_utils"):
        check_message(lambda name=name: getattr(functavg, name))
    for module in ("functavg.nn", "functavg.checkpoints", "functavg.swa_utils"):
        check_message(lambda module=module: importlib.import_module(module))


def check_message(use: Any) -> None:
    try:
        use()
        message = "no error"
    except ImportError as error:
        message = str(error)
    assert "pip install 'functavg[torch]'" in message, message


def check_with_torch() -> None:
    import torch

    check_rules(torch.tensor)
    model = torch.nn.Linear(2, 1, bias=False)
    averaged = functavg.AveragedModel(model, rule=functavg.EMA(0.5))
    for value in (1.0, 2.0, 3.0):
        torch.nn.init.constant_(model.weight, value)
        averaged.update_parameters(model)
    with functavg.swapped(model, averaged):
        assert model.weight.tolist() == [[2.25, 2.25]]
    assert model.weight.tolist() == [[3.0, 3.0]]
    other = functavg.swa_utils.AveragedModel(model)
    other.load_state_dict(averaged.state_dict())
    assert other.n_averaged.item() == 3
    assert other.module.weight.tolist() == [[2.25, 2.25]]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{step}.pt") for step in (1, 2)]
        for step, file in enumerate(files, 1):
            torch.save({"weight": torch.full((2,), float(step))}, file)
        average = Path(folder, "average.safetensors")
        functavg.checkpoints.average(files, average)
        assert functavg.checkpoints.inspect(average).format == "safetensors"


def check_command() -> None:
    """Without its packages the command says what to install."""
    done = subprocess.run([sys.executable, "-Im", "functavg", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "pip install 'functavg[" in done.stderr, done


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--without-torch", action="store_true")
    without_torch = parser.parse_args().without_torch
    check_installation()
    check_rules(np.asarray)
    if importlib.util.find_spec("jax"):
        check_rules(importlib.import_module("jax.numpy").asarray)
    check_without_torch() if without_torch else check_with_torch()
    check_command()
    print(f"functavg {functavg.__version__} works", "without torch" if without_torch else "with torch")
