"""A module that averages another: pairs tensors, calls a rule, keeps a count."""

from __future__ import annotations

__all__ = ["AveragedModel"]

import copy
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from functavg import trees
from functavg.combinators import Every, SkipNonFinite
from functavg.nn import buffers, pairing
from functavg.nn.attaching import Attachment, attach
from functavg.nn.copying import copy_model, overwrite_
from functavg.nn.functions import rule_of, sort_options
from functavg.nn.held_state import HeldState
from functavg.nn.modes import unmerged
from functavg.nn.rebinding import rebind_methods_
from functavg.nn.saving import SavedAverage
from functavg.nn.sharing import Share, find_parameters, hidden, name_shared, warn_of_move
from functavg.nn.writing import drop_derived_values, exchange, write
from functavg.plan import Lerp, check_plan
from functavg.rules.base import AveragingRule, WeightRule, plan_update
from functavg.rules.functions import AvgFn
from functavg.rules.swa import SWA
from functavg.scalars import is_host
from functavg.state import AverageState, Count

if TYPE_CHECKING:  # a bare AveragedModel is one of any module; before Python 3.13 only checkers know this default
    import typing_extensions

    M_co = typing_extensions.TypeVar("M_co", bound=Module, default=Module, covariant=True)
else:
    M_co = TypeVar("M_co", bound=Module, covariant=True)
M = TypeVar("M", bound=Module)

_LOST = (
    "weights were written there while it has averaged nothing (n_averaged is 0). To go on from them, load them as an "
    "average: averaged.load_state_dict({'module.' + name: value for name, value in weights.items()}, strict=False)"
)


