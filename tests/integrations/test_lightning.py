"""AveragingCallback in the Trainer of PyTorch Lightning."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import functavg
from functavg import EMA, LAWA, SWA, Every, Several
from tests import oracle
from tests.integrations import digits

lightning = pytest.importorskip("lightning.pytorch")

from lightning.pytorch import Callback, Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from functavg.integrations.lightning import AveragingCallback, averaged_weights  # noqa: E402
from tests.integrations.lightning_digits import QUIET, TEST_X, TEST_Y, DigitsNet, X, Y  # noqa: E402

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def make_trainer(*callbacks, **options):
    return Trainer(**(QUIET | {"max_epochs": 2, "callbacks": list(callbacks)} | options))


class Recorder(Callback):
    """Keeps what the optimizer made of the weights, step by step."""

    def __init__(self):
        self.iterates = []
        self.buffers = []
        self.accuracies = {}

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step > len(self.iterates):
            self.iterates.append(digits.snapshot(pl_module))
            self.buffers.append({name: buffer.clone() for name, buffer in pl_module.named_buffers()})

    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.accuracies[trainer.global_step] = trainer.callback_metrics["accuracy"].item()


class Doing(Callback):
    """Calls a function at one hook."""

    def __init__(self, hook, fn):
        setattr(self, hook, fn)


def logits_by_hand(model, average):
    """Return what the average says of the test images, computed outside of the Trainer."""
    model = copy.deepcopy(model)
    model.load_state_dict({name: torch.as_tensor(value) for name, value in average.items()}, strict=False)
    with torch.no_grad():
        return model.eval()(TEST_X)


def accuracy(logits):
    return (logits.argmax(-1) == TEST_Y).double().mean().item()


@pytest.mark.parametrize("use_buffers", [False, True])
def test_evaluation_computes_with_the_average_and_training_goes_on_from_its_own_weights(use_buffers):
    recorder, plain = Recorder(), Recorder()
    callback = AveragingCallback(EMA(0.8), at_end="training", use_buffers=use_buffers)
    make_trainer(plain).fit(DigitsNet())
    model, trainer = DigitsNet(), make_trainer(recorder, callback, val_check_interval=3)
    trainer.fit(model)
    for one, other in zip(recorder.iterates, plain.iterates, strict=True):
        digits.assert_same(one, other)
    digits.assert_same(digits.snapshot(model), recorder.iterates[-1])
    assert set(recorder.accuracies) == {3, 6, 11, 14}

    def expected_after(step):
        expected = digits.weighted(oracle.ema(0.8), recorder.iterates[:step])
        buffers = recorder.buffers[step - 1]
        if use_buffers:
            averaged = [{k: v for k, v in b.items() if v.is_floating_point()} for b in recorder.buffers[:step]]
            buffers = digits.weighted(oracle.ema(0.8), averaged)
        return expected, buffers

    for step, found in recorder.accuracies.items():
        expected, buffers = expected_after(step)
        assert found == accuracy(logits_by_hand(model, expected | buffers))
    expected, buffers = expected_after(16)
    digits.assert_close(callback.state.average, expected | buffers if use_buffers else expected)
    logits = logits_by_hand(model, expected | buffers)
    assert accuracy(logits) != accuracy(logits_by_hand(model, {}))
    assert trainer.validate(model, verbose=False)[0]["accuracy"] == accuracy(logits)
    assert trainer.test(model, verbose=False)[0]["test_accuracy"] == accuracy(logits)
    (predicted,) = trainer.predict(model)
    np.testing.assert_allclose(predicted.numpy(), logits.numpy(), rtol=1e-4, atol=1e-5)
    digits.assert_same(digits.snapshot(model), recorder.iterates[-1])


def test_accumulated_micro_batches_are_no_steps():
    recorder, callback = Recorder(), AveragingCallback(SWA())
    make_trainer(recorder, callback, accumulate_grad_batches=3, max_epochs=1).fit(DigitsNet())
    assert callback.state.count == len(recorder.iterates) == 3
    digits.assert_close(callback.state.average, digits.weighted(oracle.swa, recorder.iterates))


def test_steps_that_a_scaler_skips_are_no_steps():
    from lightning.pytorch.plugins import MixedPrecision

    def overflow(trainer, pl_module):
        if callback.state.count == 2 and not before:
            before.append(digits.snapshot(pl_module))
            pl_module.head.weight.grad.fill_(torch.inf)

    recorder, before, callback = Recorder(), [], AveragingCallback(SWA())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    precision = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    overflowing = Doing("on_after_backward", overflow)
    make_trainer(recorder, callback, overflowing, plugins=precision, max_epochs=1).fit(DigitsNet())
    digits.assert_same(before[0], recorder.iterates.pop(2))
    assert callback.state.count == len(recorder.iterates) == 7  # of 8
    digits.assert_close(callback.state.average, digits.weighted(oracle.swa, recorder.iterates))


def test_two_optimizers_take_one_step_together():
    class Manual(DigitsNet):
        automatic_optimization = False

        def training_step(self, batch, index):
            optimizers = self.optimizers()
            loss = super().training_step(batch, index)
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.body, self.head)]

    callback = AveragingCallback(SWA())
    make_trainer(callback, max_epochs=1).fit(Manual())
    assert callback.state.count == 8


class Killed(Exception):
    """In the place of a signal."""


def kill(step):
    def fn(trainer, *args):
        if trainer.global_step == step:
            raise Killed

    return Doing("on_train_batch_end", fn)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (Several({"fast": EMA(0.8), "slow": Every(LAWA(2), 3)}), {}),
        (EMA(0.99), {"precision": "bf16-true"}),
        (Every(SWA(), 3), {"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
    ],
    ids=["several", "bfloat16", "autocast"],
)
def test_a_killed_and_resumed_run_ends_in_the_bits_of_an_uninterrupted_one(tmp_path, rule, options):
    def run(callback, *others, folder, ckpt_path=None):
        model = DigitsNet()
        checkpoints = ModelCheckpoint(folder, save_last=True)
        trainer = make_trainer(callback, *others, checkpoints, enable_checkpointing=True, max_epochs=3, **options)
        trainer.fit(model, ckpt_path=ckpt_path)
        return model, trainer

    whole = AveragingCallback(rule, use_buffers=True)
    model, trainer = run(whole, folder=tmp_path / "whole")
    step = trainer.global_step // 3 + 2
    with pytest.raises(Killed):
        run(AveragingCallback(rule, use_buffers=True), kill(step), folder=tmp_path / "killed")
    resumed = AveragingCallback(rule, use_buffers=True)
    other, again = run(resumed, folder=tmp_path / "killed", ckpt_path=tmp_path / "killed" / "last.ckpt")
    assert whole.state.count > 0
    digits.assert_same(functavg.to_state_dict(whole.state), functavg.to_state_dict(resumed.state))
    digits.assert_same(model.state_dict(), other.state_dict())
    assert trainer.validate(model, verbose=False) == again.validate(other, verbose=False)
    paths = [tmp_path / name / "last.ckpt" for name in ("whole", "killed")]
    one, two = (torch.load(path, weights_only=True) for path in paths)
    digits.assert_same(one["state_dict"], two["state_dict"])


HOOKS = [
    "on_train_start",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
]


@pytest.mark.parametrize("place", [0, 1], ids=["before", "after"])
def test_a_checkpoint_written_at_any_hook_holds_training_weights_and_average_apart(tmp_path, place):
    recorder, callback = Recorder(), AveragingCallback(EMA(0.5), update_bn=place == 0)
    written, forwarded = [], {}

    def save(hook):
        def fn(trainer, pl_module, *args):
            if trainer.sanity_checking or trainer.global_step not in (0, 8):
                return
            path = tmp_path / f"{hook}-{len(written)}.ckpt"
            trainer.save_checkpoint(path)
            if hook == "on_before_zero_grad":  # after a forward, which updates statistics
                forwarded.update({name: buffer.clone() for name, buffer in pl_module.named_buffers()})
            written.append((hook, path, len(recorder.iterates), copy.deepcopy(callback.state) if place else None))

        return Doing(hook, fn)

    savers = [save(hook) for hook in HOOKS]
    callbacks = [recorder, callback, *savers] if place else [recorder, *savers, callback]
    model = DigitsNet()
    initial = model.state_dict() | {name: tensor.clone() for name, tensor in model.state_dict().items()}
    make_trainer(*callbacks, max_epochs=1).fit(model)
    assert {hook for hook, *_ in written} == set(HOOKS)
    for hook, path, count, state in written:
        checkpoint = torch.load(path, weights_only=True)
        done = hook == "on_fit_end" and place
        training = {**recorder.iterates[count - 1], **recorder.buffers[count - 1]} if count else initial
        if hook == "on_before_zero_grad":
            training |= forwarded
        if not done:
            digits.assert_same(checkpoint["state_dict"], training)
        if hook == "on_train_start" and not place:
            assert "AveragingCallback" not in checkpoint["callbacks"]
            continue
        saved = checkpoint["callbacks"]["AveragingCallback"]["state"]
        assert saved["count"] == count
        expected = digits.weighted(oracle.ema(0.5), recorder.iterates[:count]) if count else None
        if expected:
            digits.assert_close(averaged_weights(checkpoint), expected)
            assert not torch.equal(averaged_weights(checkpoint)["head.weight"], training["head.weight"])
        if state is not None:
            digits.assert_same(saved, functavg.to_state_dict(state))


def test_the_model_gets_its_training_weights_back_where_a_validation_fails():
    def fail(trainer, pl_module, *args):
        if not trainer.sanity_checking:
            assert not torch.equal(pl_module.head.weight, recorder.iterates[-1]["head.weight"])
            raise Killed

    recorder, callback = Recorder(), AveragingCallback(EMA(0.5))
    model, trainer = DigitsNet(), make_trainer(recorder, callback, Doing("on_validation_batch_end", fail))
    with pytest.raises(Killed):
        trainer.fit(model)
    digits.assert_same(digits.snapshot(model), recorder.iterates[-1])
    trainer.optimizers[0].step()
    assert callback.state.count == 8  # nothing follows the optimizer any more


@pytest.mark.parametrize(
    ("how", "use_buffers"),
    [(True, False), (True, True), (lambda model, batch: model(batch[0]), False)],
    ids=["bool", "buffers", "function"],
)
def test_statistics_of_norms_are_estimated_for_the_average_at_the_end(tmp_path, how, use_buffers):
    recorder, callback = Recorder(), AveragingCallback(SWA(), update_bn=how, use_buffers=use_buffers)
    save = Doing("on_train_end", lambda trainer, model: trainer.save_checkpoint(tmp_path / "last.ckpt"))
    model, trainer = DigitsNet(), make_trainer(recorder, callback, save)
    trainer.fit(model)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    digits.assert_same(saved["state_dict"], {**recorder.iterates[-1], **recorder.buffers[-1]})
    expected = digits.weighted(oracle.swa, recorder.iterates)
    digits.assert_close(digits.snapshot(model), expected)
    layer, norm = model.body[1], model.body[2]
    with torch.no_grad():
        seen = layer(X.flatten(1)).double()
    torch.testing.assert_close(norm.running_mean.double(), seen.mean(0), rtol=1e-5, atol=1e-5)
    batches = [part.var(0) for part in seen.split(64)]
    torch.testing.assert_close(norm.running_var.double(), torch.stack(batches).mean(0), rtol=1e-5, atol=1e-5)
    found = trainer.test(model, verbose=False)[0]["test_accuracy"]  # the model is the average now
    assert found == accuracy(logits_by_hand(model, {}))


def test_the_best_checkpoint_is_tested_with_its_average(tmp_path):
    recorder, callback = Recorder(), AveragingCallback(EMA(0.8))
    checkpoints = ModelCheckpoint(tmp_path, monitor="accuracy", mode="min")  # the first one
    trainer = make_trainer(recorder, callback, checkpoints, enable_checkpointing=True)
    trainer.fit(DigitsNet())
    model = DigitsNet()
    expected = digits.weighted(oracle.ema(0.8), recorder.iterates[:8]) | recorder.buffers[7]
    found = trainer.test(model, ckpt_path="best", weights_only=True, verbose=False)[0]["test_accuracy"]
    assert found == accuracy(logits_by_hand(model, expected)) == recorder.accuracies[8]
    assert found != accuracy(logits_by_hand(model, {}))
    digits.assert_same(digits.snapshot(model), recorder.iterates[7])
    deployed = DigitsNet()
    checkpoint = torch.load(checkpoints.best_model_path, weights_only=True)
    deployed.load_state_dict(checkpoint["state_dict"])
    deployed.load_state_dict(averaged_weights(checkpoint), strict=False)
    assert found == accuracy(logits_by_hand(deployed, {}))


def test_fitting_on_goes_on_with_the_average_and_fitting_anew_begins_a_new_one():
    callback = AveragingCallback(SWA(), at_end="training")
    model, trainer = DigitsNet(), make_trainer(callback)
    trainer.fit(model)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model)
    assert callback.state.count == 24
    make_trainer(callback, max_epochs=1).fit(model)
    assert callback.state.count == 8


def test_parameters_that_are_unfrozen_join_the_average_and_are_resumed(tmp_path):
    class Unfreezing(DigitsNet):
        def __init__(self):
            super().__init__()
            self.body.requires_grad_(False)

        def on_train_epoch_start(self):
            self.body.requires_grad_(self.current_epoch >= 1)

    callback, names = AveragingCallback(EMA(0.8), dtype=torch.float64, at_end="training"), []
    seen = Doing("on_train_batch_end", lambda *args: names.append(set(callback.state.average)))
    checkpoints = ModelCheckpoint(tmp_path, save_last=True)
    trainer = make_trainer(callback, seen, checkpoints, enable_checkpointing=True)
    model = Unfreezing()
    trainer.fit(model)
    assert names[7] == {"head.weight", "head.bias"}
    assert names[8] == set(dict(model.named_parameters()))
    assert {tensor.dtype for tensor in callback.state.average.values()} == {torch.float64}
    resumed = AveragingCallback(EMA(0.8), dtype=torch.float64)
    again = make_trainer(resumed, checkpoints, enable_checkpointing=True)
    again.validate(Unfreezing(), ckpt_path=tmp_path / "last.ckpt", weights_only=True, verbose=False)
    digits.assert_same(functavg.to_state_dict(resumed.state), functavg.to_state_dict(callback.state))


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_checkpoint_of_fewer_trained_parameters_is_tested_and_resumed(tmp_path):
    class Unfreezing(DigitsNet):
        def on_train_epoch_start(self):
            self.body.requires_grad_(self.current_epoch >= 1)

    callback = AveragingCallback(EMA(0.8))
    checkpoints = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer = make_trainer(callback, checkpoints, enable_checkpointing=True)
    model = Unfreezing()
    model.body.requires_grad_(False)
    trainer.fit(model)
    first, whole = tmp_path / "epoch=0.ckpt", functavg.to_state_dict(callback.state)
    tested = Unfreezing()
    trainer.test(tested, ckpt_path=first, weights_only=True, verbose=False)
    assert callback.state.average.keys() == {"head.weight", "head.bias"}
    resumed = AveragingCallback(EMA(0.8))
    again = make_trainer(resumed, checkpoints, enable_checkpointing=True)
    again.fit(Unfreezing(), ckpt_path=first, weights_only=True)
    digits.assert_same(functavg.to_state_dict(resumed.state), whole)


def test_the_trainer_of_the_other_namespace_takes_it_too():
    other = pytest.importorskip("pytorch_lightning")

    class Net(other.LightningModule):
        training_step, validation_step = DigitsNet.training_step, DigitsNet.validation_step
        forward, configure_optimizers = DigitsNet.forward, DigitsNet.configure_optimizers

        def __init__(self):
            super().__init__()
            net = DigitsNet()
            self.body, self.head = net.body, net.head

    callback, model = AveragingCallback(SWA()), Net()
    trainer = other.Trainer(**QUIET, max_epochs=1, callbacks=[callback])
    trainer.fit(model, DigitsNet().train_dataloader(), DigitsNet().val_dataloader())
    assert callback.state.count == 8
    found = trainer.callback_metrics["accuracy"].item()
    assert found == accuracy(logits_by_hand(model, {}))


def test_a_strategy_that_shards_by_fsdp1_is_refused():
    from torch.distributed.fsdp import FullyShardedDataParallel

    trainer = SimpleNamespace(model=FullyShardedDataParallel.__new__(FullyShardedDataParallel), train_dataloader=None)
    with pytest.raises(TypeError, match="FSDP1"):
        AveragingCallback(SWA()).on_train_start(trainer, DigitsNet())


@pytest.mark.slow
def test_under_ddp_all_ranks_end_with_one_average(tmp_path):
    command = [sys.executable, "-m", "tests.integrations.lightning_digits", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    one, other = (torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(2))
    assert one["state"]["count"] == 8
    digits.assert_same(one["state"], other["state"])
    digits.assert_same(one["model"], other["model"])
    weight = one["state"]["average.body.1.weight"], one["state"]["average.body.1.bias"]
    with torch.no_grad():
        seen = torch.nn.functional.linear(X.flatten(1), *weight).double()
    torch.testing.assert_close(one["model"]["body.2.running_mean"].double(), seen.mean(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [EMA(0.9), functavg.PowerEMA(3.0)], ids=repr)
def test_lightnings_own_callback_averages_by_a_rule(rule):
    """The recipe of the documentation."""
    recorder = Recorder()
    own = WeightAveraging(avg_fn=lambda average, new, count: functavg.lerp(average, new, rule.weight(count, 1)))
    model = DigitsNet()
    make_trainer(recorder, own).fit(model)
    profile = oracle.ema(0.9) if rule == EMA(0.9) else oracle.power(3.0)
    digits.assert_close(digits.snapshot(model), digits.weighted(profile, recorder.iterates))


def test_before_training_there_is_no_average():
    callback = AveragingCallback(SWA())
    model = DigitsNet()
    found = make_trainer(callback).test(model, verbose=False)[0]["test_accuracy"]
    assert found == accuracy(logits_by_hand(model, {}))
    assert callback.state_dict() == {}
    with pytest.raises(RuntimeError, match=r"there is no average yet: it begins with trainer.fit\(\)"):
        _ = callback.state


def test_a_state_that_waits_for_a_model_is_saved_again_as_it_is():
    callback, saved = AveragingCallback(SWA()), {"weights": [], "state": {}}
    callback.load_state_dict(saved)
    assert callback.state_dict() == saved


def test_another_model_is_evaluated_with_its_own_weights():
    callback, other = AveragingCallback(SWA()), DigitsNet()
    trainer = make_trainer(callback)
    trainer.fit(DigitsNet())
    assert trainer.test(other, verbose=False)[0]["test_accuracy"] == accuracy(logits_by_hand(other, {}))


def test_a_checkpoint_without_an_average_begins_a_new_one_with_a_warning(tmp_path):
    trainer = make_trainer(max_epochs=1)
    trainer.fit(DigitsNet())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(KeyError, match="the checkpoint has no average of an AveragingCallback"):
        averaged_weights(torch.load(tmp_path / "plain.ckpt", weights_only=True))
    callback = AveragingCallback(SWA())
    with pytest.warns(UserWarning, match="no average of an AveragingCallback; a new one begins where training goes on"):
        make_trainer(callback).fit(DigitsNet(), ckpt_path=tmp_path / "plain.ckpt")
    assert callback.state.count == 8


def test_statistics_are_not_estimated_from_several_loaders():
    class Two(DigitsNet):
        def training_step(self, batch, index):
            return super().training_step(batch["a"], index)

    loader = DataLoader(TensorDataset(X, Y), batch_size=64)
    trainer = make_trainer(AveragingCallback(SWA(), update_bn=True))
    with pytest.raises(TypeError, match="update_bn=True needs one train dataloader"):
        trainer.fit(Two(), {"a": loader, "b": loader})


def test_statistics_of_a_module_without_forward_are_refused_before_training():
    class NoForward(DigitsNet):
        forward = lightning.LightningModule.forward

        def training_step(self, batch, index):
            return torch.nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])

    with pytest.raises(TypeError, match="update_bn=True calls NoForward with a batch, and it has no forward"):
        make_trainer(AveragingCallback(SWA(), update_bn=True), limit_val_batches=0).fit(NoForward())
    callback = AveragingCallback(SWA(), update_bn=lambda model, batch: model.body(batch[0]))
    make_trainer(callback, max_epochs=1, limit_val_batches=0).fit(NoForward())
    assert callback.state.count == 8


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        (["ema"], {}, TypeError, "rule must be an AveragingRule such as EMA"),
        ([EMA(0.9)], {"at_end": "best"}, ValueError, "at_end must be 'average' or 'training'.* got 'best'"),
        ([EMA(0.9)], {"at_end": "training", "update_bn": True}, ValueError, "pass at_end='average' too"),
    ],
)
def test_arguments_are_checked_at_construction(arguments, options, error, match):
    with pytest.raises(error, match=match):
        AveragingCallback(*arguments, **options)


@pytest.mark.slow
def test_without_lightning_the_extra_is_named():
    script = "import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
    script += "import functavg.integrations.lightning"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "pip install 'functavg[lightning]'" in done.stderr, done.stderr
