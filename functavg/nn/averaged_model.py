"""A module that averages another: pairs tensors, calls a rule, keeps a count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from functavg.combinators import Every, SkipNonFinite
from functavg.nn import buffers, pairing
from functavg.nn.beside import Beside
from functavg.nn.copying import overwritten, twin
from functavg.nn.counting import HostCount
from functavg.nn.precision import WideValues
from functavg.nn.saving import SavedAverage
from functavg.nn.writing import write
from functavg.plan import Lerp, checked
from functavg.rules.base import AveragingRule, WeightRule, plan_update
from functavg.rules.functions import AvgFn
from functavg.rules.swa import SWA
from functavg.state import AverageState, Count


class AveragedModel(SavedAverage):
    """A copy of a model that holds a running average of its weights.

    With ``a`` the parameters of ``module``, ``x`` those of the model and ``n`` the count ``n_averaged``, each
    ``update_parameters`` is ``a + w(n) (x - a)`` with the weight ``w`` of the rule; the first one copies. Parameters
    are paired by name, whatever wraps the model. Those of less than 32 bits are averaged in float32: the module then
    holds the rounding of the average, and ``state_dict`` stores the average itself.

    Args:
        model: the model to average. It is copied, without wrappers and gradients.
        device: where the average lives. Default: where the model is.
        avg_fn: ``fn(averaged, current, n_averaged) -> averaged`` for each parameter.
        multi_avg_fn: ``fn(averaged_list, current_list, n_averaged)`` for many parameters in place.
        use_buffers: whether real and complex buffers are averaged too, or ``f(name, buffer) -> bool``. Others are
            copied from the model at each update. Default: ``False``.
        rule: the rule to average by. Default: ``SWA()``, the equal mean.
        module: a ready copy of the model to hold the average, such as a sharded one; it is overwritten.
        dtype: dtype that the average is held in. Default: that of the parameters, at least float32.

    Raises:
        AssertionError: more than one of ``avg_fn``, ``multi_avg_fn`` and ``rule`` was given.
        TypeError: the model cannot be averaged (FSDP1, uninitialised parameters) or copied, or ``rule`` is none.

    Example:
        >>> import functavg, torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> averaged = functavg.AveragedModel(model, rule=functavg.EMA(0.75))
        >>> for value in (0.0, 1.0):
        ...     _ = torch.nn.init.constant_(model.weight, value)
        ...     averaged.update_parameters(model)
        >>> averaged.module.weight.item(), averaged.n_averaged.item()
        (0.25, 2)

    Source: torch.optim.swa_utils.AveragedModel.
    """

    def __init__(
        self,
        model: Module,
        device: int | str | torch.device | None = None,
        avg_fn: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
        multi_avg_fn: Callable[[Any, Any, Any], None] | None = None,
        use_buffers: buffers.UseBuffers = False,
        *,
        rule: AveragingRule | None = None,
        module: Module | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        Module.__init__(self)
        if callable(device):  # torch's documentation passes a multi_avg_fn in this place
            if multi_avg_fn is not None:
                raise AssertionError("two multi_avg_fn were given: by name, and in the place of device")
            device, multi_avg_fn = None, device
        if sum(given is not None for given in (avg_fn, multi_avg_fn, rule)) > 1:
            raise AssertionError("Only one of avg_fn, multi_avg_fn and rule should be provided")
        if rule is not None and not isinstance(rule, AveragingRule):
            raise TypeError(f"rule must be an AveragingRule such as functavg.EMA(0.999), got {rule!r}")
        self.avg_fn = avg_fn
        self.multi_avg_fn = multi_avg_fn
        self.use_buffers = use_buffers
        self._rule = rule
        self._wide = WideValues(dtype)
        self._count = HostCount()
        with torch.inference_mode(False), torch.no_grad():
            self.module = twin(model, device) if module is None else overwritten(module, model)
            if module is not None and device is not None:
                self.module = self.module.to(device)
            self._wide.narrow(self._averaged().values())
            self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.int64, device=device))
        self._beside = Beside(self.rule, self._wide.get(self._averaged()))
        self._hook_saving()

    @property
    def rule(self) -> AveragingRule:
        """The rule that updates follow: that of ``multi_avg_fn`` or ``avg_fn``, else the one given, else ``SWA()``."""
        fn = self.avg_fn if self.multi_avg_fn is None else self.multi_avg_fn
        own = self._rule if fn is None else getattr(fn, "rule", None)
        if isinstance(own, AveragingRule):
            return own
        if fn is None:
            return SWA()
        return AvgFn(fn, grouped=self.multi_avg_fn is not None)

    @property
    def state(self) -> AverageState[Any]:
        """The state behind the module: the count, the averages by name (not copies) and the memory of the rule."""
        return self._beside.state(self._count.read(self.n_averaged), self._values())

    def extra_repr(self) -> str:
        """Show the rule."""
        return f"rule={self.rule!r}, use_buffers={self.use_buffers!r}"

    # ---- averaging

    def update_parameters(self, model: Module, *, steps: Count = 1) -> None:
        """Average in the parameters of a model.

        Args:
            model: the model, in any wrapper, with the parameters that the average has, by name and shape.
            steps: the number of steps since the last update, a positive integer. Default: 1.

        Raises:
            TypeError, ValueError: the model does not fit; the message names the parameters. Nothing was changed then.
        """
        with torch.inference_mode(False), torch.no_grad():
            carry_out = self._checked_in_step(model, steps)
            if carry_out is None:
                pairing.reshard(model)
                pairing.reshard(self.module)
                found = pairing.pairs(self.module, model)
                copies = buffers.divide(found, self.use_buffers)
                carry_out = self._checked(found.averages, found.news, copies, steps)
            carry_out()

    def _checked_in_step(self, model: Module, steps: Count) -> Callable[[], None] | None:
        """Return the function that updates without spelling names, None where a rule or an error needs them."""
        if self.use_buffers or not _is_blind_to_names(self.rule):
            return None
        found = pairing.in_step(self.module, model)
        if found is None:
            return None
        mine, theirs = found
        copies = buffers.Copies(mine.buffers, theirs.buffers)
        try:
            return self._checked(dict(enumerate(mine.parameters)), dict(enumerate(theirs.parameters)), copies, steps)
        except (TypeError, ValueError):  # nothing was changed; the way by name can say where
            return None

    def _checked(
        self, averages: dict[Any, Tensor], news: dict[Any, Tensor], copies: buffers.Copies, steps: Count
    ) -> Callable[[], None]:
        """Plan and check an update of these tensors; return the function that carries it out.

        Raises:
            TypeError, ValueError: the model does not fit.
        """
        replacements = buffers.replacements(copies, self._device)
        copy = checked(Lerp(copies.averages, copies.news, 1.0), inplace=True)
        values = self._wide.get(averages)
        before = self._beside.state(self._count.read(self.n_averaged), values)
        plan = plan_update(self.rule, news, before, steps)
        step = plan.average
        is_wide = values is not averages
        rounds = isinstance(step, Lerp) and step.old is values
        if is_wide and rounds:
            plan = plan._replace(average=replace(step, narrow=averages))
        write = checked(plan, inplace=True)

        def carry_out() -> None:
            after = write()
            copy()
            for replacement in replacements:
                replacement.carry_out()
            self._beside.keep(after)
            self.n_averaged = self._count.write(self.n_averaged, after.count)
            if is_wide and (rounds or step is before.average):
                self._wide.keep(averages, values)
            elif is_wide:
                self._wide.write(averages, values)

        return carry_out

    def attach(self, optimizer: Optimizer, model: Module) -> RemovableHandle:
        """Average after every step of an optimizer that changed the model.

        Micro-batches of accumulated gradients are no steps, nor are those that a GradScaler skips because of an
        overflow. (A fused optimizer knows of an overflow on the device only; there the flag is read.)

        Args:
            optimizer: the optimizer whose steps to follow.
            model: the model that it trains.

        Returns:
            A handle whose ``remove()`` ends it.

        Example:
            >>> import functavg, torch
            >>> model = torch.nn.Linear(1, 1)
            >>> averaged = functavg.AveragedModel(model, rule=functavg.EMA(0.9))
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> handle = averaged.attach(optimizer, model)
            >>> model(torch.ones(1)).backward()
            >>> optimizer.step()
            >>> averaged.n_averaged.item()
            1
        """

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            del args, kwargs
            found_inf = getattr(optimizer, "found_inf", None)  # set by GradScaler.step around a fused step
            if found_inf is None or not found_inf.item():
                self.update_parameters(model)

        return optimizer.register_step_post_hook(after_step)

    def copy_to(self, model: Module) -> None:
        """Copy the average into a model for good: all parameters and buffers, in the model's dtypes and devices.

        An average of nothing (count 0) changes nothing.

        Raises:
            TypeError, ValueError: the model does not have these tensors; nothing was written.
        """
        if self._count.read(self.n_averaged) > 0:
            write(model, self._wide.get(dict(pairing.tensors(self.module))))

    def _values(self) -> dict[str, Tensor]:
        """Return the values of the average by name, of the first where there are several; they are not copies."""
        values = self._wide.get(self._averaged())
        distinct = {id(value): value.detach() for value in values.values()}  # what is tied stays tied
        return {name: distinct[id(value)] for name, value in values.items()}

    def _averaged(self) -> dict[str, Tensor]:
        """Return the tensors that are averaged, by name."""
        found = pairing.pairs(self.module, self.module)
        buffers.divide(found, self.use_buffers)
        return found.averages

    def _device(self) -> torch.device | None:
        """Return the device of the average, None where it is on several."""
        devices = {tensor.device for tensor in self.module.parameters()}
        return devices.pop() if len(devices) == 1 else None

    # ---- moving, copying

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AveragedModel:
        """Move or convert, as all of ``to``, ``half``, ``cuda`` and ``share_memory`` do.

        What becomes low precision keeps its value beside it, what becomes wide takes that value back.
        """
        tensors = self._averaged()
        before = {name: (tensors[name].dtype, value.detach()) for name, value in self._wide.get(tensors).items()}
        count = self._count.read(self.n_averaged)
        with torch.inference_mode(False), torch.no_grad():
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            self._wide.move(self._averaged(), before, fn)
            self._beside.map_tensors(fn)
        # Whatever fn does to values, the count stays what it was.
        self.n_averaged = self._count.write(self.n_averaged.to(torch.int64), count)
        return self

    def to_empty(self, *, device: Any, recurse: bool = True) -> AveragedModel:
        """Move without copying values; nothing is averaged then, and the count is 0."""
        super().to_empty(device=device, recurse=recurse)
        self._wide.clear()
        self._beside = Beside(self.rule, self._wide.get(self._averaged()))
        self.n_averaged = self._count.write(self.n_averaged, 0)
        return self


def _is_blind_to_names(rule: AveragingRule) -> bool:
    """Tell whether a rule plans the same whatever the tensors are called, and keeps none of them in its memory."""
    while type(rule) in (Every, SkipNonFinite):
        rule = rule.rule  # type: ignore[attr-defined]
    return type(rule).plan is WeightRule.plan
