"""update_bn on several ranks: each reads its part of the data, and all end with the statistics of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from functavg import AveragedModel, update_bn
from functavg.nn import ranks
from tests.distributed.processes import spawn
from tests.nn.helpers import alone

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
PARTS = ([5, 3, 4], [2, 7])
"""The sizes of the batches of each rank."""


def batches(sizes: list[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 2, 3, generator=generator) * 2 + seed + 5).to(dtype) for size in sizes]


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a model that has already seen other data, the same on every rank."""
    made = nn.Sequential(nn.BatchNorm1d(2), nn.Flatten(), nn.BatchNorm1d(6, momentum=None)).to(dtype)
    made(batches([8], 9, dtype)[0])
    return made


def statistics(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_equal_on_all_ranks(module: nn.Module) -> None:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {name: buffer.tolist() for name, buffer in module.named_buffers()})
    assert every == [every[0]] * len(every)


def own(parts: Any) -> Any:
    return parts[dist.get_rank()]


# ---- what each of two ranks does


def reads_its_part(wrap: Callable[[nn.Module], nn.Module], dtype: torch.dtype, parts: Any = PARTS) -> None:
    """Estimate from this rank's part, and compare with the definition over all parts."""
    data = [batches(sizes, seed, dtype) for seed, sizes in enumerate(parts)]
    every, normalise, expected = (
        [batch for part in data for batch in part],
        nn.BatchNorm1d(2, dtype=dtype),
        model(dtype),
    )
    exact(expected[0], every)
    exact(expected[2], [normalise(batch).flatten(1) for batch in every])
    wrapped = wrap(model(dtype))
    update_bn(own(data), wrapped)
    assert_equal_on_all_ranks(wrapped)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for (name, value), wanted in zip(norms(wrapped).items(), norms(expected).values(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=tolerance, atol=tolerance, msg=name)


def norms(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in module.named_buffers() if name.endswith(STATISTICS)}


def exact(norm: nn.BatchNorm1d, seen: list[Tensor]) -> None:
    """Give a BatchNorm the statistics of its batches, by their definition."""
    with torch.no_grad():
        channels = [batch.double().transpose(0, 1).flatten(1) for batch in seen]
        total = sum(batch.shape[1] for batch in channels)
        norm.running_mean.copy_(sum(batch.sum(1) for batch in channels) / total)
        norm.running_var.copy_(sum(batch.var(1) * batch.shape[1] for batch in channels) / total)
        norm.num_batches_tracked.fill_(len(seen))


def everything() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        reads_its_part(lambda made: made, dtype)
    reads_its_part(lambda made: AveragedModel(nn.parallel.DistributedDataParallel(made)), torch.float32)
    unequally_many_batches_of_ddp()
    one_rank_has_no_data()
    one_rank_skips_a_layer()
    no_rank_has_data()
    all_layers_are_frozen()
    lazy_layers()
    one_rank_fails()
    the_models_differ()
    batches_that_were_pooled_count_once()
    instance_norms()
    one_rank_has_scripted_norms()


def unequally_many_batches_of_ddp() -> None:
    """Its first forward would wait for the buffers of the first rank, which has no batches."""
    for parts in (PARTS, ([], [5, 3])):
        reads_its_part(nn.parallel.DistributedDataParallel, torch.float32, parts)
    wrapped = nn.parallel.DistributedDataParallel(model())
    update_bn(batches(own(PARTS)), wrapped)
    assert wrapped.broadcast_buffers


def one_rank_has_no_data() -> None:
    reads_its_part(lambda made: made, torch.float32, ([5, 3], []))
    reads_its_part(lambda made: made, torch.float32, ([], [5, 3]))


def one_rank_skips_a_layer() -> None:
    made = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2)])
    data = batches([4, 5])

    def forward(made: Any, batch: Tensor) -> None:
        made[0](batch)
        if dist.get_rank() == 1:
            made[1](batch)

    update_bn(data, made, forward=forward)
    assert_equal_on_all_ranks(made)
    assert [norm.num_batches_tracked.item() for norm in made] == [4, 2, 0]
    torch.testing.assert_close(made[0].running_mean, made[1].running_mean)
    assert made[2].running_mean.tolist() == [0.0, 0.0]


def no_rank_has_data() -> None:
    made = model()
    before = statistics(made)
    with pytest.raises(ValueError, match="the loader is empty"):
        update_bn([], made)
    torch.testing.assert_close(statistics(made), before, rtol=0, atol=0)


def all_layers_are_frozen() -> None:
    made = model()
    made[0].eval()
    made[2].eval()
    before = statistics(made)
    update_bn(batches([4]), made)
    torch.testing.assert_close(statistics(made), before, rtol=0, atol=0)


