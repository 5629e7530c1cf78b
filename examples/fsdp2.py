"""The EMA of a model sharded by FSDP2: trained, evaluated, saved by all ranks and resumed to the same bits.

torchrun --nproc-per-node 2 examples/fsdp2.py [--steps 300] [--folder checkpoint]
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics  # English text that every Python has

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import functavg

CONTEXT, WIDTH, BATCH = 32, 32, 8
CHARACTERS = 128


class Transformer(nn.Module):
    """A small causal transformer over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, characters: Tensor, following: Tensor) -> Tensor:
        """Return the loss of predicting the characters that follow."""
        x = self.embedding(characters) + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return cross_entropy(self.head(x).flatten(0, 1), following.flatten())


class Run:
    """A sharded model with its optimizer and its average, whose shards lie where those of the model do."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, twin = sharded(Transformer()), sharded(Transformer())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.averaged = functavg.AveragedModel(self.model, module=twin, rule=functavg.EMA(0.95))
        self.averaged.attach(self.optimizer, self.model)

    def train(self, text: Tensor, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.model(*batch(text, seed=step * dist.get_world_size() + dist.get_rank())).backward()
            self.optimizer.step()

    @torch.no_grad()
    def losses(self, text: Tensor) -> tuple[float, float]:
        """Return the test losses of the trained weights and of their average."""
        held_out = [batch(text, seed) for seed in range(dist.get_rank(), 16, dist.get_world_size())]

        def mean() -> float:
            total = sum(self.model(*part) for part in held_out)
            dist.all_reduce(total)
            return total.item() / 16

        raw = mean()
        with functavg.swapped(self.model, self.averaged):  # in place, shard by shard
            return raw, mean()

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer, "averaged": self.averaged}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        saved = {"model": model, "optimizer": optimizer, "averaged": self.averaged}
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])

    def is_at(self, other: "Run") -> bool:
        """Tell whether two runs hold the same weights and averages, to the bit, on every rank."""
        pairs = zip(self.everything(), other.everything(), strict=True)
        equal = torch.tensor(all(torch.equal(mine.to_local(), theirs.to_local()) for mine, theirs in pairs))
        dist.all_reduce(equal, op=dist.ReduceOp.MIN)
        return bool(equal)

    def everything(self) -> list[Tensor]:
        return [*self.model.state_dict().values(), *self.averaged.state.average.values()]


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(text: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(seed))
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


@contextmanager
def shared_folder(folder: Path | None) -> Iterator[Path]:
    """Give all ranks of this machine one folder, a temporary one if none is given."""
    with tempfile.TemporaryDirectory() as temporary:
        names = [folder or Path(temporary)]
        dist.broadcast_object_list(names)
        yield names[0]
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="where to save the checkpoint (default: a temporary folder)")
    options = parser.parse_args()
    if options.steps < 4:
        parser.error(f"--steps must be at least 4, got {options.steps}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() > 0)

    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    characters = torch.tensor(list(text))
    train, test = characters[:-50_000], characters[-50_000:]

    table = Table(title=f"Test loss, {dist.get_world_size()} ranks")
    for column in ("step", "raw", "EMA"):
        table.add_column(column, justify="right")
    stops = [options.steps * part // 4 for part in range(5)]
    with shared_folder(options.folder) as folder:
        run = Run(seed=0)
        for start, stop in pairwise(stops):
            run.train(train, range(start, stop))
            table.add_row(str(stop), *(f"{value:.4f}" for value in run.losses(test)))
            if stop == stops[2]:
                run.save(folder)
        console.print(table)

        resumed = Run(seed=1)
        resumed.load(folder)
        console.print(f"resumed at step {resumed.averaged.n_averaged}")
        resumed.train(train, range(stops[2], stops[4]))
        bits = "the same bits" if resumed.is_at(run) else "OTHER BITS"
        console.print(f"at step {resumed.averaged.n_averaged} the resumed run holds {bits}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
