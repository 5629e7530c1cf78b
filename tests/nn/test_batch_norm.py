"""update_bn: what is estimated, what is put back, which batches it takes."""

from __future__ import annotations

import copy
import sys
import threading
from collections import OrderedDict, UserDict, namedtuple
from contextlib import nullcontext
from types import MappingProxyType

import pytest
import torch
from torch import distributed, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import swa_utils

from functavg.nn import AveragedModel, update_bn
from functavg.nn.estimating import Estimate
from tests.nn.helpers import alone

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
KINDS = {
    "BatchNorm1d": (nn.BatchNorm1d, (3,)),
    "BatchNorm1d of sequences": (nn.BatchNorm1d, (3, 4)),
    "BatchNorm2d": (nn.BatchNorm2d, (3, 4, 5)),
    "BatchNorm3d": (nn.BatchNorm3d, (3, 2, 3, 4)),
    "SyncBatchNorm": (nn.SyncBatchNorm, (3, 4)),
}
Pair = namedtuple("Pair", "x y")
Edge = namedtuple("Edge", "start to")


def batches(shape=(2,), sizes=(5, 3, 4), seed=0, offset=5.0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, *shape, generator=generator) * 2 + offset for size in sizes]


def snapshot(module):
    """Return everything that must not change: tensors by identity, their values and versions, modes, momenta, hooks."""
    return {
        "identities": {name: id(buffer) for name, buffer in module.named_buffers()},
        "values": {name: buffer.tolist() for name, buffer in module.named_buffers()},
        "versions": {name: buffer._version for name, buffer in module.named_buffers()},
        "modes": {name: child.training for name, child in module.named_modules()},
        "momenta": {name: getattr(child, "momentum", None) for name, child in module.named_modules()},
        "hooks": {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in module.named_modules()},
    }


@pytest.fixture
def no_group(monkeypatch):
    """Keep other tests' process groups from SyncBatchNorm, which in one takes no CPU tensors."""
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)


@pytest.fixture
def group():
    """Give a process group of this process alone."""
    with nullcontext() if distributed.is_initialized() else alone():
        yield


def used(*norms):
    """Return a small model around BatchNorms of two channels that have already seen other data."""
    model = nn.Sequential(nn.Linear(2, 2), *(norms or (nn.BatchNorm1d(2), nn.BatchNorm1d(2, momentum=0.3))))
    for batch in batches(seed=1, offset=-3.0):
        model(batch)
    return model


# ---- what is estimated


