"""A small net for the digits that Lightning trains; run as a program, on two ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from functavg import EMA, to_state_dict
from functavg.integrations.lightning import AveragingCallback
from tests.integrations import digits

X, Y, TEST_X, TEST_Y = digits.load()


class DigitsNet(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(-1) == batch[1]).double().mean())

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_accuracy", (self(batch[0]).argmax(-1) == batch[1]).double().mean())

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(X, Y), batch_size=64)  # 8 steps in an epoch

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(TEST_X, TEST_Y), batch_size=256)

    test_dataloader = predict_dataloader = val_dataloader


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Ranks(Callback):
    """Writes what a rank has at the end."""

    def __init__(self, folder: Path, averaging: AveragingCallback) -> None:
        self.folder = folder
        self.averaging = averaging

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        saved = {"state": to_state_dict(self.averaging.state), "model": pl_module.state_dict()}
        torch.save(saved, self.folder / f"rank-{dist.get_rank()}.pt")


def train_on_two_ranks(folder: Path) -> None:
    averaging = AveragingCallback(EMA(0.9), update_bn=True)
    trainer = Trainer(
        max_epochs=2,
        strategy="ddp_fork",
        devices=2,
        callbacks=[averaging, Ranks(folder, averaging)],
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(DigitsNet())


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_on_two_ranks(Path(sys.argv[1]))
