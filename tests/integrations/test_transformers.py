"""AveragingCallback in the Trainer of Hugging Face transformers."""

from __future__ import annotations

import copy
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import functavg
from functavg import EMA, LAWA, SWA, Every, Several
from functavg.checkpoints import load_rule, load_state
from tests import oracle
from tests.integrations import digits

transformers = pytest.importorskip("transformers")

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from functavg.integrations.transformers import AveragingCallback  # noqa: E402

X, Y, TEST_X, TEST_Y = digits.load()


def pairs(x, y):
    return [{"pixel_values": image, "labels": label} for image, label in zip(x, y, strict=True)]


TRAIN, TEST = pairs(X, Y), pairs(TEST_X, TEST_Y)


def make_model(dtype=torch.float32):
    """Return a convolutional net with BatchNorms."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        num_channels=1, embedding_size=8, hidden_sizes=[16], depths=[1], layer_type="basic", num_labels=10
    )
    return transformers.ResNetForImageClassification(config).to(dtype)


def make_trainer(folder, *callbacks, model=None, steps=8, **options):
    """Return a Trainer that takes 8 steps in an epoch."""
    args = TrainingArguments(
        str(folder),
        **{
            "max_steps": steps,
            "per_device_train_batch_size": 64,
            "per_device_eval_batch_size": 256,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "use_cpu": True,
            "report_to": "none",
            "logging_strategy": "no",
            "save_strategy": "no",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        | options,
    )
    return Trainer(
        make_model() if model is None else model,
        args,
        train_dataset=TRAIN,
        eval_dataset=TEST,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        callbacks=list(callbacks),
    )


class Recorder(TrainerCallback):
    """Keeps what the optimizer made of the weights, step by step."""

    def __init__(self):
        self.iterates = []
        self.buffers = []

    def on_step_end(self, args, state, control, **kwargs):
        self.iterates.append(digits.snapshot(kwargs["model"]))
        self.buffers.append({name: buffer.clone() for name, buffer in kwargs["model"].named_buffers()})


class Doing(TrainerCallback):
    """Calls a function at one event."""

    def __init__(self, event, fn):
        setattr(self, event, lambda args, state, control, **kwargs: (fn(state, **kwargs), control)[1])


def logits_by_hand(model, average):
    """Return what the average says of the test images, computed outside of the Trainer."""
    model = copy.deepcopy(model)
    model.load_state_dict({name: torch.as_tensor(value) for name, value in average.items()}, strict=False)
    with torch.no_grad():
        return model.eval()(TEST_X).logits


def accuracy(logits):
    return (logits.argmax(-1) == TEST_Y).double().mean().item()


@pytest.mark.slow
def test_evaluate_and_predict_compute_with_the_average_and_training_goes_on_from_its_own_weights(tmp_path):
    recorder, callback = Recorder(), AveragingCallback(EMA(0.9), at_end="training")
    plain = Recorder()
    make_trainer(tmp_path / "plain", plain, steps=20).train()
    trainer = make_trainer(tmp_path, recorder, callback, steps=20, eval_strategy="steps", eval_steps=7)
    trainer.train()
    for one, other in zip(recorder.iterates, plain.iterates, strict=True):
        digits.assert_same(one, other)
    for entry in trainer.state.log_history:
        if "eval_accuracy" in entry:
            expected = digits.weighted(oracle.ema(0.9), recorder.iterates[: entry["step"]])
            buffers = recorder.buffers[entry["step"] - 1]
            assert entry["eval_accuracy"] == accuracy(logits_by_hand(trainer.model, expected | buffers))
    expected = digits.weighted(oracle.ema(0.9), recorder.iterates)
    digits.assert_close(callback.state.average, expected)
    found = trainer.predict(TEST)
    logits = logits_by_hand(trainer.model, expected)
    np.testing.assert_allclose(found.predictions, logits.numpy(), rtol=1e-4, atol=1e-5)
    assert found.metrics["test_accuracy"] == accuracy(logits) != accuracy(logits_by_hand(trainer.model, {}))
    digits.assert_same(digits.snapshot(trainer.model), recorder.iterates[-1])


def test_accumulated_micro_batches_are_no_steps(tmp_path):
    recorder, callback = Recorder(), AveragingCallback(SWA())
    make_trainer(tmp_path, recorder, callback, steps=3, gradient_accumulation_steps=4).train()
    assert callback.state.count == 3
    digits.assert_close(callback.state.average, digits.weighted(oracle.swa, recorder.iterates))


def test_steps_that_a_scaler_skips_are_no_steps(tmp_path):
    """A Trainer counts them."""

    def overflow(state, **kwargs):
        if state.global_step in (1, 2):
            next(kwargs["model"].parameters()).grad.fill_(torch.inf)

    recorder, callback = Recorder(), AveragingCallback(Every(SWA(), 2))
    trainer = make_trainer(
        tmp_path, recorder, callback, Doing("on_pre_optimizer_step", overflow), steps=6, max_grad_norm=0.0
    )
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trainer.train()
    assert trainer.state.global_step == 6
    assert callback.state.count == 4
    digits.assert_same(recorder.iterates[0], recorder.iterates[2])
    real = [recorder.iterates[index] for index in (3, 5)]
    digits.assert_close(callback.state.average, digits.weighted(oracle.swa, real))


class Killed(Exception):
    """In the place of a signal."""


def kill(step):
    def fn(state, **kwargs):
        if state.global_step == step:
            raise Killed

    return Doing("on_step_end", fn)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "dtype", "options"),
    [
        (Several({"fast": EMA(0.8), "slow": Every(LAWA(2), 3)}), torch.float32, {}),
        (EMA(0.99), torch.bfloat16, {"bf16": True}),
        (Every(SWA(), 2), torch.float32, {"bf16": True, "gradient_accumulation_steps": 2}),
    ],
    ids=["several", "bfloat16", "autocast"],
)
def test_a_killed_and_resumed_run_ends_in_the_bits_of_an_uninterrupted_one(tmp_path, rule, dtype, options):
    options |= {"steps": 11, "save_strategy": "steps", "save_steps": 4}
    whole = AveragingCallback(rule, at_end="training")
    one = make_trainer(tmp_path / "whole", whole, model=make_model(dtype), **options)
    one.train()
    killed = make_trainer(tmp_path / "killed", AveragingCallback(rule), kill(7), model=make_model(dtype), **options)
    with pytest.raises(Killed):
        killed.train()
    resumed = AveragingCallback(rule, at_end="training")
    other = make_trainer(tmp_path / "killed", resumed, model=make_model(dtype), **options)
    other.train(resume_from_checkpoint=True)
    digits.assert_same(digits.snapshot(one.model), digits.snapshot(other.model))
    digits.assert_same(functavg.to_state_dict(whole.state), functavg.to_state_dict(resumed.state))
    assert one.evaluate()["eval_accuracy"] == other.evaluate()["eval_accuracy"]
    path = tmp_path / "killed" / "checkpoint-4" / "average.safetensors"
    assert load_rule(path) == rule
    first = load_state(path, whole.state).average
    assert {t.dtype for t in (first.get("fast") or first).values()} == {torch.float32}


EVENTS = ["on_train_begin", "on_optimizer_step", "on_step_end", "on_prediction_step", "on_evaluate", "on_save"]


@pytest.mark.parametrize("order", [0, 1], ids=["before", "after"])
def test_a_checkpoint_written_at_any_event_holds_training_weights_and_average_apart(tmp_path, order):
    recorder, callback = Recorder(), AveragingCallback(EMA(0.5))
    written = []

    def save(event):
        def fn(state, **kwargs):
            if event == "on_prediction_step" and state.global_step == 2:  # the average is in the model now
                assert not torch.equal(
                    kwargs["model"].classifier[1].weight, recorder.iterates[-1]["classifier.1.weight"]
                )
            trainer.state.global_step += 100 * (EVENTS.index(event) + 1)
            trainer._save_checkpoint(trainer.model, trial=None)
            folder = tmp_path / f"checkpoint-{trainer.state.global_step}"
            trainer.state.global_step -= 100 * (EVENTS.index(event) + 1)
            training = digits.snapshot(make_model()) if event == "on_train_begin" else None
            current = digits.snapshot(trainer.model) if event == "on_optimizer_step" else training
            written.append((folder, current or recorder.iterates[-1], copy.deepcopy(callback.state)))

        return Doing(event, fn)

    savers = [save(event) for event in EVENTS]
    callbacks = [recorder, callback, *savers] if order else [*savers, recorder, callback]
    if not order:
        callbacks = [recorder, *savers, callback]
        savers[0].on_train_begin = lambda *args, **kwargs: None  # no average yet
    trainer = make_trainer(
        tmp_path, *callbacks, steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=2
    )
    trainer.train()
    assert len(written) == 2 * (len(EVENTS) - 2) + 1 + order
    for folder, training, state in written:
        saved = transformers.ResNetForImageClassification.from_pretrained(folder)
        digits.assert_same(digits.snapshot(saved), training)
        loaded = load_state(folder / "average.safetensors", state)
        digits.assert_same(functavg.to_state_dict(loaded), functavg.to_state_dict(state))


def test_the_model_gets_its_training_weights_back_where_an_evaluation_fails(tmp_path):
    def fail(state, **kwargs):
        raise Killed

    recorder, callback = Recorder(), AveragingCallback(EMA(0.5))
    trainer = make_trainer(
        tmp_path, recorder, callback, Doing("on_prediction_step", fail), eval_strategy="steps", eval_steps=3
    )
    with pytest.raises(Killed):
        trainer.train()
    assert len(recorder.iterates) == 3
    digits.assert_same(digits.snapshot(trainer.model), recorder.iterates[-1])
    trainer.optimizer.step()
    assert callback.state.count == 3  # nothing follows the optimizer any more


@pytest.mark.parametrize("at_end", ["average", "training"])
def test_the_best_model_is_loaded_with_its_average(tmp_path, at_end):
    recorder, callback = Recorder(), AveragingCallback(EMA(0.5), at_end=at_end)
    scores = iter([0.1, 0.9, 0.2, 0.3])
    trainer = make_trainer(
        tmp_path,
        recorder,
        callback,
        steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
    )
    trainer.compute_metrics = lambda p: {"score": next(scores), "accuracy": accuracy(torch.tensor(p.predictions))}
    trainer.train()
    assert callback.state.count == 2
    expected = digits.weighted(oracle.ema(0.5), recorder.iterates[:2])
    digits.assert_close(callback.state.average, expected)
    if at_end == "average":
        digits.assert_close(digits.snapshot(trainer.model), expected)
    else:
        digits.assert_same(digits.snapshot(trainer.model), recorder.iterates[1])
    assert trainer.evaluate()["eval_accuracy"] == accuracy(logits_by_hand(trainer.model, expected))


def test_the_best_and_the_resumed_model_may_train_other_parameters(tmp_path):
    """Where layers are unfrozen on the way, the average of a checkpoint has those of its time."""

    class Unfreezing(TrainerCallback):
        def set(self, model, flag):
            model.resnet.requires_grad_(flag)

        def on_train_begin(self, args, state, control, **kwargs):
            self.set(kwargs["model"], False)

        def on_step_begin(self, args, state, control, **kwargs):
            self.set(kwargs["model"], state.global_step >= 1)

    def train(folder, **options):
        callback, scores = AveragingCallback(EMA(0.5), at_end="training"), iter([0.9, 0.1, 0.2])
        saving = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
        trainer = make_trainer(folder, Unfreezing(), callback, steps=3, **saving, **options)
        trainer.compute_metrics = lambda p: {"score": next(scores)}
        return trainer, callback

    best = {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
    trainer, callback = train(tmp_path / "best", **best)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert callback.state.count == 1
    assert all(name.startswith("classifier") for name in callback.state.average)
    trainer, whole = train(tmp_path / "whole")
    trainer.train()
    trainer, resumed = train(tmp_path / "again")
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert any(name.startswith("resnet") for name in resumed.state.average)
    digits.assert_same(functavg.to_state_dict(resumed.state), functavg.to_state_dict(whole.state))


@pytest.mark.parametrize("at_end", ["average", "training"])
def test_averaged_weights_are_saved_for_from_pretrained(tmp_path, at_end):
    recorder, callback = Recorder(), AveragingCallback(SWA(), at_end=at_end)
    trainer = make_trainer(tmp_path, recorder, callback, steps=3)
    trainer.train()
    callback.save_pretrained(tmp_path / "average")
    trainer.save_model(str(tmp_path / "model"))
    saved, model = (
        digits.snapshot(transformers.ResNetForImageClassification.from_pretrained(tmp_path / name))
        for name in ("average", "model")
    )
    expected = digits.weighted(oracle.swa, recorder.iterates)
    digits.assert_close(saved, expected)
    digits.assert_same(model, saved if at_end == "average" else recorder.iterates[-1])
    assert not (tmp_path / "model" / "average.safetensors").exists()  # of checkpoints only


@pytest.mark.slow
# peft reads an attribute of the model under a name that transformers renames.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_of_a_peft_model_the_adapters_are_averaged_and_resumed(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted():
        config = peft.LoraConfig(target_modules=["convolution"], modules_to_save=["classifier"], r=2)
        torch.manual_seed(0)
        return peft.get_peft_model(make_model(), config)

    options = {"steps": 6, "save_strategy": "steps", "save_steps": 2, "label_names": ["labels"]}
    recorder, whole = Recorder(), AveragingCallback(EMA(0.8), at_end="training")
    one = make_trainer(tmp_path / "whole", recorder, whole, model=adapted(), **options)
    one.train()
    expected = digits.weighted(oracle.ema(0.8), recorder.iterates)
    digits.assert_close(whole.state.average, expected)
    assert len(expected) < len(list(one.model.parameters())) / 2
    assert one.evaluate()["eval_accuracy"] == accuracy(logits_by_hand(one.model, expected))

    with pytest.raises(Killed):
        make_trainer(tmp_path / "killed", AveragingCallback(EMA(0.8)), kill(5), model=adapted(), **options).train()
    resumed = AveragingCallback(EMA(0.8))
    other = make_trainer(tmp_path / "killed", resumed, model=adapted(), **options)
    other.train(resume_from_checkpoint=True)
    digits.assert_same(functavg.to_state_dict(whole.state), functavg.to_state_dict(resumed.state))

    whole.save_pretrained(tmp_path / "adapters")
    loaded = peft.PeftModel.from_pretrained(make_model(), tmp_path / "adapters", is_trainable=True)
    digits.assert_same(digits.snapshot(loaded), digits.snapshot(other.model))  # at_end="average"


def test_training_again_begins_a_new_average(tmp_path):
    recorder, callback = Recorder(), AveragingCallback(SWA())
    trainer = make_trainer(tmp_path, recorder, callback, steps=2)
    trainer.train()
    first = digits.snapshot(trainer.model)
    recorder.iterates.clear()
    trainer.train()
    assert callback.state.count == 2
    digits.assert_close(callback.state.average, digits.weighted(oracle.swa, recorder.iterates))
    assert not torch.equal(first["classifier.1.weight"], trainer.model.classifier[1].weight)


def test_an_average_on_another_dtype_and_with_buffers(tmp_path):
    model = make_model()
    model.register_buffer("level", torch.zeros(2))
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    recorder = Recorder()
    raised = Doing("on_pre_optimizer_step", lambda state, **kwargs: kwargs["model"].level.add_(1.0))
    callback = AveragingCallback(SWA(), dtype=torch.float64, use_buffers=True, backup_device="cpu")
    make_trainer(tmp_path, recorder, raised, callback, model=model, steps=3).train()
    assert {tensor.dtype for tensor in callback.state.average.values()} == {torch.float64}
    assert callback.state.average["level"].tolist() == [2.0, 2.0]
    assert "steps" not in callback.state.average


def test_a_callback_that_was_added_later_says_how_to_attach_it(tmp_path):
    trainer, callback = make_trainer(tmp_path, steps=2), AveragingCallback(SWA())
    trainer.add_callback(callback)
    with pytest.raises(RuntimeError, match=r"call callback.attach\(trainer\) instead of trainer.add_callback"):
        trainer.train()
    callback.attach(trainer)
    callback.attach(trainer)
    trainer.train()
    assert callback.state.count == 2
    later = AveragingCallback(SWA())
    later.attach(trainer)
    assert later in trainer.callback_handler.callbacks
    with pytest.raises(RuntimeError, match="follows another Trainer; make a new one for each"):
        callback.attach(make_trainer(tmp_path))


def test_an_event_without_a_trainer_is_refused():
    with pytest.raises(RuntimeError, match=r"no Trainer has called on_init_end; call callback.attach\(trainer\)"):
        AveragingCallback(SWA()).on_init_end(None, None, None)


def test_before_training_there_is_no_average(tmp_path):
    callback = AveragingCallback(SWA())
    trainer = make_trainer(tmp_path, callback)
    assert trainer.evaluate()["eval_accuracy"] == accuracy(logits_by_hand(trainer.model, {}))
    trainer.save_model()
    with pytest.raises(RuntimeError, match=r"there is no average yet: it begins with trainer.train\(\)"):
        _ = callback.state
    with pytest.raises(RuntimeError, match="there is no average yet"):
        callback.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        (["ema"], {}, TypeError, "rule must be an AveragingRule such as EMA"),
        ([EMA], {}, TypeError, r"pass an instance: EMA\(...\)"),
        ([EMA(0.9)], {"at_end": "best"}, ValueError, "at_end must be 'average' or 'training'.* got 'best'"),
    ],
)
def test_arguments_are_checked_at_construction(arguments, options, error, match):
    with pytest.raises(error, match=match):
        AveragingCallback(*arguments, **options)


def test_a_checkpoint_without_an_average_begins_a_new_one_with_a_warning(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path, steps=2, **options).train()
    callback = AveragingCallback(SWA())
    trainer = make_trainer(tmp_path, callback, steps=5, **options)
    with pytest.warns(UserWarning, match="checkpoint-2 has no average.safetensors.*; a new one begins here"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert callback.state.count == 3


def test_a_model_of_which_nothing_is_trained_is_refused(tmp_path):
    average = AveragingCallback(SWA())
    average._trainer = SimpleNamespace()
    with pytest.raises(ValueError, match="no parameter of ResNetForImageClassification requires a gradient"):
        average.on_train_begin(None, None, None, model=make_model().requires_grad_(False), optimizer=None)


@pytest.mark.slow
def test_without_transformers_the_extra_is_named():
    script = "import sys; sys.modules['transformers'] = None; import functavg.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "pip install 'functavg[transformers]'" in done.stderr, done.stderr