def lazy_layers() -> None:
    """Each rank initialises its own; one that has no data cannot."""
    made, expected = nn.LazyBatchNorm1d(), nn.BatchNorm1d(2)
    data = [batches([5, 3], 0), batches([2, 7], 1)]
    exact(expected, data[0] + data[1])
    update_bn(own(data), made)
    assert_equal_on_all_ranks(made)
    torch.testing.assert_close(statistics(made), statistics(expected), rtol=1e-6, atol=0)
    with pytest.raises(
        ValueError, match=r"do not estimate the same BatchNorms, on this one .*run one batch through it"
    ):
        update_bn(own([data[0], []]), nn.Sequential(nn.LazyBatchNorm1d()))
    both = nn.ModuleList([nn.BatchNorm1d(2), nn.LazyBatchNorm1d()])
    update_bn(own(data), both, forward=lambda both, batch: both[0](batch))
    torch.testing.assert_close(both[0].running_mean, expected.running_mean, rtol=1e-6, atol=0)


def one_rank_fails() -> None:
    made = model()
    before = statistics(made)

    def loader() -> Iterator[Tensor]:
        yield from batches([4])
        if dist.get_rank() == 1:
            raise OSError("the disk is gone")
        yield from batches([4, 4])

    error, message = own([(RuntimeError, "update_bn failed on rank 1"), (OSError, "the disk is gone")])
    with pytest.raises(error, match=message):
        update_bn(loader(), made)
    torch.testing.assert_close(statistics(made), before, rtol=0, atol=0)


def the_models_differ() -> None:
    made = model()
    if dist.get_rank() == 1:
        made[2].eval()
    before = statistics(made)
    names = own(["0 of 2 channels, 2 of 6 channels", "0 of 2 channels"])
    with pytest.raises(ValueError, match=rf"do not estimate the same BatchNorms, on this one {names}\."):
        update_bn(batches([4]), made)
    torch.testing.assert_close(statistics(made), before, rtol=0, atol=0)


class Pooled(nn.SyncBatchNorm):
    """What SyncBatchNorm does, also on a CPU: statistics of the batches of all ranks together."""

    def forward(self, batch: Tensor) -> Tensor:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, batch)
        return nn.BatchNorm1d.forward(self, torch.cat(parts))

    def _check_input_dim(self, batch: Tensor) -> None:
        pass


def batches_that_were_pooled_count_once() -> None:
    made, expected = Pooled(2), nn.BatchNorm1d(2)
    data = [batches([5, 3], 0), batches([2, 7], 1)]
    exact(expected, [torch.cat(parts) for parts in zip(*data, strict=True)])
    update_bn(own(data), made)
    assert_equal_on_all_ranks(made)
    torch.testing.assert_close(statistics(made), statistics(expected), rtol=1e-6, atol=0)


def instance_norms() -> None:
    made = nn.InstanceNorm1d(2, track_running_stats=True)
    data = [batches([5, 3], 0), batches([2, 7], 1)]
    update_bn(own(data), made)
    assert_equal_on_all_ranks(made)
    samples = torch.cat(data[0] + data[1]).double()
    torch.testing.assert_close(made.running_mean.double(), samples.mean(2).mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(made.running_var.double(), samples.var(2).mean(0), rtol=1e-6, atol=0)


def one_rank_has_scripted_norms() -> None:
    """It does not leave the others waiting."""
    made = model()
    if dist.get_rank() == 1:
        made[2] = torch.jit.script(made[2])
    error, message = own([(RuntimeError, "update_bn failed on rank 1"), (TypeError, "torch.jit has scripted")])
    with pytest.raises(error, match=message):
        update_bn(batches([4]), made)


# ---- tests


def test_ranks_end_with_the_statistics_of_all_their_data_and_none_waits_for_another(tmp_path: Path) -> None:
    spawn(everything, 2, tmp_path)


def test_one_process_alone_talks_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: pytest.fail("talked"))
    with alone():
        made = model()
        update_bn(batches([5, 3]), made)
        assert made[0].num_batches_tracked == 2
        with pytest.raises(ValueError, match="the loader is empty"):
            update_bn([], made)


def test_two_reductions_do_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, reduce = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: (calls.append(args), reduce(*args, **kwargs)))
    monkeypatch.setattr(ranks, "are_several", lambda: True)
    with alone():
        update_bn(batches([5, 3]), model())
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("config", "device", "place"),
    [("cuda:nccl", "cpu", "cuda"), ("cpu:gloo,cuda:nccl", "cpu", "cpu"), ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1")],
)
def test_ranks_reduce_where_their_backend_can(
    config: str, device: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    assert ranks._reducing_device(torch.device(device)) == torch.device(place)
