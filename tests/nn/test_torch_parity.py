"""functavg.swa_utils is torch.optim.swa_utils: the same names, and every documented example runs as printed."""

from __future__ import annotations

import inspect
import pickle
import re
import textwrap
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils as torch_swa_utils

import functavg
from functavg import EMA, SWA, AveragedModel, swa_utils
from tests.nn.helpers import Net, bits, fill, randomise, scalar


@pytest.mark.parametrize("name", torch_swa_utils.__all__)
def test_every_public_name_is_there(name):
    ours, theirs = getattr(swa_utils, name), getattr(torch_swa_utils, name)
    assert name in swa_utils.__all__
    assert inspect.isclass(ours) == inspect.isclass(theirs)
    if inspect.isclass(theirs):
        assert issubclass(ours, theirs)


def test_no_name_is_there_that_torch_does_not_have():
    assert sorted(swa_utils.__all__) == sorted(torch_swa_utils.__all__)


@pytest.mark.parametrize("name", torch_swa_utils.__all__)
def test_torchs_arguments_are_taken_in_torchs_order(name):
    ours, theirs = (
        list(inspect.signature(getattr(module, name)).parameters) for module in (swa_utils, torch_swa_utils)
    )
    assert ours[: len(theirs)] == theirs
    extra = list(inspect.signature(getattr(swa_utils, name)).parameters.values())[len(theirs) :]
    assert all(parameter.kind == inspect.Parameter.KEYWORD_ONLY for parameter in extra)


def test_an_average_is_one_of_torch():
    averaged = AveragedModel(scalar())
    assert isinstance(averaged, torch_swa_utils.AveragedModel)
    assert isinstance(averaged, nn.Module)
    assert functavg.swa_utils.AveragedModel is AveragedModel
    assert inspect.signature(AveragedModel.forward) == inspect.signature(torch_swa_utils.AveragedModel.forward)


# ---- the examples of the documentation


def examples(text: str) -> list[str]:
    """Return the examples of a docstring as it prints them: their lines behind >>>, without what is left open."""
    blocks = re.split(r"(?m)^\s*(?!\s*>>>).*$", inspect.cleandoc(text))
    codes = ["\n".join(re.findall(r"(?m)^\s*>>> ?(.*)$", block)) for block in blocks]
    codes = [
        re.sub(r"(?m)^.* = \.\.\.$", "", code).replace("torch.optim.swa_utils", "functavg.swa_utils") for code in codes
    ]
    return [textwrap.dedent(code) for code in codes if code.strip()]


def surroundings() -> dict[str, Any]:
    """Return small values for the names that the examples leave open."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    return {
        "torch": torch,
        "functavg": functavg,
        "SWALR": swa_utils.SWALR,
        "AveragedModel": swa_utils.AveragedModel,
        "get_ema_multi_avg_fn": swa_utils.get_ema_multi_avg_fn,
        "update_bn": swa_utils.update_bn,
        "model": model,
        "loss_fn": nn.functional.mse_loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(2)],
        "test_input": torch.randn(4, 2),
        "decay": 0.999,
    }


DOCSTRINGS = [
    pytest.param(code, id=f"{name} {index}")
    for name in torch_swa_utils.__all__
    for index, code in enumerate(examples(getattr(torch_swa_utils, name).__doc__))
]


def test_the_docstrings_of_torch_have_examples():
    assert len(DOCSTRINGS) >= 4


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")
@pytest.mark.parametrize("code", DOCSTRINGS)
def test_the_examples_in_torchs_docstrings_run_as_printed(code):
    assert "..." not in code
    names = surroundings()
    exec(code.replace("range(300)", "range(170)"), names)  # they start at 160
    for name in ("swa_model", "ema_model"):
        if name in names:
            assert isinstance(names[name], AveragedModel)
    if "swa_model" in names:
        assert names["swa_model"].n_averaged.item() == 170 - 161
        assert names["swa_model"](names["test_input"]).shape == (4, 1)


# From the page "torch.optim", section "Weight Averaging (SWA and EMA)", without its module's prefix.
PAGE = {
    "SWA": "averaged_model = AveragedModel(model)",
    "EMA": "averaged_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))",
    "a function of tensors": """
ema_avg = lambda averaged_model_parameter, model_parameter, num_averaged:\\
            0.9 * averaged_model_parameter + 0.1 * model_parameter
averaged_model = torch.optim.swa_utils.AveragedModel(model, avg_fn=ema_avg)
""",
    "a function of lists": """
def ema_update(ema_param_list, current_param_list, _):
    torch._foreach_lerp_(ema_param_list, current_param_list, 1 - decay)
averaged_model = AveragedModel(model, multi_avg_fn=ema_update)
""",
    "buffers": """
