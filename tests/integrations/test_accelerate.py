"""The recipe for Accelerate: attach to the prepared optimizer, register the average for checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from functavg import EMA, LAWA, SWA, AveragedModel, Several, swapped, to_state_dict
from tests import oracle
from tests.integrations import digits

accelerate = pytest.importorskip("accelerate")

X, Y, TEST_X, TEST_Y = digits.load()


@pytest.fixture(autouse=True)
def _fresh_state():
    """What accelerate keeps for a whole process is made anew; trainers of other tests may have made it."""

    def reset():
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()

    reset()
    yield
    reset()


class Run:
    """A training of 8 batches in an epoch, each in 2 halves."""

    def __init__(self, folder, rule, scaler=None, **options):
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=2, project_dir=str(folder), **options
        )
        self.accelerator.scaler = scaler
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(TensorDataset(X, Y), batch_size=32)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.averaged = AveragedModel(self.model, rule=rule)
        self.averaged.attach(self.optimizer, self.model)
        self.accelerator.register_for_checkpointing(self.averaged)
        self.iterates = []

    def train(self, first=0, last=16, spoil=None):
        for index, (x, y) in enumerate(self.accelerator.skip_first_batches(self.loader, first), first):
            if index == last:
                break
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(nn.functional.cross_entropy(self.model(x), y))
                if index == spoil:
                    self.model[1].weight.grad.fill_(torch.inf)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if index % 2 == 1 and index != spoil:
                self.iterates.append(digits.snapshot(self.model))
        return self


def test_accumulated_micro_batches_are_no_steps_and_the_average_is_evaluated(tmp_path):
    run = Run(tmp_path, EMA(0.8)).train()
    assert run.averaged.n_averaged == len(run.iterates) == 8
    expected = digits.weighted(oracle.ema(0.8), run.iterates)
    digits.assert_close(digits.snapshot(run.averaged.module), expected)
    run.model.eval()
    run.averaged.eval()
    with torch.no_grad(), swapped(run.model, run.averaged):
        torch.testing.assert_close(run.model(TEST_X), run.averaged(TEST_X))
    digits.assert_same(digits.snapshot(run.model), run.iterates[-1])


def test_steps_that_a_scaler_skips_are_no_steps(tmp_path):
    run = Run(tmp_path, SWA(), scaler=torch.amp.GradScaler("cpu", init_scale=4.0)).train(spoil=5)
    assert run.averaged.n_averaged == len(run.iterates) == 7
    digits.assert_close(digits.snapshot(run.averaged.module), digits.weighted(oracle.swa, run.iterates))


@pytest.mark.parametrize("rule", [EMA(0.8), Several({"fast": EMA(0.8), "window": LAWA(3)})], ids=["ema", "several"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_killed_and_resumed_run_ends_in_the_bits_of_an_uninterrupted_one(tmp_path, rule, precision):
    whole = Run(tmp_path, rule, mixed_precision=precision).train()
    killed = Run(tmp_path, rule, mixed_precision=precision).train(last=8)
    killed.accelerator.save_state(str(tmp_path / "checkpoint"))
    killed.train(8, 10)  # lost
    resumed = Run(tmp_path, rule, mixed_precision=precision)
    resumed.accelerator.load_state(str(tmp_path / "checkpoint"))
    assert resumed.averaged.n_averaged == 4
    resumed.train(8)
    digits.assert_same(*(to_state_dict(run.averaged.state) for run in (whole, resumed)))
    digits.assert_same(whole.model.state_dict(), resumed.model.state_dict())