def test_each_sample_weighs_the_same_whatever_its_batch():
    norm = nn.BatchNorm1d(1)
    update_bn([torch.zeros(99, 1), torch.full((2, 1), 101.0)], norm)
    assert norm.running_mean.item() == pytest.approx(2.0, rel=1e-6)


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_is_that_of_all_samples_of_uneven_batches(kind):
    make, shape = KINDS[kind]
    norm, data = make(3), batches(shape, (7, 2, 5, 3))
    update_bn(data, norm)
    exact = torch.cat(data).double().transpose(0, 1).flatten(1).mean(1)
    torch.testing.assert_close(norm.running_mean.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize("kind", KINDS)
def test_the_variance_is_the_mean_of_unbiased_batch_variances_by_size(kind):
    make, shape = KINDS[kind]
    norm, data = make(3), batches(shape, (7, 2, 5, 3))
    update_bn(data, norm)
    channels = [batch.double().transpose(0, 1).flatten(1) for batch in data]
    exact = sum(batch.var(1) * batch.shape[1] for batch in channels) / sum(batch.shape[1] for batch in channels)
    torch.testing.assert_close(norm.running_var.double(), exact, rtol=1e-6, atol=0)


def test_positions_count_where_batches_differ_in_them():
    norm = nn.BatchNorm2d(1)
    update_bn([torch.zeros(1, 1, 9, 11), torch.full((2, 1, 1, 1), 101.0)], norm)
    assert norm.running_mean.item() == pytest.approx(2.0, rel=1e-6)


def test_a_batch_norm_that_is_called_twice_in_a_forward_counts_both_calls():
    norm, (first, second, third) = nn.BatchNorm1d(2), batches()
    update_bn([(first, second), (third, first)], norm, forward=lambda model, batch: [model(x) for x in batch])
    exact = torch.cat([first, second, third, first]).double().mean(0)
    torch.testing.assert_close(norm.running_mean.double(), exact, rtol=1e-6, atol=0)
    assert norm.num_batches_tracked == 4


def test_equal_batches_give_what_torch_gives():
    model, data = used(), batches(sizes=(6,) * 9)
    expected = copy.deepcopy(model)
    swa_utils.update_bn(data, expected)
    update_bn(data, model)
    assert model.state_dict().keys() == expected.state_dict().keys()
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_16_bits_are_summed_up_in_32(dtype):
    norm = nn.BatchNorm1d(1, dtype=dtype)
    pair = torch.tensor([[-1.0], [1.0]], dtype=dtype)
    update_bn([pair + 1.0] * 300 + [pair + 2.0] * 300, norm)
    assert norm.running_mean.item() == 1.5
    assert norm.running_mean.dtype == dtype


def test_statistics_of_64_bits_stay_exact():
    norm, data = nn.BatchNorm1d(2, dtype=torch.float64), [batch.double() for batch in batches()]
    update_bn(data, norm)
    torch.testing.assert_close(norm.running_mean, torch.cat(data).mean(0), rtol=1e-14, atol=0)


def test_the_pass_starts_from_the_statistics_of_a_new_batch_norm():
    model, new, seen = used(), nn.BatchNorm1d(2), []

    def forward(model, batch):
        seen.append({name: model[1].get_buffer(name).tolist() for name in STATISTICS})
        model(batch)

    update_bn(batches(), model, forward=forward)
    assert seen[0] == {name: new.get_buffer(name).tolist() for name in STATISTICS}


def test_statistics_that_were_not_finite_are_healed():
    norm, data = nn.BatchNorm1d(2), batches()
    norm.running_mean.fill_(torch.nan)
    norm.running_var.fill_(torch.inf)
    update_bn(data, norm)
    assert norm.running_mean.isfinite().all()
    assert norm.running_var.isfinite().all()


def test_a_batch_without_samples_weighs_nothing():
    norm, expected, data = nn.BatchNorm1d(2), nn.BatchNorm1d(2), batches()
    update_bn(data, expected)
    update_bn([torch.zeros(0, 2), *data, torch.zeros(0, 2)], norm)
    assert norm.running_mean.tolist() == expected.running_mean.tolist()
    assert norm.running_var.tolist() == expected.running_var.tolist()


def test_a_batch_norm_that_the_pass_does_not_reach_keeps_its_statistics():
    model = used()
    before = snapshot(model[2])
    update_bn(batches(), model, forward=lambda model, batch: model[:2](batch))
    assert snapshot(model[2]) == before
    assert model[1].num_batches_tracked == 3


def test_a_subclass_with_its_channels_last_counts_the_elements_of_a_channel():
    class ChannelsLast(nn.BatchNorm1d):
        def forward(self, input):
            return super().forward(input.flatten(0, -2))

    norm = ChannelsLast(2)
    update_bn([torch.zeros(11, 9, 2), torch.full((2, 1, 2), 101.0)], norm)
    assert norm.running_mean.tolist() == pytest.approx([2.0, 2.0], rel=1e-6)


def test_batches_weigh_alike_in_a_subclass_whose_input_is_no_tensor():
    class Wrapped(nn.BatchNorm1d):
        def forward(self, input):
            return super().forward(input["features"])

    norm = Wrapped(1)
    update_bn([{"input": {"features": torch.full((4, 1), value)}} for value in (1.0, 3.0)], norm)
    assert norm.running_mean.item() == pytest.approx(2.0)


def test_an_input_given_by_keyword_counts():
    norm, expected, data = nn.BatchNorm1d(2), nn.BatchNorm1d(2), batches()
    update_bn(data, expected)
    update_bn([{"input": batch} for batch in data], norm)
    assert norm.running_mean.tolist() == expected.running_mean.tolist()


def test_the_samples_of_all_data_parallel_replicas_count():
    norm, expected, data = nn.BatchNorm1d(2), nn.BatchNorm1d(2), batches(sizes=(4, 4, 6, 6))
    update_bn(data, expected)

    def forward(model, pair):
        replicas = [model._replicate_for_data_parallel() for _ in pair]
        for replica in replicas:
            replica.weight = replica.bias = None
        for replica in replicas[1:]:  # only the first has the buffers of the model
            replica._buffers = {name: buffer.clone() for name, buffer in model._buffers.items()}
        threads = [threading.Thread(target=replica, args=(x,)) for replica, x in zip(replicas, pair, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    update_bn([data[:2], data[2:]], norm, forward=forward)
    torch.testing.assert_close(norm.running_mean, expected.running_mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(norm.running_var, expected.running_var, rtol=1e-6, atol=0)


# ---- progress


class Stream(torch.utils.data.IterableDataset):
    """Data without a length."""

    def __iter__(self):
        return iter(torch.randn(6, 2))


@pytest.mark.parametrize(
    ("loader", "total"),
    [
        (batches(), 3),
        (iter(batches()), None),
        (torch.utils.data.DataLoader(Stream(), batch_size=2), None),
        (torch.utils.data.DataLoader(torch.randn(6, 2), batch_size=2), 3),
    ],
    ids=["list", "iterator", "loader without a length", "loader"],
)
def test_progress_is_reported_after_each_batch(loader, total):
    reports = []
    model = nn.BatchNorm1d(2)
    update_bn(loader, model, progress=lambda *report: reports.append((*report, model.num_batches_tracked.item())))
    assert reports == [(done, total, done) for done in (1, 2, 3)]


def test_an_error_of_a_report_leaves_everything_as_it_was():
    def report(done, total):
        raise KeyboardInterrupt

    model = used()
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        update_bn(batches(), model, progress=report)
    assert snapshot(model) == before


def test_progress_is_checked_before_the_loader_is_read():
    def loader():
        pytest.fail("read")
        yield

    for model in (nn.BatchNorm1d(2), nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=r"progress must be a bool or a function.*got 'yes' of str"):
            update_bn(loader(), model, progress="yes")


# ---- which BatchNorms


def test_a_model_without_batch_norm_leaves_the_loader_alone():
    def loader():
        pytest.fail("read")
        yield

    assert update_bn(loader(), nn.Linear(2, 2)) is None
    assert update_bn(loader(), nn.BatchNorm1d(2, track_running_stats=False)) is None


def test_statistics_that_are_no_longer_tracked_are_left_alone():
    model = used()
    model[1].track_running_stats = False
    before = snapshot(model[1])
    update_bn(batches(), model)
    assert snapshot(model[1]) == before
    assert model[2].num_batches_tracked == 3


def test_a_batch_norm_without_counter_is_estimated():
    norm = nn.BatchNorm1d(2)
    norm.num_batches_tracked = None
    update_bn(batches(), norm)
    assert norm.running_mean.gt(3).all()
    assert norm.num_batches_tracked is None


def test_lazy_batch_norms_are_initialised_and_estimated():
    model, norm, data = nn.Sequential(nn.LazyBatchNorm1d()), nn.BatchNorm1d(2), batches()
    update_bn(data, model)
    update_bn(data, norm)
    assert {name: model[0].get_buffer(name).tolist() for name in STATISTICS} == {
        name: norm.get_buffer(name).tolist() for name in STATISTICS
    }
    assert type(model[0]) is nn.BatchNorm1d


def test_an_error_leaves_a_lazy_batch_norm_as_if_just_initialised():
    model = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="empty"):
        update_bn([], model)
    assert model[0].has_uninitialized_params()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        update_bn([*batches(), torch.zeros(1, 2)], model)
    assert {name: model[0].get_buffer(name).tolist() for name in STATISTICS} == {
        "running_mean": [0.0, 0.0],
        "running_var": [1.0, 1.0],
        "num_batches_tracked": 0,
    }


# ---- InstanceNorms

INSTANCES = {
    "1d": (nn.InstanceNorm1d, (3, 6)),
    "2d": (nn.InstanceNorm2d, (3, 4, 5)),
    "3d": (nn.InstanceNorm3d, (3, 2, 3, 4)),
}


def exact_instances(samples):
    """Return the means over samples of the mean and the unbiased variance of each."""
    flat = [sample.double().flatten(1) for sample in samples]
    return torch.stack([x.mean(1) for x in flat]).mean(0), torch.stack([x.var(1) for x in flat]).mean(0)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", INSTANCES)
def test_an_instance_norm_gets_the_mean_of_the_statistics_of_all_samples(kind, momentum):
    make, shape = INSTANCES[kind]
    norm, data = make(3, track_running_stats=True, momentum=momentum).eval(), batches(shape, (7, 1, 5))
    before = snapshot(norm)
    update_bn(data, norm)
    mean, var = exact_instances([sample for batch in data for sample in batch])
    torch.testing.assert_close(norm.running_mean.double(), mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(norm.running_var.double(), var, rtol=1e-6, atol=0)
    assert [snapshot(norm)[key] == before[key] for key in ("identities", "modes", "momenta", "hooks")] == [True] * 4


def test_samples_of_an_instance_norm_weigh_alike_whatever_their_size_and_come_without_a_batch_too():
    norm = nn.InstanceNorm1d(1, track_running_stats=True)
    data = [torch.full((2, 1, 4), 1.0), torch.full((1, 8), 4.0), torch.zeros(0, 1, 3), torch.full((1, 1, 2), 6.0)]
    update_bn(data, norm)
    assert norm.running_mean.item() == pytest.approx((1 + 1 + 4 + 6) / 4, rel=1e-6)


def test_a_lazy_instance_norm_is_initialised_and_estimated():
    norm, expected = (
        make(track_running_stats=True) for make in (nn.LazyInstanceNorm1d, lambda **k: nn.InstanceNorm1d(3, **k))
    )
    for each in (norm, expected):
        update_bn(batches((3, 6)), each)
    assert norm.running_mean.tolist() == expected.running_mean.tolist()


def test_an_instance_norm_that_tracks_nothing_leaves_the_loader_alone():
    update_bn((pytest.fail("read") for _ in range(1)), nn.Sequential(nn.InstanceNorm1d(3)))


# ---- heirs


class OwnNorm(_NormBase):
    """A norm on torch's base class, which centres by the mean only."""

    def forward(self, x):
        mean, var = x.mean(0), x.var(0)
        if self.training:
            self.running_mean += self.momentum * (mean - self.running_mean)
            self.running_var = (1 - self.momentum) * self.running_var + self.momentum * var
        return x - (mean if self.training else self.running_mean)


class Normalise(nn.BatchNorm1d):
    """A BatchNorm with its statistics frozen by its forward."""

    def forward(self, x):
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, eps=self.eps)


def test_an_heir_of_the_base_of_norms_is_estimated():
    norm, expected, data = OwnNorm(2), nn.BatchNorm1d(2), batches()
    norm.running_mean.fill_(-7.0)
    update_bn(data, norm)
    update_bn(data, expected)
    torch.testing.assert_close(norm.running_mean, expected.running_mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(norm.running_var, expected.running_var, rtol=1e-6, atol=0)
    assert norm.momentum == 0.1


def test_an_heir_with_statistics_that_are_not_finite_is_healed():
    norm, data = OwnNorm(2), batches()
    norm.running_mean.fill_(torch.nan)
    update_bn(data, norm)
    torch.testing.assert_close(norm.running_mean, torch.cat(data).mean(0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_an_heir_whose_forward_leaves_its_statistics_alone_keeps_them_and_computes_with_them(training):
    model = nn.Sequential(Normalise(2), nn.BatchNorm1d(2)).train(training)
    model[0].running_mean.fill_(5.0)
    before, seen, data = snapshot(model[0]), [], batches()
    model[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    update_bn(data, model)
    assert snapshot(model[0]) == before
    torch.testing.assert_close(torch.cat(seen), (torch.cat(data) - 5) / (1 + 1e-5) ** 0.5)
    assert model[1].num_batches_tracked == 3


# ---- modules of other classes


class Own(nn.Module):
    """A norm that has nothing to do with torch's."""

    def __init__(self, width=2):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * x.mean(0)
            self.steps += 1
        return x - self.running_mean


class OwnParameter(nn.Module):
    """Keeps its statistics in a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.moving_std = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        self.moving_std.lerp_(x.std(0), 0.5)
        return x / self.moving_std


class Frozen(Own):
    """A norm with constant statistics, as detectors have."""

    def forward(self, x):
        return x - self.running_mean


@pytest.mark.parametrize("make", [Own, OwnParameter])
@pytest.mark.parametrize("alone", [True, False])
def test_a_norm_of_another_class_is_named_and_has_what_its_forward_makes_of_the_pass(make, alone):
    model = nn.Sequential(make()) if alone else nn.Sequential(make(), nn.BatchNorm1d(2))
    expected, data = copy.deepcopy(model), batches()
    for batch in data:
        expected[0](batch)
    with pytest.warns(
        UserWarning, match=rf"cannot estimate the statistics of 0 \({make.__name__}\), which are no"
    ) as caught:
        update_bn(data, model.eval())
    assert caught[0].filename == __file__
    assert {key: value.tolist() for key, value in model[0].state_dict().items()} == {
        key: value.tolist() for key, value in expected[0].state_dict().items()
    }
    assert alone or model[1].num_batches_tracked == 3


def test_after_an_error_norms_of_other_classes_are_as_they_were():
    model = nn.Sequential(Own(), OwnParameter(), nn.BatchNorm1d(2))
    model(batches()[0])
    before = {name: (id(tensor), tensor.tolist()) for name, tensor in model.state_dict(keep_vars=True).items()}
    with pytest.raises(OSError, match="the disk is gone"):
        update_bn(failing_loader(), model)
    assert {name: (id(t), t.tolist()) for name, t in model.state_dict(keep_vars=True).items()} == before


def test_statistics_that_no_forward_changes_are_not_spoken_of():
    model = nn.Sequential(Frozen(), Own().eval(), nn.BatchNorm1d(2))
    update_bn(batches(), model)
    assert model[2].num_batches_tracked == 3


SCRIPTED = {
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))),
    "scripted in eval": lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval()),
    "scripted InstanceNorm": lambda: torch.jit.script(nn.InstanceNorm1d(3, track_running_stats=True)),
    "scripted part": lambda: nn.Sequential(nn.BatchNorm1d(2), torch.jit.script(nn.BatchNorm1d(2))),
    "traced": lambda: torch.jit.trace(nn.BatchNorm1d(2).eval(), torch.ones(3, 2)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is not supported in Python:DeprecationWarning")
@pytest.mark.parametrize("kind", SCRIPTED)
def test_scripted_norms_are_refused_before_the_loader_is_read(kind):
    model = SCRIPTED[kind]()
    before = {name: value.tolist() for name, value in model.state_dict().items()}, model.training
    with pytest.raises(TypeError, match=r"which torch.jit has scripted or traced. Call update_bn before torch.jit.scr"):
        update_bn((pytest.fail("read") for _ in range(1)), model)
    assert ({name: value.tolist() for name, value in model.state_dict().items()}, model.training) == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is not supported in Python:DeprecationWarning")
def test_a_frozen_scripted_part_keeps_its_statistics():
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(2)), nn.BatchNorm1d(2))
    model[0].eval()
    update_bn(batches(), model)
    assert model[0].running_mean.tolist() == [0.0, 0.0]
    assert model[1].num_batches_tracked == 3
    update_bn((pytest.fail("read") for _ in range(1)), torch.jit.script(nn.Linear(2, 2)))


# ---- what is derived


def test_casts_of_autocast_are_dropped_where_modes_write_to_weights():
    class Merging(nn.Linear):
        def train(self, mode=True):
            if mode != self.training:
                self.weight.data += -1.0 if mode else 1.0
            return super().train(mode)

    model = nn.Sequential(Merging(1, 1, bias=False), nn.BatchNorm1d(1)).eval()
    x, inputs = torch.ones(2, 1), []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        merged = model[0](x).clone()
        hook = model[1].register_forward_pre_hook(lambda module, args: inputs.append(args[0].clone()))
        update_bn([x], model)
        hook.remove()
        torch.testing.assert_close(model[0](x), merged, rtol=0.02, atol=0.02)
    torch.testing.assert_close(inputs[0], merged - 1, rtol=0.02, atol=0.02)


# ---- modes


@pytest.mark.parametrize("wrapper", ["none", "functavg", "torch", "compile", "DataParallel", "nested"])
def test_a_model_in_eval_is_estimated_in_any_wrapper_and_stays_in_eval(wrapper):
    wrap = {
        "none": lambda model: model,
        "functavg": AveragedModel,
        "torch": swa_utils.AveragedModel,
        "compile": lambda model: torch.compile(model, backend="eager"),
        "DataParallel": nn.DataParallel,
        "nested": lambda model: nn.DataParallel(swa_utils.AveragedModel(nn.DataParallel(model))),
    }[wrapper]
    model = wrap(nn.Sequential(nn.BatchNorm1d(2)).eval())
    before = snapshot(model)
    update_bn(batches(), model)
    (norm,) = (module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    assert norm.running_mean.sub(5).abs().max() < 2
    assert snapshot(model)["modes"] == before["modes"]
    assert not norm.training


@pytest.mark.parametrize("wrap", [lambda model: model, AveragedModel, nn.DataParallel], ids=["none", "avg", "DP"])
def test_a_frozen_part_of_a_model_in_training_stays_frozen(wrap):
    model = used()
    model[1].eval()
    model = wrap(model)
    frozen, trained = (module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    before, modes = snapshot(frozen), snapshot(model)["modes"]
    (linear,) = (module for module in model.modules() if isinstance(module, nn.Linear))
    inputs, seen = [frozen(linear(batch)).tolist() for batch in batches()], []
    trained.register_forward_pre_hook(lambda module, args: seen.append(args[0].tolist()))
    update_bn(batches(), model)
    assert snapshot(frozen) == before
    assert trained.num_batches_tracked == 3
    assert snapshot(model)["modes"] == modes
    assert seen == inputs  # it also normalised with the statistics that it keeps


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.*FSDP:UserWarning", "ignore:.*FSDP:FutureWarning")
@pytest.mark.parametrize("engine", ["DDP", "FSDP1", "FSDP2"])
@pytest.mark.parametrize("training", [True, False])
def test_distributed_models_are_estimated(engine, training):
    model, data = used().train(training), batches()
    expected = copy.deepcopy(model)
    update_bn(data, expected)
    if engine == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    elif engine == "FSDP1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    model.train(training)
    update_bn(data, model)
    norms, others = ([m for m in it.modules() if isinstance(m, nn.BatchNorm1d)] for it in (model, expected))
    assert [norm.running_mean.tolist() for norm in norms] == [norm.running_mean.tolist() for norm in others]
    assert {module.training for module in model.modules()} == {training}


class Beside:
    """Stands for the all-reduces with a second rank, which says what is set."""

    def __init__(self, monkeypatch, verdict):
        self.verdict = torch.tensor(verdict)
        monkeypatch.setattr(distributed, "get_world_size", lambda *args: 2)
        monkeypatch.setattr(distributed, "all_reduce", self.all_reduce)

    def all_reduce(self, tensor, op=None):
        if op is not None:
            tensor.copy_(torch.maximum(tensor, self.verdict))


@pytest.mark.parametrize(
    ("verdict", "error", "match"),
    [
        ([1, 0, 0, -(2**40)], RuntimeError, "update_bn failed on rank 1, whose own error says why"),
        (
            [-1, 1, 2**40, -(2**40)],
            ValueError,
            "the ranks do not estimate the same BatchNorms, on this one 0 of 2 chan",
        ),
    ],
    ids=["it failed", "it has other norms"],
)
def test_what_keeps_another_rank_from_estimating_is_told_and_changes_nothing(monkeypatch, verdict, error, match):
    model = nn.Sequential(nn.BatchNorm1d(2))
    before = copy.deepcopy(model.state_dict())
    with alone():
        Beside(monkeypatch, verdict)
        with pytest.raises(error, match=match):
            update_bn([torch.randn(4, 2)], model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_rank_that_fails_lets_the_others_know_and_raises_its_own_error(monkeypatch):
    told = []
    with alone():
        Beside(monkeypatch, [-1, 1, 0, 0])
        monkeypatch.setattr(distributed, "all_reduce", lambda verdict, op=None: told.append(verdict.tolist()[0]))
        with pytest.raises(RuntimeError, match="shapes"):
            update_bn([torch.randn(4, 3)], nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert told == [0]


def test_a_rank_whose_norms_saw_nothing_keeps_its_statistics(monkeypatch):
    """The others have data for norms that no rank runs."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    before = copy.deepcopy(model.state_dict())
    with alone():
        Beside(monkeypatch, [-1, 1, -(2**40), -(2**40)])
        update_bn([], model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_batches_of_a_synchronised_norm_are_those_of_one_rank(monkeypatch):
    """Each rank of its group counts the same batches."""
    estimate = Estimate(nn.SyncBatchNorm(2))
    estimate.norm.num_batches_tracked.fill_(6)
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 2)
    assert estimate.get_summands()[0].tolist() == [0.0, 3.0]


def test_the_mode_of_a_wrapper_freezes_nothing():
    averaged = AveragedModel(used())
    averaged.training = False
    averaged.module[1].eval()
    before = snapshot(averaged.module[1])
    update_bn(batches(), averaged)
    assert snapshot(averaged.module[1]) == before
    assert not averaged.training


def test_every_sub_module_trains_in_the_pass_of_a_model_in_eval_and_gets_its_own_mode_back():
    model = used().eval()
    model[1].train()
    before, inside = snapshot(model)["modes"], []
    update_bn(batches(), model, forward=lambda model, batch: inside.append(snapshot(model)["modes"]) or model(batch))
    assert all(all(modes.values()) for modes in inside)
    assert snapshot(model)["modes"] == before == {"": False, "0": False, "1": True, "2": False}


def test_modes_that_the_forward_changes_are_put_back():
    model = used()
    model[0].eval()
    before = snapshot(model)["modes"]
    update_bn(batches(), model, forward=lambda model, batch: model.train()[:2](batch) + bool(model.eval()))
    assert snapshot(model)["modes"] == before


def test_a_module_that_stands_in_two_places_gets_its_own_mode_back():
    shared = nn.BatchNorm1d(2)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    model[1].eval()
    shared.train()
    before = snapshot(model)["modes"]
    update_bn(batches(), model, forward=lambda model, batch: model.train()(batch))
    assert snapshot(model)["modes"] == before == {"": True, "0": True, "0.0": True, "1": False}


def test_a_batch_norm_in_eval_while_it_is_called_is_not_estimated():
    model = used()
    before = snapshot(model)
    update_bn(batches(), model, forward=lambda model, batch: model.eval()(batch))
    assert snapshot(model) == before


def test_an_override_of_train_follows_the_mode():
    class Merging(nn.Linear):
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(nn.Sequential(Merging(2, 2), Merging(2, 2)), nn.BatchNorm1d(2)).eval()
    model[0][1].train()
    inside = []
    update_bn(batches(), model, forward=lambda model, x: inside.extend(m.merged for m in model[0]) or model(x))
    assert not any(inside)
    assert [(layer.merged, layer.training) for layer in model[0]] == [(True, False), (False, True)]


def test_an_override_of_train_can_keep_a_part_frozen():
    class Frozen(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self

    model = Frozen(*used()).eval()
    before = snapshot(model[1])
    update_bn(batches(), model)
    assert snapshot(model[1]) == before
    assert model[2].num_batches_tracked == 3


# ---- what is put back


def test_momenta_hooks_and_identities_are_kept():
    model = used(nn.BatchNorm1d(2, momentum=0.3), nn.BatchNorm1d(2, momentum=None))
    before = snapshot(model)
    update_bn(batches(), model)
    after = snapshot(model)
    assert [after[key] == before[key] for key in ("identities", "modes", "momenta", "hooks")] == [True] * 4
    assert model[1].running_mean._version > before["versions"]["1.running_mean"]


def failing_loader():
    yield batches()[0]
    raise OSError("the disk is gone")


def interrupted_loader():
    yield batches()[0]
    raise KeyboardInterrupt("stop")


def failing_forward(model, batch):
    model(batch)
    raise RuntimeError("out of memory")


FAILURES = {
    "loader": (failing_loader, None, OSError, "the disk is gone"),
    "interrupt": (interrupted_loader, None, KeyboardInterrupt, "stop"),
    "forward": (batches, failing_forward, RuntimeError, "out of memory"),
    "one sample": (lambda: [*batches(), torch.zeros(1, 2)], None, ValueError, "Expected more than 1 value per channel"),
    "shape": (lambda: [*batches(), torch.zeros(4, 3)], None, RuntimeError, "shapes cannot be multiplied"),
    "empty": (list, None, ValueError, "the loader is empty.*at least one batch"),
}


@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
@pytest.mark.parametrize("failure", FAILURES)
def test_an_error_leaves_everything_as_it_was(failure, mode):
    loader, forward, error, message = FAILURES[failure]
    model = used().train(mode == "train")
    model[2].train(mode != "eval")
    before = snapshot(model)
    with pytest.raises(error, match=message):
        update_bn(loader(), model, forward=forward)
    assert snapshot(model) == before


def test_buffers_that_the_forward_replaces_come_back():
    class Replacing(nn.BatchNorm1d):
        def forward(self, input):
            output = super().forward(input)
            self.running_mean = self.running_mean.clone()
            return output

    norm, expected, data = Replacing(2), nn.BatchNorm1d(2), batches()
    identity = id(norm.running_mean)
    update_bn(data, norm)
    update_bn(data, expected)
    assert id(norm.running_mean) == identity
    assert norm.running_mean.tolist() == expected.running_mean.tolist()
    with pytest.raises(OSError, match="the disk is gone"):
        update_bn(failing_loader(), norm)
    assert id(norm.running_mean) == identity
    assert norm.running_mean.tolist() == expected.running_mean.tolist()


def test_a_generator_that_was_read_before_is_an_empty_loader():
    model, loader = used(), iter(batches())
    update_bn(loader, model)
    before = snapshot(model)
    with pytest.raises(ValueError, match="a generator yields its batches only once"):
        update_bn(loader, model)
    assert snapshot(model) == before


def test_swapped_arguments_are_named():
    with pytest.raises(TypeError, match=r"update_bn\(loader, model\): model must be a torch.nn.Module, got list"):
        update_bn(nn.Sequential(nn.BatchNorm1d(2)), batches())


# ---- autograd, inference mode, compilers


def test_the_pass_records_no_graph():
    model = used()
    recording = []
    update_bn(batches(), model, forward=lambda model, batch: recording.append(model(batch).requires_grad))
    assert recording == [False] * 3
    assert torch.is_grad_enabled()
    assert not any(buffer.requires_grad for buffer in model.buffers())


@pytest.mark.parametrize("built", ["inside", "outside"])
@pytest.mark.parametrize("called", ["inside", "outside"])
@pytest.mark.parametrize("loaded", ["inside", "outside"])
def test_inference_mode_around_the_model_the_call_or_the_data_changes_nothing(built, called, loaded):
    expected = nn.BatchNorm1d(2)
    update_bn(batches(), expected)
    with torch.inference_mode(built == "inside"):
        norm = nn.BatchNorm1d(2)
    with torch.inference_mode(loaded == "inside"):
        data = batches()
    before = [id(norm.get_buffer(name)) for name in STATISTICS]
    with torch.inference_mode(called == "inside"):
        update_bn(data, norm)
    assert norm.running_mean.tolist() == expected.running_mean.tolist()
    assert norm.running_var.tolist() == expected.running_var.tolist()
    assert [id(norm.get_buffer(name)) for name in STATISTICS] == before
    assert norm.running_mean.is_inference() == (built == "inside")


def test_a_compiled_model_is_not_compiled_in_the_pass_nor_again_after_it():
    compiled_graphs = []

    def backend(graph, inputs):
        compiled_graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    norm = nn.BatchNorm1d(2)
    model = torch.compile(nn.Sequential(nn.Linear(2, 2), norm), backend=backend)
    (data, *_) = batches()
    model(data)
    assert len(compiled_graphs) == 1
    update_bn(batches(), model)
    assert len(compiled_graphs) == 1
    assert norm.num_batches_tracked == 3
    model(data)
    assert len(compiled_graphs) == 1
    assert norm.num_batches_tracked == 4


def test_no_compiler_is_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: pytest.fail("imports torch._dynamo"))
    update_bn(batches(), nn.BatchNorm1d(2))


# ---- batches


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x, y):
        return self.norm(x + y)


def sum_of_two():
    """Return batches x and y, and the mean of x + y."""
    xs, ys = batches(seed=2), batches(seed=3)
    return list(zip(xs, ys, strict=True)), (torch.cat(xs) + torch.cat(ys)).mean(0)


@pytest.mark.parametrize("container", [dict, OrderedDict, UserDict, MappingProxyType])
def test_a_mapping_becomes_the_keyword_arguments(container):
    pairs, mean = sum_of_two()
    model = TwoInputs()
    update_bn([container({"x": x, "y": y}) for x, y in pairs], model)
    torch.testing.assert_close(model.norm.running_mean, mean)


@pytest.mark.parametrize("container", [dict, OrderedDict, UserDict, MappingProxyType])
def test_device_moves_the_keyword_arguments(container):
    pairs, _ = sum_of_two()
    model, devices = TwoInputs().to("meta"), []
    model.norm.register_forward_pre_hook(lambda module, args: devices.append(args[0].device.type))
    update_bn([container({"x": x, "y": y}) for x, y in pairs], model, "meta")
    assert devices == ["meta"] * 3


def test_forward_gets_the_model_and_the_whole_batch():
    pairs, mean = sum_of_two()
    model = TwoInputs()
    update_bn(pairs, model, forward=lambda model, batch: model(*batch))
    torch.testing.assert_close(model.norm.running_mean, mean)


@pytest.mark.parametrize("container", [list, tuple, Pair._make], ids=["list", "tuple", "namedtuple"])
@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_of_a_list_or_tuple_the_model_gets_the_first_element(container, device):
    data = batches()
    norm, expected = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    update_bn(data, expected)
    update_bn([container([batch, "label"]) for batch in data], norm, device)
    assert norm.running_mean.tolist() == expected.running_mean.tolist()


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.cat(batches()))


@pytest.mark.parametrize(
    "loader",
    [
        lambda: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.cat(batches())), batch_size=5),
        lambda: torch.utils.data.DataLoader(Stream(), batch_size=5),
        lambda: (batch for batch in batches()),
    ],
    ids=["DataLoader", "IterableDataset", "generator"],
)
def test_any_iterable_is_a_loader(loader):
    norm = nn.BatchNorm1d(2)
    update_bn(loader(), norm)
    torch.testing.assert_close(norm.running_mean, torch.cat(batches()).mean(0))


class Graph:
    """A batch of a class of its own, as graph libraries have them."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Graph(self.x.to(device))


NESTED = {
    "tensor": (lambda x: x, lambda batch: batch),
    "dict": (lambda x: {"a": {"b": x}}, lambda batch: batch["a"]["b"]),
    "OrderedDict": (lambda x: OrderedDict(a=[x]), lambda batch: batch["a"][0]),
    "UserDict": (lambda x: UserDict(a=(x,)), lambda batch: batch["a"][0]),
    "MappingProxyType": (lambda x: MappingProxyType({"a": x}), lambda batch: batch["a"]),
    "list": (lambda x: [0, [x]], lambda batch: batch[1][0]),
    "tuple": (lambda x: (None, (x, "text")), lambda batch: batch[1][0]),
    "namedtuple": (lambda x: Pair(1, Pair(x, None)), lambda batch: batch.y.x),
    "namedtuple with a field 'to'": (lambda x: Edge(x, x), lambda batch: batch.to),
    "own class": (lambda x: [Graph(x)], lambda batch: batch[0].x),
}


@pytest.mark.parametrize("kind", NESTED)
def test_device_moves_the_tensors_in_any_container_and_keeps_its_type(kind):
    wrap, read = NESTED[kind]
    data = [wrap(batch) for batch in batches()]
    seen = []
    norm = nn.BatchNorm1d(2, device="meta")
    update_bn(data, norm, "meta", forward=lambda model, batch: seen.append(batch) or model(read(batch)))
    assert [read(batch).device.type for batch in seen] == ["meta"] * 3
    assert [read(batch).device.type for batch in data] == ["cpu"] * 3
    if kind != "MappingProxyType":
        assert [type(batch) for batch in seen] == [type(batch) for batch in data]


def test_device_moves_only_what_the_model_gets_of_a_tuple():
    class Stays(torch.Tensor):
        def to(self, *args, **kwargs):
            pytest.fail("moved")

    norm = nn.BatchNorm1d(2, device="meta")
    update_bn([(batch, Stays()) for batch in batches()], norm, "meta")


@pytest.mark.parametrize("device", [0, "cuda:1", torch.device("cuda", 2)])
def test_device_reaches_the_tensors_as_it_was_given(device):
    asked = []

    class Batch(Graph):
        def to(self, device):
            asked.append(device)
            return self

    norm = nn.BatchNorm1d(2)
    update_bn([Batch(x) for x in batches()], norm, device, forward=lambda model, batch: model(batch.x))
    assert asked == [device] * 3


def test_a_batch_that_is_no_container_goes_to_the_model_as_it_is():
    class Text(nn.Sequential):
        def forward(self, text):
            return super().forward(torch.tensor([[float(len(word))] for word in text.split()]))

    model = Text(nn.BatchNorm1d(1))
    update_bn(["a bb ccc", "dd dd"], model, "cpu")
    assert model[0].running_mean.item() == pytest.approx(2.0)
