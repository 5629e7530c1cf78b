"""The grouped torch kernels give the bits of the readable reference, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import functavg
from functavg.kernels.torch import staging, steps
from functavg.plan import Lerp, run

WEIGHTS = [0.0, 1e-4, 0.5, 0.75, 1.0]
SHAPES = [(4, 3, 2, 5), (7,), (), (0,), (3, 0), (1, 1), (33, 2), (1000,)]


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    real = torch.randn(shape, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    return real.to(dtype)


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda leaf: leaf,
    "channels last": lambda leaf: leaf.to(memory_format=torch.channels_last) if leaf.ndim == 4 else leaf,
    "transposed": lambda leaf: (
        leaf.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1) if leaf.ndim > 1 else leaf
    ),
    "strided": lambda leaf: torch.stack([leaf, leaf], -1)[..., 0],
    "expanded": lambda leaf: leaf[:1].expand(leaf.shape) if leaf.ndim else leaf,
    "conjugate": lambda leaf: leaf.conj() if leaf.is_complex() else leaf,
}
PAIRS = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.complex64, torch.complex64),
    (torch.complex128, torch.complex128),
    (torch.int64, torch.int64),
    (torch.bool, torch.bool),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float32, torch.float64),
    (torch.float32, torch.int32),
    (torch.float64, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.complex64, torch.float32),
    (torch.complex64, torch.complex128),
    (torch.int64, torch.int8),
    (torch.int16, torch.bool),
]


def identical(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def assert_like_the_reference(olds: list[Any], news: list[Any], weight: float) -> None:
    floats = olds[0].dtype.is_floating_point or olds[0].dtype.is_complex
    reference = [
        steps.outside_autograd(steps.lerp_leaf)(
            old.clone(), new.clone(), weight if floats or weight == 0 else 1, inplace=False
        )
        for old, new in zip(olds, news, strict=True)
    ]
    before = [old.clone() for old in olds]
    pure = functavg.lerp(olds, news, weight)
    assert all(map(identical, pure, reference))
    assert all(map(identical, olds, before))
    inplace = functavg.lerp(olds, news, weight, inplace=True)
    assert all(map(identical, inplace, reference))
    assert all(leaf is old for leaf, old in zip(inplace, olds, strict=True))


@pytest.mark.parametrize("stage", [None, 7], ids=["one batch", "pieces"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("old", "new"), PAIRS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_grouped_steps_are_the_bits_of_single_ones(
    old: torch.dtype, new: torch.dtype, form: str, stage: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stage is not None:
        monkeypatch.setattr(staging, "STAGE", stage)
    for weight in WEIGHTS:
        olds = [noise(shape, old) for shape in SHAPES]
        news = [FORMS[form](noise(shape, new, seed=1)) for shape in SHAPES]
        assert_like_the_reference(olds, news, weight)


@pytest.mark.parametrize("form", ["channels last", "transposed", "strided"])
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_averages_of_any_strides_keep_them(
    dtypes: Any, alike: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STAGE", 7)
    for weight in WEIGHTS:
        olds = [FORMS[form](noise(shape, dtypes[0])) for shape in SHAPES if 0 not in shape]
        news = [noise(shape, dtypes[1], seed=1) for shape in SHAPES if 0 not in shape]
        if alike:
            news = [FORMS[form](new) for new in news]
        strides = [old.stride() for old in olds]
        assert_like_the_reference(olds, news, weight)
        assert [old.stride() for old in olds] == strides


def test_init_and_pure_updates_keep_memory_formats() -> None:
    leaf = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = functavg.SWA().init(leaf)
    for _ in range(3):
        assert state.average.is_contiguous(memory_format=torch.channels_last)
        state = functavg.SWA().update(leaf, state)


def test_a_mixed_list_is_grouped_by_dtype_and_keeps_its_order() -> None:
    olds = [noise((index + 1,), old) for index, (old, _) in enumerate(PAIRS)]
    news = [noise((index + 1,), new, seed=1) for index, (_, new) in enumerate(PAIRS)]
    for weight in WEIGHTS:
        for inplace in (False, True):
            result = functavg.lerp([old.clone() for old in olds], news, weight, inplace=inplace)
            for leaf, old, new in zip(result, olds, news, strict=True):
                assert identical(leaf, functavg.lerp([old], [new], weight)[0])


@pytest.mark.parametrize("shape", [(100,), (10, 10), (3, 5, 7), (1, 100), (100, 1), (2, 2, 2, 2, 7)])
@pytest.mark.parametrize("order", ["same", "other", "strided"])
def test_a_leaf_larger_than_the_stage_is_taken_in_pieces_no_larger(
    shape: tuple[int, ...], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STAGE", 8)
    size = torch.Size(shape).numel()
    whole = torch.arange(float(size)).view(shape)
    other = {
        "same": whole.clone(),
        "other": whole.permute(*reversed(range(len(shape)))).contiguous().permute(*reversed(range(len(shape)))),
        "strided": torch.stack([whole, whole], -1)[..., 0],
    }[order]
    seen = []
    for pieces in staging._divide((whole, other)):
        assert torch.equal(*pieces)
        assert pieces[0].numel() <= 8
        assert pieces[0].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        seen += pieces[0].flatten().tolist()
    assert sorted(seen) == list(range(size))


def test_batches_fill_the_stage_and_never_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGE", 8)
    leaves = [torch.zeros(size) for size in (3, 3, 3, 0, 20, 1)]
    sizes = [sum(map(torch.numel, some)) for (some,) in staging.batch([leaves])]
    assert max(sizes) <= 8
    assert sum(sizes) == 30
    assert [some for (some,) in staging.batch([[]])] in ([], [[]])


@pytest.mark.parametrize("weight", [0.0, 1e-4, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64], ids=str)
def test_a_weight_on_the_device_selects_what_a_host_weight_branches_on(dtype: torch.dtype, weight: float) -> None:
    old, new = noise((50,), dtype), noise((50,), dtype, seed=1)
    wanted = functavg.lerp(old, new, weight)
    for scalar in (torch.tensor(weight), torch.tensor(weight, dtype=torch.float64)):
        for inplace in (False, True):
            result = functavg.lerp(old.clone(), new, scalar, inplace=inplace)
            assert result.dtype == dtype
            torch.testing.assert_close(result, wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
            if weight in (0, 1):
                assert identical(result, wanted)


class Traced(torch.Tensor):
    """A user's subclass, which the grouped kernels are not trusted with."""


