"""The recipe for PEFT: average the parameters that are trained, beside a base that is left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from functavg import EMA, AveragedModel, cast_like, swapped
from functavg.checkpoints import load_state, save_state
from tests import oracle
from tests.integrations import digits

peft = pytest.importorskip("peft")

X, Y, TEST_X, TEST_Y = digits.load()


def make_model(dtype=torch.float32):
    """Return a net with adapters on its first layer, and a head that is trained whole."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(dtype)
    config = peft.LoraConfig(target_modules=["0"], modules_to_save=["2"], r=4, init_lora_weights=True)
    return peft.get_peft_model(base, config)


def trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def train(model, state, rule, batches, iterates=None):
    optimizer = torch.optim.SGD(trained(model).values(), lr=0.1)
    for index in batches:
        x, y = (part[index * 64 : index * 64 + 64] for part in (X.flatten(1), Y))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        state = rule.update(trained(model), state, inplace=True)
        if iterates is not None:
            iterates.append(digits.snapshot(model))
    return state


def logits(model):
    with torch.no_grad():
        return model.eval()(TEST_X.flatten(1))


def test_the_adapters_are_averaged_saved_and_resumed(tmp_path):
    rule, iterates, model = EMA(0.8), [], make_model()
    base = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    state = train(model, rule.init(trained(model)), rule, range(8), iterates)
    digits.assert_close(state.average, digits.weighted(oracle.ema(0.8), iterates))
    assert not state.average.keys() & base.keys()

    killed = make_model()
    save_state(tmp_path / "state.safetensors", train(killed, rule.init(trained(killed)), rule, range(4)), rule)
    resumed = load_state(tmp_path / "state.safetensors", trained(killed))
    resumed = train(killed, resumed, rule, range(4, 8))
    digits.assert_same(resumed.average, state.average)

    with swapped(model, state):
        expected = logits(model)
        model.save_pretrained(tmp_path / "adapters")
    digits.assert_same(digits.snapshot(model), iterates[-1])
    digits.assert_same({name: p for name, p in model.named_parameters() if not p.requires_grad}, base)
    assert not torch.equal(logits(model), expected)
    loaded = peft.PeftModel.from_pretrained(make_model().unload(), tmp_path / "adapters")
    torch.testing.assert_close(logits(loaded), expected)


def test_an_average_in_the_model_for_good_is_merged_into_the_base():
    rule, model = EMA(0.8), make_model()
    state = train(model, rule.init(trained(model)), rule, range(8))
    with swapped(model, state):
        expected = logits(model)
    model.load_state_dict(cast_like(state.average, trained(model)), strict=False)
    torch.testing.assert_close(logits(model.merge_and_unload()), expected)


def test_adapters_of_low_precision_are_averaged_in_float32():
    rule, model = EMA(0.99), make_model(torch.bfloat16)
    for parameter in trained(model).values():
        parameter.data = parameter.data.bfloat16()
    state = rule.init(trained(model))
    assert {tensor.dtype for tensor in state.average.values()} == {torch.float32}


def test_an_averaged_model_that_shares_the_base_gives_the_same_average():
    rule, model = EMA(0.8), make_model()
    averaged = AveragedModel(model, rule=rule, share=lambda name, tensor: not tensor.requires_grad)
    functional = rule.init(trained(model))
    optimizer = torch.optim.SGD(trained(model).values(), lr=0.1)
    averaged.attach(optimizer, model)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X.flatten(1)), Y).backward()
        optimizer.step()
        functional = rule.update(trained(model), functional, inplace=True)
    digits.assert_same(digits.snapshot(averaged.module), functional.average)
    base = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert base
    assert all(averaged.module.get_parameter(name) is model.get_parameter(name) for name in base)
    with swapped(copy.deepcopy(model), averaged) as model:
        torch.testing.assert_close(logits(model), logits(averaged.module))