class AveragedModel(SavedAverage, Generic[M_co]):
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
            copied from the model at each update, and so are always those that are not persistent, and those that hold
            an infinity now, as masks do. Default: ``False``.
        rule: the rule to average by; it may also be passed as ``device``, ``avg_fn`` or ``multi_avg_fn``.
            Default: ``SWA()``, the equal mean.
        module: a ready copy of the model to hold the average, such as a sharded one; it is overwritten.
        dtype: dtype that the average is held in. Default: that of the parameters, at least float32.
        share: ``share(name, tensor) -> bool`` tells which tensors of the average are the model's own, such as those of
            a frozen base: they take no memory and are not averaged. Where such a tensor is trained all the same, the
            average follows it. Running statistics, which a forward writes to, are never shared. Default: only frozen
            ones that ``module`` shares with the model.

    Raises:
        AssertionError: more than one of ``avg_fn``, ``multi_avg_fn`` and ``rule`` was given.
        TypeError: the model cannot be averaged (FSDP1, uninitialised parameters) or copied, or ``rule`` is not a rule.
        ValueError: there is no such device, or a shared tensor is on another one.

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

    module: M_co
    n_averaged: Tensor
    _infinite: frozenset[str] = frozenset()

    def __init__(
        self,
        model: M_co,
        device: int | str | torch.device | None = None,
        avg_fn: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
        multi_avg_fn: Callable[[Any, Any, Any], None] | None = None,
        use_buffers: buffers.UseBuffers = False,
        *,
        rule: AveragingRule | None = None,
        module: M_co | None = None,
        dtype: torch.dtype | str | None = None,
        share: Share | None = None,
    ) -> None:
        Module.__init__(self)
        device, avg_fn, multi_avg_fn, rule = sort_options(device, avg_fn, multi_avg_fn, rule)
        buffers.check_use_buffers(use_buffers)
        self.avg_fn = avg_fn
        self.multi_avg_fn = multi_avg_fn
        self.use_buffers = use_buffers
        self._rule = rule
        self._held = HeldState(dtype)
        with torch.inference_mode(False), torch.no_grad():
            if module is None:
                self.module = cast("M_co", copy_model(model, device, share))
            else:
                self.module = cast("M_co", overwrite_(module, model, device, share))
            rebind_methods_(self.module, model)
            self._infinite = buffers.name_infinite(pairing.named_tensors(self.module))
            if share is not None or module is not None:
                self._shared = name_shared(self.module, model)
            self._held.masters.narrow_(self._averaged().values())
            self.register_buffer("n_averaged", _make_count(device, self.module))
        self._held.init_(self.rule, self._averaged())
        self._hook_saving()

    @property
    def rule(self) -> AveragingRule:
        """The rule that updates follow, that of ``multi_avg_fn`` or ``avg_fn``, else the one given, else ``SWA()``."""
        fn = self.avg_fn if self.multi_avg_fn is None else self.multi_avg_fn
        if fn is None:
            return SWA() if self._rule is None else self._rule
        return rule_of(fn, grouped=self.multi_avg_fn is not None)

    @property
    def state(self) -> AverageState[Any]:
        """The state behind the module, with the count, the averages by name (not copies) and the memory of the rule."""
        return self._held.state(self._held.read_count(self.n_averaged), self._values())

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
        pairing.check_module(model, "update_parameters(model)")
        self._undo_broken_load()
        pairs, copies, strays = self._pair(model)
        if pairs.may_be_merged:
            with unmerged(self.module, model):
                pairs, copies, strays = self._pair(model)
                if self._held.read_count(self.n_averaged) == 0:  # weights that were merged are not lost
                    self._held.mark_start(pairs.averages)
                self._update(pairs, copies, strays, steps)
        else:
            self._update(pairs, copies, strays, steps)

    def _update(self, pairs: pairing.Pairs, copies: buffers.Copies | None, strays: list[Any], steps: Count) -> None:
        """Average in what was paired."""
        rule, held = self.rule, self._held
        masters = held.masters.get(pairs.averages)
        as_tree = _as_list if _is_blind_to_names(rule) else _as_dict
        averages = as_tree(masters, pairs)
        counter = vars(self)["_buffers"]["n_averaged"]  # the look-up of modules takes ten times as long
        count = held.read_count(counter)
        if held.was_reset:
            held.init_(rule, self._averaged())
        before = held.state(count, averages)
        plan = plan_update(rule, as_tree(pairs.news, pairs), before, steps)
        if before.count == 0:
            self._warn_of_lost_weights(plan.average, pairs.averages)
        step = plan.average
        rounds = masters is not pairs.averages and isinstance(step, Lerp) and step.old is averages
        if rounds:
            plan = plan._replace(average=replace(step, roundings=as_tree(pairs.averages, pairs)))
        commit = check_plan(plan, inplace=True)
        commit_buffers = buffers.check_copies(copies, self)
        after = commit()
        commit_buffers()
        for mine, theirs, name in strays:  # what is shared was replaced in the model, or the average was copied
            mine[name] = theirs[name]
        held.keep(after)
        self._buffers["n_averaged"] = held.write_count(counter, after.count)
        if rounds or step is averages:
            held.masters.keep(pairs.averages, masters)
        elif masters is not pairs.averages:
            held.masters.write_(pairs.averages, masters)
        if before.count == 0:
            held.mark_start(() if after.count else pairs.averages)
        drop_derived_values()

    def attach(self, optimizer: Optimizer | Iterable[Optimizer], model: Module) -> Attachment:
        """Average after every step of an optimizer that changed the model.

        Micro-batches of accumulated gradients are not steps, nor are those that a GradScaler skips because of an
        overflow. (The flag of a fused optimizer is read from the device.)

        Several optimizers that train parts of one model take one step of training together: given as a list, they are
        followed by one update when each has stepped since the last one. (Attached one by one, each of their steps is
        followed by an update.)

        Args:
            optimizer: the optimizer whose steps to follow, bare or as a launcher has wrapped it, or a list of them.
            model: the model that they train.

        Returns:
            A handle whose ``remove()`` ends the updates.

        Raises:
            TypeError: the arguments are swapped, or ``optimizer`` is not one or has no hooks; nothing was attached.

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
        return attach(self.update_parameters, optimizer, model)

    def copy_to(self, model: Module) -> None:
        """Copy the average into a model for good: all parameters and buffers, in the model's dtypes and devices.

        Before the first update (count 0) the model stays as it is.

        Raises:
            TypeError, ValueError: the model does not have these tensors; nothing was written.
        """
        pairing.check_module(model, "copy_to(model)")
        if self._has_average("copy_to"):
            with unmerged(self.module, model):
                values, theirs = dict(pairing.named_tensors(self.module)), dict(pairing.named_tensors(model))
                shared = {name: values.pop(name) for name in self._shared if name in values}
                others = {name: tensor for name, tensor in shared.items() if theirs.get(name) is not tensor}
                write(model, self._held.masters.get_named(values) | others)

    def swapped(self, model: M, *, backup_device: int | str | torch.device | None = None) -> AbstractContextManager[M]:
        """Compute with the average inside a ``with`` block, as ``functavg.swapped(model, averaged)`` does.

        Args:
            model: the model, in any wrapper.
            backup_device: where to keep the training weights meanwhile. Default: where they are.

        Returns:
            A context manager that yields the model.
        """
        read = self._values if self._has_average("swapped") else dict
        return exchange(model, read, backup_device, [self.module])

    def _has_average(self, name: str) -> bool:
        """Tell whether anything was averaged; if not, warn of weights that somebody wrote to the module."""
        self._undo_broken_load()
        if self._held.read_count(self.n_averaged) > 0:
            return True
        pairs, _, _ = self._pair(self.module)
        if not pairs.may_be_merged and self._held.were_written(pairs.averages):
            warnings.warn(f"{name} leaves the model as it is: {_LOST}", stacklevel=3)
        return False

    def _warn_of_lost_weights(self, step: Any, averages: list[Tensor]) -> None:
        """Warn where the first update replaces weights that somebody put into the module."""
        copies = [leaf for leaf in trees.flatten(step)[0] if isinstance(leaf, Lerp)]
        if any(is_host(copy.weight) and copy.weight == 1 for copy in copies) and self._held.were_written(averages):
            warnings.warn(f"this update replaces the weights of averaged.module: {_LOST}", stacklevel=4)

    def _values(self) -> dict[str, Tensor]:
        """Return the values of the average, of the first if there are several, by name; they are not copies."""
        values = self._held.masters.get_named(self._averaged())
        distinct = {id(value): value.detach() for value in values.values()}  # what is tied stays tied
        return {name: distinct[id(value)] for name, value in values.items()}

    def _averaged(self) -> dict[str, Tensor]:
        """Return the tensors that are averaged, by name."""
        pairs, _, _ = self._pair(self.module)
        return _as_dict(pairs.averages, pairs)

    def _pair(self, model: Module) -> tuple[pairing.Pairs, buffers.Copies | None, list[Any]]:
        """Return what is averaged of a model, what is copied, and where to share again (see ``Pairs.leave_out``)."""
        pairs = pairing.pair(vars(self)["_modules"]["module"], model)
        strays = pairs.leave_out(self._shared) if self._shared else []
        return pairs, buffers.split_buffers(pairs, self.use_buffers, self._infinite), strays

    # ---- moving, copying

    def __deepcopy__(self, memo: dict[int, Any]) -> AveragedModel[M_co]:
        """Copy as any module, with ordinary tensors in inference mode too: master copies of others are not trusted."""
        make, args, state, *_ = cast("tuple[Any, ...]", self.__reduce_ex__(2))
        copied: AveragedModel[M_co] = make(*args)
        memo[id(self)] = copied
        with torch.inference_mode(False), torch.no_grad():
            copied.__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call]
        return copied

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AveragedModel[M_co]:
        """Move or convert all tensors: ``to``, ``half``, ``cuda`` and ``share_memory`` call this.

        A tensor that becomes low precision gets a master copy; one that becomes wide takes the value of its own. Shared
        parameters stay as they are, with a warning if they would change.
        """
        held, tensors = self._held, self._averaged()
        before = {
            name: (tensors[name].dtype, value.detach()) for name, value in held.masters.get_named(tensors).items()
        }
        count = held.read_count(self.n_averaged)
        was_written = held.were_written(list(tensors.values()))
        shared = find_parameters(self.module, self._shared)
        with torch.inference_mode(False), torch.no_grad():
            with hidden(self.module, shared):
                super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            if shared:
                warn_of_move(shared.values(), fn)
            tensors = self._averaged()
            held.masters.move(tensors, before, fn)
            held.map_tensors(fn)
        if not was_written:
            held.mark_start(() if count else tensors.values())
        # Whatever fn does to values, the count stays what it was.
        self.n_averaged = held.write_count(self.n_averaged.to(torch.int64), count)
        return self

    def to_empty(self, *, device: Any, recurse: bool = True) -> AveragedModel[M_co]:
        """Move without copying values, and start again from count 0."""
        super().to_empty(device=device, recurse=recurse)
        self._held = HeldState(self._held.masters.dtype)
        self._held.init_(self.rule, self._averaged())
        self._held.mark_start(())  # no values, so none that an update could lose
        self.n_averaged = self._held.write_count(self.n_averaged, 0)
        return self


def _make_count(device: Any, module: Module) -> Tensor:
    """Return a count of 0, on the CPU where the default device is meta and the module has values."""
    count = torch.tensor(0, dtype=torch.int64, device=device)
    if device is None and count.is_meta and not all(tensor.is_meta for _, tensor in pairing.named_tensors(module)):
        return torch.tensor(0, dtype=torch.int64, device="cpu")
    return count


def _is_blind_to_names(rule: AveragingRule) -> bool:
    """Tell whether a rule plans the same whatever the names of the tensors, and keeps none of them in its memory."""
    while type(rule) in (Every, SkipNonFinite):
        rule = rule.rule  # type: ignore[attr-defined]
    return type(rule).plan in (WeightRule.plan, AvgFn.plan)


def _as_list(leaves: list[Tensor], pairs: pairing.Pairs) -> trees.NamedList:
    return trees.NamedList(leaves, pairs.names)


def _as_dict(leaves: list[Tensor], pairs: pairing.Pairs) -> dict[str, Tensor]:
    return dict(zip(pairs.names(), leaves, strict=True))