@pytest.mark.parametrize("inplace", [False, True])
def test_subclasses_go_leaf_by_leaf_and_stay_what_they_are(inplace: bool) -> None:
    rule = functavg.SWA()
    leaf = torch.ones(3).as_subclass(Traced)
    state = rule.init([leaf, torch.ones(3)])
    for value in (1.0, 2.0, 6.0):
        state = rule.update([leaf * value, torch.full((3,), value)], state, inplace=inplace)
    assert type(state.average[0]) is Traced
    assert type(state.average[1]) is torch.Tensor
    assert state.average[0].tolist() == state.average[1].tolist() == [3.0] * 3


def test_a_step_is_few_calls_whatever_the_number_of_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One grouped call per (dtype, device, weight)."""
    calls = []
    original = torch._foreach_lerp_
    monkeypatch.setattr(torch, "_foreach_lerp_", lambda *args: (calls.append(len(args[0])), original(*args))[1])
    olds = [torch.zeros(2) for _ in range(50)] + [torch.zeros(2, dtype=torch.float64) for _ in range(50)]
    functavg.lerp(olds, [old + 1 for old in olds], 0.5, inplace=True)
    assert calls == [50, 50]


@pytest.mark.parametrize("old", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("new", [torch.float32, torch.bfloat16], ids=str)
def test_params_on_another_device_are_brought_to_the_average(old: torch.dtype, new: torch.dtype) -> None:
    """The average lives where ``init`` put it; meta is the other device that every machine has."""
    average = {"w": torch.zeros(3, dtype=old, device="meta"), "b": torch.zeros(3, dtype=old)}
    params = {"w": torch.ones(3, dtype=new), "b": torch.ones(3, dtype=new)}
    for weight in (0.5, 1.0, torch.tensor(0.5)):
        for inplace in (False, True):
            result = functavg.lerp({k: v.clone() for k, v in average.items()}, params, weight, inplace=inplace)
            assert {k: v.device.type for k, v in result.items()} == {"w": "meta", "b": "cpu"}
            assert {v.dtype for v in result.values()} == {old}
    state = functavg.EMA().init(params, device="meta")
    assert {leaf.device.type for leaf in state.average.values()} == {"meta"}
    state = functavg.EMA().update(params, state)
    assert {leaf.device.type for leaf in state.average.values()} == {"meta"}


# ---- rounding


@pytest.mark.parametrize("stage", [None, 7], ids=["one batch", "pieces"])
@pytest.mark.parametrize("news", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_tensors_that_take_the_rounding_hold_that_of_the_result(
    narrow: torch.dtype, news: torch.dtype, stage: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stage is not None:
        monkeypatch.setattr(staging, "STAGE", stage)
    for weight in (*WEIGHTS[1:], torch.tensor(0.5)):
        olds = [noise(shape, torch.float32) for shape in SHAPES]
        new = [noise(shape, news, 1) for shape in SHAPES]
        wanted = functavg.lerp(olds, new, weight)
        roundings = [torch.zeros(shape, dtype=narrow) for shape in SHAPES]
        result = run(Lerp(olds, new, weight, roundings), inplace=True)
        assert all(map(identical, result, wanted))
        assert all(map(identical, roundings, [leaf.to(narrow) for leaf in wanted]))


def test_a_step_of_weight_0_rounds_nothing() -> None:
    rounding = torch.zeros(2, dtype=torch.bfloat16)
    run(Lerp([torch.ones(2)], [torch.ones(2)], 0.0, [rounding]), inplace=True)
    assert rounding.tolist() == [0, 0]


def test_a_tied_tensor_is_rounded_once_and_what_does_not_fit_is_named() -> None:
    old, rounding = torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)
    new = torch.ones(2, dtype=torch.bfloat16)
    run(Lerp([old, old], [new, new], 0.5, [rounding, rounding]), inplace=True)
    assert old.tolist() == rounding.tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match=r"^tree\[0\]: expected shape \(3,\), got \(2,\)"):
        run(Lerp([old], [new], 0.5, [torch.zeros(3, dtype=torch.bfloat16)]), inplace=True)
    with pytest.raises(ValueError, match=r"tree\[0\] and tree\[1\] share one array in the average"):
        run(Lerp([old, old], [new, new], 0.5, [rounding, rounding.clone()]), inplace=True)
    assert old.tolist() == rounding.tolist() == [0.5, 0.5]