averaged_model = torch.optim.swa_utils.AveragedModel(model,
        torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
""",
    "update_bn": """
averaged_model = AveragedModel(model)
torch.optim.swa_utils.update_bn(loader, averaged_model)
""",
    "schedule": """
averaged_model = AveragedModel(model)
swa_scheduler = torch.optim.swa_utils.SWALR(optimizer, \\
        anneal_strategy="linear", anneal_epochs=5, swa_lr=0.05)
""",
    "all of SWA": """
averaged_model = torch.optim.swa_utils.AveragedModel(model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
swa_start = 3
swa_scheduler = SWALR(optimizer, swa_lr=0.05)
for epoch in range(6):
      for input, target in loader:
          optimizer.zero_grad()
          loss_fn(model(input), target).backward()
          optimizer.step()
      if epoch > swa_start:
          averaged_model.update_parameters(model)
          swa_scheduler.step()
      else:
          scheduler.step()

# Update bn statistics for the swa_model at the end
torch.optim.swa_utils.update_bn(loader, averaged_model)
# Use swa_model to make predictions on test data
preds = averaged_model(test_input)
""",
    "all of EMA": """
averaged_model = torch.optim.swa_utils.AveragedModel(model, \\
            multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
for epoch in range(3):
      for input, target in loader:
          optimizer.zero_grad()
          loss_fn(model(input), target).backward()
          optimizer.step()
          averaged_model.update_parameters(model)

torch.optim.swa_utils.update_bn(loader, averaged_model)
preds = averaged_model(test_input)
""",
}


@pytest.mark.parametrize("example", PAGE)
def test_the_examples_on_torchs_page_run_as_printed(example):
    names = surroundings()
    exec(PAGE[example].replace("torch.optim.swa_utils", "functavg.swa_utils"), names)
    averaged = names["averaged_model"]
    assert isinstance(averaged, AveragedModel)
    averaged.update_parameters(names["model"])
    averaged.update_parameters(names["model"])
    for mine, theirs in zip(averaged.module.parameters(), names["model"].parameters(), strict=True):
        assert torch.isfinite(mine).all()
        assert mine.shape == theirs.shape


def test_a_multi_avg_fn_in_the_place_of_the_device_is_taken_for_one():
    """The documented example is an EMA of decay 0.9, buffers included."""
    model = Net()
    averaged = swa_utils.AveragedModel(model, swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    assert averaged.rule == EMA(0.9)
    for value in (0.0, 1.0):
        fill(model, value)
        model.norm.running_mean.fill_(value)
        averaged.update_parameters(model)
    torch.testing.assert_close(averaged.module.scale.detach(), torch.tensor(0.1))
    torch.testing.assert_close(averaged.module.norm.running_mean, torch.full((3,), 0.1))


# ---- the same numbers


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name", ["get_ema_multi_avg_fn", "get_ema_avg_fn", "get_swa_avg_fn", "get_swa_multi_avg_fn", None]
)
def test_averages_are_those_of_torch(name, dtype, use_buffers):
    """Those of the multi-tensor EMA to the last bit. Integer buffers differ on purpose: torch truncates their mean."""
    if use_buffers and name in ("get_swa_multi_avg_fn", None):
        pytest.skip("torch fails on integer buffers")
    model = Net().to(dtype)
    averages = []
    for module in (swa_utils, torch_swa_utils):
        kind = {} if name is None else {name[8:]: getattr(module, name)()}
        averages.append(module.AveragedModel(model, use_buffers=use_buffers, **kind))
    for seed in range(5):
        randomise(model, seed)
        for averaged in averages:
            averaged.update_parameters(model)
        ours, theirs = averages
        for key, value in theirs.state_dict().items():
            mine = ours.state_dict()[key]
            if not value.is_floating_point():
                assert key == "n_averaged" or use_buffers or torch.equal(mine, value)
            elif name == "get_ema_multi_avg_fn":
                assert bits(mine) == bits(value), key
            else:
                torch.testing.assert_close(mine, value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["get_ema_multi_avg_fn", "get_ema_avg_fn", "get_swa_avg_fn", "get_swa_multi_avg_fn"])
@pytest.mark.parametrize("count", [0, 1, 7, torch.tensor(0), torch.tensor(1)], ids=repr)
def test_the_functions_do_what_torchs_do(name, count):
    """Also where nothing was averaged yet, which an AveragedModel never asks them."""
    generator = torch.Generator().manual_seed(0)
    average, new = (torch.randn(5, generator=generator) for _ in range(2))
    results = []
    for module in (swa_utils, torch_swa_utils):
        mine, function = average.clone(), getattr(module, name)()
        if "multi" in name:
            assert function([mine], [new], count) is None
        else:
            mine = function(mine, new, count)
        results.append(mine)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_the_ema_functions_never_look_at_the_count():
    for module in (swa_utils, torch_swa_utils):
        assert module.get_ema_avg_fn(0.75)(torch.zeros(2), torch.ones(2), None).tolist() == [0.25, 0.25]


@pytest.mark.parametrize("name", ["get_ema_multi_avg_fn", "get_ema_avg_fn", "get_swa_avg_fn", "get_swa_multi_avg_fn"])
def test_the_functions_are_values_that_pickle(name):
    function = getattr(swa_utils, name)()
    assert pickle.loads(pickle.dumps(function)) == function == getattr(swa_utils, name)()


def test_the_functions_stand_for_rules():
    assert functavg.get_ema_avg_fn().rule == functavg.get_ema_multi_avg_fn().rule == EMA(0.999)
    assert functavg.get_swa_avg_fn().rule == functavg.get_swa_multi_avg_fn().rule == SWA()
    assert AveragedModel(scalar()).rule == SWA()
    assert AveragedModel(scalar(), avg_fn=functavg.get_ema_avg_fn(0.5)).rule == EMA(0.5)
    rule = functavg.AvgFn(max)
    assert AveragedModel(scalar(), avg_fn=max).rule == rule
    assert AveragedModel(scalar(), multi_avg_fn=max).rule == functavg.AvgFn(max, grouped=True)
