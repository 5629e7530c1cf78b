"""Averages for the Trainer of PyTorch Lightning."""

from __future__ import annotations

__all__ = ["AveragingCallback", "averaged_weights"]

import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from functavg.integrations.requiring import require

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    # One library under two names. Their Trainers call whatever has the methods of a callback.
    _NAMES = ("lightning.pytorch", "pytorch_lightning")
    _NAME = next((name for name in _NAMES if name in sys.modules), None)
    if _NAME is None:
        _NAME = "pytorch_lightning" if importlib.util.find_spec("lightning") is None else "lightning.pytorch"
    Callback = require(_NAME, "lightning").Callback

from functavg.integrations.averaging import AtEnd, ModelAverage, check_arguments
from functavg.nn.attaching import Attachment, attach
from functavg.nn.batch_norm import update_bn
from functavg.nn.buffers import UseBuffers
from functavg.nn.pairing import unwrap
from functavg.rules.base import AveragingRule
from functavg.saving import from_state_dict, to_state_dict
from functavg.state import AverageState


class AveragingCallback(Callback):
    """Averages the weights that a Lightning Trainer trains, and evaluates with the average.

    * There is one update after each step of the optimizer: not for micro-batches of accumulated gradients, and not for
      steps that a GradScaler skips. Several optimizers take one step together.
    * Validation, test and prediction compute with the average, also those after training and those of a checkpoint
      (``ckpt_path``). Before the first update they compute with what the model holds.
    * A checkpoint holds the training weights in its ``state_dict`` and the average in the state of this callback,
      whenever it is written; see :func:`averaged_weights`. ``fit(ckpt_path=...)`` goes on with both to the same bits.
    * Averaged are the parameters that require a gradient, in float32 at least. Those that are unfrozen later join then.

    Args:
        rule: the rule to average by, such as ``functavg.EMA(0.999)``.
        at_end: what the model holds after ``fit``: ``"average"``, or ``"training"`` for the training weights. Default:
            ``"average"``.
        update_bn: whether to re-estimate the statistics of BatchNorms for the average at the end of ``fit``, in one
            pass over the train dataloader; or ``f(model, batch)``, which computes with a batch. See
            :func:`functavg.update_bn`. Default: ``False``.
        use_buffers: whether real and complex buffers are averaged too, or ``f(name, buffer) -> bool``. Default:
            ``False``.
        device: where the average lives. Default: where the model is.
        dtype: dtype of the average. Default: that of the parameters, at least float32.
        backup_device: where the training weights are kept during an evaluation, such as ``"cpu"``. Default: where they
            are.

    Raises:
        TypeError: ``rule`` is none.
        ValueError: ``at_end`` is neither of its values, or ``update_bn`` does not go with it.

    Example:
        >>> import functavg
        >>> from functavg.integrations.lightning import AveragingCallback
        >>> callback = AveragingCallback(functavg.EMA(0.999))  # for Trainer(..., callbacks=[callback])
        >>> callback.rule
        EMA(decay=0.999, debias=False, start='copy')
    """

    def __init__(
        self,
        rule: AveragingRule,
        *,
        at_end: AtEnd = "average",
        update_bn: bool | Callable[[Any, Any], object] = False,
        use_buffers: UseBuffers = False,
        device: Any = None,
        dtype: Any = None,
        backup_device: Any = None,
    ) -> None:
        self.rule: AveragingRule = check_arguments(rule, at_end)
        if update_bn and at_end != "average":
            raise ValueError("update_bn estimates statistics for the average in the model: pass at_end='average' too")
        self._at_end = at_end
        self._update_bn = update_bn
        self._options: dict[str, Any] = {
            "use_buffers": use_buffers,
            "device": device,
            "dtype": dtype,
            "backup_device": backup_device,
        }
        self._average: ModelAverage | None = None
        self._attachment: Attachment | None = None
        self._loaded: dict[str, Any] | None = None
        self._is_in_model = False

    @property
    def state(self) -> AverageState[Any]:
        """The state of the rule, with the average by name.

        Raises:
            RuntimeError: no training has begun.
        """
        if self._average is None:
            raise RuntimeError("there is no average yet: it begins with trainer.fit(), or with that of a checkpoint")
        return self._average.state

    # ---- training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to average, or go on from the checkpoint or the last call of ``fit``."""
        if self._update_bn and isinstance(trainer.train_dataloader, (list, tuple, Mapping)):
            raise TypeError(
                "update_bn=True needs one train dataloader, and there are several: call functavg.update_bn after fit"
            )
        forward = type(pl_module).forward.__qualname__
        if self._update_bn is True and forward == "LightningModule.forward":  # which would fail at the end
            raise TypeError(
                f"update_bn=True calls {type(pl_module).__name__} with a batch, and it has no forward: define one, or "
                "pass what computes with a batch, such as update_bn=lambda model, batch: model.net(batch[0])"
            )
        unwrap(trainer.model)  # type: ignore[arg-type]  # refuses FSDP1, which wraps the model
        self._detach()
        self._take_over(pl_module)
        if self._average is None or self._average.model is not pl_module or trainer.global_step == 0:
            self._average = ModelAverage(pl_module, self.rule, **self._options)
        self._is_in_model = False
        self._attachment = attach(self._average.update, trainer.optimizers, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the average into the model on request, where checkpoints can still be written."""
        self._detach()
        average = self._average
        if average is None or self._at_end != "average":
            return
        if not self._update_bn:
            average.enter()
        else:
            average.enter({**average.copy_buffers(), **average.weights()})
            forward = self._update_bn if callable(self._update_bn) else None
            update_bn(trainer.train_dataloader, pl_module, pl_module.device, forward=forward)  # type: ignore[arg-type]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the average in the model for good."""
        if self._average is not None and self._average.is_inside:
            self._average.stay()
            self._is_in_model = True

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the training weights back."""
        self._detach()
        self._leave()

    # ---- evaluation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate with the average."""
        self._enter(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the training weights back, before any checkpoint is written."""
        self._leave()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Test with the average."""
        self._enter(pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the training weights back."""
        self._leave()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Predict with the average."""
        self._enter(pl_module)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the training weights back."""
        self._leave()

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the rule as a flat dict, and where the weights are in it."""
        if self._loaded is not None:
            return self._loaded
        if self._average is None:
            return {}
        return {"weights": self._average.keys(), "state": to_state_dict(self._average.state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what ``state_dict`` returned until there is a model to load it for."""
        self._loaded = state_dict
        self._is_in_model = False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """See to it that the checkpoint holds the training weights, also while the model holds the average."""
        if self._average is None or not self._average.is_inside:
            return
        with self._average.outside():
            training = trainer.strategy.lightning_module_state_dict()
            for name in checkpoint["state_dict"].keys() & training.keys():
                value = training[name]
                checkpoint["state_dict"][name] = value.clone() if hasattr(value, "clone") else value

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Warn of a checkpoint that has no average."""
        if self.state_key not in checkpoint.get("callbacks", {}):
            warnings.warn(
                "the checkpoint has no average of an AveragingCallback; a new one begins where training goes on",
                stacklevel=2,
            )

    # ---- what these have in common

    def _take_over(self, pl_module: LightningModule) -> None:
        """Make the average that was loaded."""
        if self._loaded is not None:
            names = self._loaded["weights"]
            average = ModelAverage(pl_module, self.rule, **self._options, names=names)
            saved = self._loaded["state"]
            average.load(names, lambda like: from_state_dict(like, saved))
            self._average, self._loaded = average, None

    def _enter(self, pl_module: LightningModule) -> None:
        self._take_over(pl_module)
        if self._average is not None and self._average.model is pl_module and not self._is_in_model:
            self._average.enter()

    def _leave(self) -> None:
        if self._average is not None:
            self._average.leave()

    def _detach(self) -> None:
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None


def averaged_weights(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the averaged weights in a checkpoint of Lightning, by the names of its ``state_dict``.

    Args:
        checkpoint: the checkpoint, as ``torch.load`` returns it.

    Returns:
        The weights, for ``model.load_state_dict(..., strict=False)``: what was not averaged is not among them.

    Raises:
        KeyError: the checkpoint was written without an AveragingCallback.

    Example:
        >>> from functavg.integrations.lightning import averaged_weights
        >>> state = {"count": 3, "average.head.weight": [0.5]}  # to_state_dict of the state of the rule
        >>> saved = {"weights": {"head.weight": "average.head.weight"}, "state": state}
        >>> averaged_weights({"state_dict": {"head.weight": [2.0]}, "callbacks": {"AveragingCallback": saved}})
        {'head.weight': [0.5]}
    """
    saved = checkpoint.get("callbacks", {}).get(AveragingCallback.__qualname__)
    if not saved:
        raise KeyError("the checkpoint has no average of an AveragingCallback")
    return {name: saved["state"][key] for name, key in saved["weights"].items()}
