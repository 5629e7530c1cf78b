"""Averages for the Trainer of Hugging Face transformers."""

from __future__ import annotations

__all__ = ["AveragingCallback"]

import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from functavg.integrations.requiring import require

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback
else:
    TrainerCallback = require("transformers", "transformers").TrainerCallback

from functavg.checkpoints import load_state, save_state
from functavg.checkpoints.opening import open_file
from functavg.integrations.averaging import AtEnd, ModelAverage, check_arguments
from functavg.nn.attaching import Attachment, attach
from functavg.nn.buffers import UseBuffers
from functavg.rules.base import AveragingRule
from functavg.state import AverageState

FILE_NAME = "average.safetensors"
"""The file of the average in each checkpoint folder, for ``functavg.checkpoints.load_state`` and the like."""


class AveragingCallback(TrainerCallback):
    """Averages the weights that a Hugging Face Trainer trains, and evaluates with the average.

    * There is one update after each step of the optimizer: not for micro-batches of accumulated gradients, and not for
      steps that a GradScaler skips.
    * ``evaluate`` and ``predict`` compute with the average, also after training. Before the first update they compute
      with what the model holds.
    * Each checkpoint folder gets ``average.safetensors``, the state of the rule. Its other files hold the training
      weights, whenever it is written. ``train(resume_from_checkpoint=...)`` goes on with the average to the same bits.
      With ``load_best_model_at_end``, the average is that of the best checkpoint at the end.
    * Averaged are the parameters that require a gradient, in float32 at least. Of a PEFT model these are the adapters.

    Args:
        rule: the rule to average by, such as ``functavg.EMA(0.999)``.
        at_end: what the model holds after training, and so what ``trainer.save_model()`` writes: ``"average"``, or
            ``"training"`` for the training weights. Default: ``"average"``.
        use_buffers: whether real and complex buffers are averaged too, or ``f(name, buffer) -> bool``. Default:
            ``False``.
        device: where the average lives. Default: where the model is.
        dtype: dtype of the average. Default: that of the parameters, at least float32.
        backup_device: where the training weights are kept during an evaluation, such as ``"cpu"``. Default: where they
            are.

    Raises:
        TypeError: ``rule`` is none.
        ValueError: ``at_end`` is neither of its values.

    Example:
        >>> import functavg
        >>> from functavg.integrations.transformers import AveragingCallback
        >>> callback = AveragingCallback(functavg.EMA(0.999))  # for Trainer(..., callbacks=[callback])
        >>> callback.rule
        EMA(decay=0.999, debias=False, start='copy')
    """

    def __init__(
        self,
        rule: AveragingRule,
        *,
        at_end: AtEnd = "average",
        use_buffers: UseBuffers = False,
        device: Any = None,
        dtype: Any = None,
        backup_device: Any = None,
    ) -> None:
        self.rule: AveragingRule = check_arguments(rule, at_end)
        self._at_end = at_end
        self._options = {
            "use_buffers": use_buffers,
            "device": device,
            "dtype": dtype,
            "backup_device": backup_device,
        }
        self._trainer: Any = None
        self._average: ModelAverage | None = None
        self._attachment: Attachment | None = None
        self._resumed: str | None = None
        self._is_in_model = False

    # ---- what users call

    @property
    def state(self) -> AverageState[Any]:
        """The state of the rule, with the average by name.

        Raises:
            RuntimeError: no training has begun.
        """
        return self._get_average().state

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> None:
        """Save the model with the average as its weights, for ``from_pretrained``. Of a PEFT model, its adapters.

        Args:
            folder: the folder.
            **options: those of the model's own ``save_pretrained``, such as ``push_to_hub=True``.

        Raises:
            RuntimeError: no training has begun.
        """
        average = self._get_average()
        with nullcontext() if self._is_in_model else average.inside():
            average.model.save_pretrained(folder, **options)  # type: ignore[operator]

    def attach(self, trainer: Trainer) -> None:
        """Follow a Trainer that was made without this callback.

        Args:
            trainer: the Trainer.

        Raises:
            RuntimeError: the callback follows another one.
        """
        if self._trainer is trainer:
            return
        if self._trainer is not None:
            raise RuntimeError("this AveragingCallback follows another Trainer; make a new one for each")
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self._trainer = trainer
        # There are events at the end of an evaluation, but none at its beginning, and none where it fails.
        self._wrap("train", self._train)
        self._wrap("save_model", self._save_model)
        self._wrap("evaluation_loop", self._evaluate)

    # ---- what the Trainer calls

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Follow the Trainer that was given this callback."""
        self.attach(_find_trainer(self, sys._getframe()))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to average, or go on from the checkpoint."""
        if self._trainer is None:
            raise RuntimeError(
                "the AveragingCallback was added after its Trainer was made; pass it as Trainer(..., callbacks=[...]), "
                "or call callback.attach(trainer) instead of trainer.add_callback(callback)"
            )
        self._detach()
        self._is_in_model = False
        average = ModelAverage(kwargs["model"], self.rule, **self._options)
        if self._resumed is not None:
            _load(average, Path(self._resumed) / FILE_NAME, "a new one begins here")
        self._average = average
        self._attachment = attach(average.update, kwargs["optimizer"], average.model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the average of the best checkpoint if that is what was loaded; leave it in the model on request."""
        average = self._get_average()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            _load(average, Path(state.best_model_checkpoint) / FILE_NAME, "the one at the end of training stays")
        if self._at_end == "average":
            average.stay()
            self._is_in_model = True

    # ---- around methods of the Trainer

    def _wrap(self, name: str, around: Any) -> None:
        method = getattr(self._trainer, name)
        setattr(self._trainer, name, lambda *args, **kwargs: around(method, *args, **kwargs))

    def _train(self, train: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        self._resumed = None
        if resume_from_checkpoint is True:
            self._resumed = require("transformers.trainer_utils", "transformers").get_last_checkpoint(
                self._trainer.args.output_dir
            )
        elif resume_from_checkpoint:
            self._resumed = os.fspath(resume_from_checkpoint)
        try:
            return train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._detach()

    def _evaluate(self, evaluation_loop: Any, *args: Any, **kwargs: Any) -> Any:
        average = self._average
        if average is None or self._is_in_model or average.model is not self._trainer.model:
            return evaluation_loop(*args, **kwargs)
        with average.inside():
            return evaluation_loop(*args, **kwargs)

    def _save_model(
        self, save_model: Any, output_dir: str | None = None, _internal_call: bool = False, **kwargs: Any
    ) -> Any:
        average = self._average
        if average is None:
            return save_model(output_dir, _internal_call=_internal_call, **kwargs)
        with average.outside():
            result = save_model(output_dir, _internal_call=_internal_call, **kwargs)
        if _internal_call and output_dir is not None and self._trainer.args.should_save:  # a checkpoint
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            save_state(Path(output_dir) / FILE_NAME, average.state, self.rule)
        return result

    def _detach(self) -> None:
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None

    def _get_average(self) -> ModelAverage:
        if self._average is None:
            raise RuntimeError("there is no average yet: it begins with trainer.train()")
        return self._average


def _find_trainer(callback: AveragingCallback, frame: FrameType | None) -> Any:
    """Return the Trainer that calls this callback: an event tells of the model and the optimizer only."""
    trainer_class = require("transformers", "transformers").Trainer
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, trainer_class) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back
    raise RuntimeError("no Trainer has called on_init_end; call callback.attach(trainer) yourself")


def _load(average: ModelAverage, path: Path, otherwise: str) -> None:
    """Load the average of a checkpoint, or warn that it has none."""
    if path.is_file():
        prefix = average.prefix()
        keys = open_file(path).infos
        names = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
        average.load(names, lambda like: load_state(path, like))
    else:
        warnings.warn(
            f"{path.parent} has no {path.name}, the average of an AveragingCallback; {otherwise}", stacklevel=2
        )
