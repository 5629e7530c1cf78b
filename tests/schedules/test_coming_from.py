"""The expressions of docs/howto/coming-from.md against the other libraries' formulas, and against the libraries.

The expressions are read from the page, so they cannot drift from it. The formulas are written out as plain loops over
calls of the library's update method, numbered as that library numbers them, and share no code with functavg.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "coming-from.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
EXPRESSIONS: dict[str, Any] = {}
SOURCES: dict[str, str] = {}
for _block in BLOCKS:
    exec(_block, EXPRESSIONS)
    for _source in re.split(r"^(?=def )", _block, flags=re.MULTILINE):
        if _source.startswith("def "):
            SOURCES[_source[4 : _source.index("(")]] = _source

CALLS = 60


def values_of(calls: int = CALLS, size: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """What the average is constructed from, and the model at each call."""
    rng = np.random.default_rng(1)
    return 10 + rng.normal(size=size), rng.normal(size=(calls, size)).cumsum(axis=0)


def averages_of(name: str, initial: np.ndarray, models: np.ndarray, *, steps: int = 1, **arguments: Any) -> np.ndarray:
    """The average after each call by the page's expression, its first call as the page's comment says."""
    rule = EXPRESSIONS[name](**arguments)
    comment = re.search(r"# First call: steps=(\w+)", SOURCES[name])
    first = steps
    if comment:
        bound = inspect.signature(EXPRESSIONS[name]).bind(**arguments)
        bound.apply_defaults()
        first = int(bound.arguments.get(comment[1], 0) or comment[1])
    state = rule.init(initial)
    averages = []
    for index, model in enumerate(models):
        state = rule.update(model, state, steps=steps if index else first)
        averages.append(state.average)
    return np.array(averages)


def loop(initial, models, decay_at):
    """``a = d a + (1 - d) x`` with ``decay_at(u)`` of calls u = 1, 2, ...; None leaves the average alone."""
    average, averages = initial, []
    for u, model in enumerate(models, start=1):
        decay = decay_at(u)
        if decay is not None:
            average = decay * average + (1 - decay) * model
        averages.append(average)
    return np.array(averages)


# ------------------------------------------------------------------------------------------ the formulas


def torch_ema(initial, models, decay, use_num_updates=True):
    return loop(initial, models, lambda u: min(decay, (1 + u) / (10 + u)) if use_num_updates else decay)


def ema_pytorch(
    initial, models, beta=0.9999, update_after_step=100, update_every=10, inv_gamma=1.0, power=2 / 3, min_value=0.0
):
    def decay_at(u):
        s = u - 1
        if s == 0:
            return 0
        if s % update_every != 0:
            return None
        if s <= update_after_step:
            return 0
        return min(beta, max(min_value, 1 - (1 + (s - update_after_step) / inv_gamma) ** -power))

    return loop(initial, models, decay_at)


def karras_ema(initial, models, gamma):
    return loop(initial, models, lambda u: 0 if u == 1 else (1 - 1 / (u + 1)) ** (1 + gamma))


def timm_v3(
    initial, models, decay=0.9999, min_decay=0.0, update_after_step=0, use_warmup=False, warmup_gamma=1.0,
    warmup_power=2 / 3
):  # fmt: skip
    def decay_at(step):
        k = max(0, step - update_after_step - 1)
        if k <= 0:
            return 0
        if not use_warmup:
            return decay
        return max(min(1 - (1 + k / warmup_gamma) ** -warmup_power, decay), min_decay)

    return loop(initial, models, decay_at)


def constant(initial, models, decay):
    return loop(initial, models, lambda u: decay)


def diffusers(
    initial, models, decay=0.9999, min_decay=0.0, update_after_step=0, use_ema_warmup=False, inv_gamma=1.0,
    power=2 / 3
):  # fmt: skip
    def decay_at(u):
        k = max(0, u - update_after_step - 1)
        if k <= 0:
            return 0
        value = 1 - (1 + k / inv_gamma) ** -power if use_ema_warmup else (1 + k) / (10 + k)
        return max(min(value, decay), min_decay)

    return loop(initial, models, decay_at)


def lightning_ema(initial, models, decay=0.999, update_every_n_steps=1, update_starting_at_step=None):
    n_averaged = 0

    def decay_at(global_step):
        nonlocal n_averaged
        step_idx = global_step - 1
        if step_idx % update_every_n_steps != 0 or step_idx < (update_starting_at_step or 0):
            return None
        n_averaged += 1
        return 0 if n_averaged == 1 else decay

    return loop(initial, models, decay_at)


def lightning_swa(initial, models, swa_epoch_start):
    n_averaged = 0

    def decay_at(u):
        nonlocal n_averaged
        if u - 1 < max(swa_epoch_start - 1, 0):
            return None
        n_averaged += 1
        return 1 - 1 / n_averaged

    return loop(initial, models, decay_at)


def composer(initial, models, half_life=1000, update_interval=1, ema_start=0):
    smoothing, started = 2 ** -(update_interval / half_life), False

    def decay_at(batch):
        nonlocal started
        if batch % update_interval != 0 or batch < ema_start:
            return None
        was_started, started = started, True
        return smoothing if was_started else 0

    return loop(initial, models, decay_at)


def nemo(initial, models, decay, every_n_steps=1):
    return loop(initial, models, lambda u: decay if (u - 1) % every_n_steps == 0 else None)


def keras(initial, models, ema_momentum=0.99):
    return loop(initial, models, lambda u: ema_momentum if u - 1 != 0 else 0)


def tensorflow(initial, models, decay, with_num_updates=False):
    return loop(initial, models, lambda n: min(decay, (1 + n) / (10 + n)) if with_num_updates else decay)


def zero_debias(initial, models, decay):
    averages, biased = [], np.zeros_like(initial)
    for count, model in enumerate(models, start=1):
        biased = decay * biased + (1 - decay) * model
        averages.append(biased / (1 - decay**count))
    return np.array(averages)


def optax_incremental_update(initial, models, step_size):
    return loop(initial, models, lambda u: 1 - step_size)


def optax_periodic_update(initial, models, update_period):
    return loop(initial, models, lambda u: 0 if (u - 1) % update_period == 0 else None)


def k_diffusion(initial, models, inv_gamma=1.0, power=1.0, min_value=0.0, max_value=1.0, start_at=0):
    def decay_at(u):
        epoch = max(0, (u - 1) - start_at)
        return min(max_value, max(min_value, 1 - (1 + epoch / inv_gamma) ** -power))

    return loop(initial, models, decay_at)


def edm2_power(initial, models, std=0.05, *, steps):
    gamma = max(np.roots([1, 7, 16 - std**-2, 12 - std**-2]).real)
    return loop(initial, models, lambda u: (1 - steps / (u * steps)) ** (gamma + 1))


def edm2_traditional(initial, models, halflife_Mimg, rampup_ratio=0.09, *, steps):
    def decay_at(u):
        half_life = min(halflife_Mimg * 1e6, rampup_ratio * u * steps)
        return 0.5 ** (steps / max(half_life, 1e-8))

    return loop(initial, models, decay_at)


def ultralytics(initial, models, decay=0.9999, tau=2000):
    return loop(initial, models, lambda u: decay * (1 - math.exp(-u / tau)))


def mmengine(initial, models, momentum_at, interval):
    average, averages = initial, []
    for steps, model in enumerate(models):
        if steps == 0:
            average = model
        elif steps % interval == 0:
            momentum = momentum_at(steps)
            average = (1 - momentum) * average + momentum * model
        averages.append(average)
    return np.array(averages)


def mmengine_ema(initial, models, momentum=0.0002, interval=1):
    return mmengine(initial, models, lambda steps: momentum, interval)


def mmengine_annealing(initial, models, momentum=0.0002, gamma=100, interval=1):
    return mmengine(initial, models, lambda steps: max(momentum, gamma / (gamma + steps)), interval)


def mmengine_swa(initial, models, interval=1):
    return mmengine(initial, models, lambda steps: 1 / (steps // interval + 1), interval)


def d2go(initial, models, decay, decay_warm_up_factor=-1):
    w = decay_warm_up_factor
    return loop(initial, models, lambda n: decay if w == -1 else min(decay, (1 + n) / (w + n)))


# Each expression of the page: its formula, and arguments (with `steps`: of every call).
CASES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "torch_ema": (torch_ema, [{"decay": 0.999}, {"decay": 0.5}, {"decay": 0.9, "use_num_updates": False}]),
    "ema_pytorch": (
        ema_pytorch,
        [
            {},
            {"update_after_step": 0, "update_every": 1},
            {"update_after_step": 5, "update_every": 1, "beta": 0.6},
            {"update_after_step": 0, "power": 1.0},
            {"update_after_step": 7, "update_every": 3, "inv_gamma": 5.0, "power": 0.75},
            {"update_after_step": 20, "update_every": 4, "min_value": 0.7},
        ],
    ),
    "karras_ema": (karras_ema, [{"gamma": 6.94}, {"gamma": 0.0}]),
    "timm_v3": (
        timm_v3,
        [
            {},
            {"use_warmup": True, "update_after_step": 10},
            {"use_warmup": True, "decay": 0.8, "min_decay": 0.6, "warmup_gamma": 4.0, "warmup_power": 0.75},
        ],
    ),
    "timm_v3_without_step": (constant, [{"decay": 0.9}]),
    "diffusers": (
        diffusers,
        [
            {},
            {"use_ema_warmup": True},
            {"decay": 0.7, "min_decay": 0.3, "update_after_step": 10},
            {"use_ema_warmup": True, "decay": 0.9, "min_decay": 0.6, "inv_gamma": 5.0, "power": 0.75},
        ],
    ),
    "lightning_ema": (
        lightning_ema,
        [
            {},
            {"decay": 0.9, "update_every_n_steps": 4},
            {"decay": 0.9, "update_starting_at_step": 10},
            {"decay": 0.9, "update_every_n_steps": 4, "update_starting_at_step": 2},
            {"decay": 0.9, "update_every_n_steps": 4, "update_starting_at_step": 8},
            {"decay": 0.9, "update_every_n_steps": 4, "update_starting_at_step": 9},
        ],
    ),
    "lightning_swa": (lightning_swa, [{"swa_epoch_start": start} for start in (0, 1, 2, 10)]),
    "composer": (
        composer,
        [
            {},
            {"half_life": 20, "update_interval": 5},
            {"half_life": 20, "update_interval": 5, "ema_start": 12},
            {"half_life": 20, "ema_start": 15},
            {"half_life": 20, "update_interval": 5, "ema_start": 15},
        ],
    ),
    "nemo": (nemo, [{"decay": 0.9}, {"decay": 0.9, "every_n_steps": 4}]),
    "keras": (keras, [{}, {"ema_momentum": 0.9}]),
    "tensorflow": (tensorflow, [{"decay": 0.9}, {"decay": 0.9, "with_num_updates": True}]),
    "tensorflow_zero_debias": (zero_debias, [{"decay": 0.9}]),
    "optax_ema": (zero_debias, [{"decay": 0.9}, {"decay": 0.999}]),
    "optax_incremental_update": (optax_incremental_update, [{"step_size": 0.1}]),
    "optax_periodic_update": (optax_periodic_update, [{"update_period": 7}, {"update_period": 1}]),
    "k_diffusion": (
        k_diffusion,
        [
            {},
            {"inv_gamma": 5.0, "power": 0.75, "max_value": 0.8},
            {"power": 2 / 3, "min_value": 0.4, "max_value": 0.9999, "start_at": 10},
        ],
    ),
    "edm2_power": (edm2_power, [{"steps": 2048}, {"std": 0.1, "steps": 32}]),
    "edm2_traditional": (
        edm2_traditional,
        [{"halflife_Mimg": 500, "steps": 2048}, {"halflife_Mimg": 0.001, "rampup_ratio": 0.05, "steps": 512}],
    ),
    "ultralytics": (ultralytics, [{}, {"decay": 0.9, "tau": 20}]),
    "mmengine_ema": (mmengine_ema, [{}, {"momentum": 0.1, "interval": 2}]),
    "mmengine_annealing": (mmengine_annealing, [{}, {"momentum": 0.4, "gamma": 10, "interval": 3}]),
    "mmengine_swa": (mmengine_swa, [{}, {"interval": 5}]),
    "d2go": (d2go, [{"decay": 0.9}, {"decay": 0.9, "decay_warm_up_factor": 25}]),
}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [(name, arguments) for name, (_, rows) in CASES.items() for arguments in rows],
    ids=lambda part: part if isinstance(part, str) else ",".join(f"{key}={value}" for key, value in part.items()),
)
def test_an_expression_gives_the_numbers_of_the_formula(name: str, arguments: dict[str, Any]) -> None:
    initial, models = values_of(240 if name == "ema_pytorch" else CALLS)
    expected = CASES[name][0](initial, models, **arguments)
    np.testing.assert_allclose(averages_of(name, initial, models, **arguments), expected, rtol=1e-11, atol=1e-11)


def test_each_expression_of_the_page_is_tested() -> None:
    assert SOURCES.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_defaults_are_those_of_the_formula(name: str) -> None:
    ours = inspect.signature(EXPRESSIONS[name]).parameters
    theirs = inspect.signature(CASES[name][0]).parameters
    for parameter in ours.values():
        if name != "timm_v3_without_step":
            assert parameter.default == theirs[parameter.name].default


@pytest.mark.parametrize("name", CASES)
def test_each_rule_of_the_page_prints_as_its_call_and_pickles(name: str) -> None:
    import pickle

    import functavg
    from functavg import schedules

    arguments = {key: value for key, value in CASES[name][1][-1].items() if key != "steps"}
    rule = EXPRESSIONS[name](**arguments)
    assert eval(repr(rule), {**vars(functavg), **vars(schedules)}) == rule
    assert pickle.loads(pickle.dumps(rule)) == rule


# --------------------------------------------------------------------------------- numbers that were measured


def test_the_averages_measured_with_keras() -> None:
    averages = averages_of("keras", np.array(10.0), np.array([9.0, 8.0, 7.0, 6.0]), ema_momentum=0.9)
    assert averages.tolist() == pytest.approx([9, 8.9, 8.71, 8.439], rel=1e-14)


def test_the_averages_measured_with_optax() -> None:
    averages = averages_of("optax_ema", np.array(0.0), np.array([1.0, 2.0, 3.0]), decay=0.9)
    assert averages.tolist() == pytest.approx([1, 1.52632, 2.07011], abs=5e-6)


def test_the_first_decay_of_ema_pytorch_is_ten_steps_into_its_ramp() -> None:
    """Until then the average is a copy, so with 0 before and 1 from then on it is one minus that decay."""
    models = np.array([0.0] * 110 + [1.0])
    assert averages_of("ema_pytorch", np.array(5.0), models)[-1] == pytest.approx(1 - 0.798, abs=5e-4)


def test_ema_pytorch_with_power_1_is_the_mean_of_all_iterates() -> None:
    initial, models = values_of()
    averages = averages_of("ema_pytorch", initial, models, beta=1.0, update_after_step=0, update_every=1, power=1.0)
    np.testing.assert_allclose(averages[-1], models.mean(axis=0), rtol=1e-12)


def test_mmengine_with_interval_2_averages_calls_0_2_4() -> None:
    averages = averages_of("mmengine_swa", np.array(9.0), np.arange(6.0), interval=2)
    np.testing.assert_allclose(averages, [0, 0, 1, 1, 2, 2])


def test_the_profile_of_edm2_is_a_difference_of_powers() -> None:
    """The final average of unit impulses is the profile."""
    total = 100
    profile = averages_of("edm2_power", np.zeros(total), np.eye(total), std=0.1)[-1]
    gamma = max(np.roots([1, 7, 16 - 0.1**-2, 12 - 0.1**-2]).real)
    edges = (np.arange(total + 1) / total) ** (gamma + 1)
    np.testing.assert_allclose(profile, np.diff(edges), rtol=1e-10, atol=1e-16)


# --------------------------------------------------------------------------------- the libraries themselves


def module_of(values: np.ndarray) -> Any:
    """A torch module with one float64 parameter."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.tensor(values))
    return module


def updated(module: Any, models: np.ndarray, update: Any, average: Any) -> np.ndarray:
    """The average after each call of a library's update."""
    import torch

    averages = []
    for model in models:
        with torch.no_grad():
            module.weight.copy_(torch.tensor(model))
        update()
        averages.append(average().detach().clone().numpy())
    return np.array(averages)


@pytest.mark.parametrize("arguments", CASES["torch_ema"][1])
def test_torch_ema(arguments: dict[str, Any]) -> None:
    library = pytest.importorskip("torch_ema")
    initial, models = values_of()
    module = module_of(initial)
    ema = library.ExponentialMovingAverage(module.parameters(), **arguments)
    theirs = updated(module, models, ema.update, lambda: ema.shadow_params[0])
    np.testing.assert_allclose(averages_of("torch_ema", initial, models, **arguments), theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("arguments", CASES["ema_pytorch"][1])
def test_ema_pytorch(arguments: dict[str, Any]) -> None:
    """It computes its decays in float32."""
    library = pytest.importorskip("ema_pytorch")
    initial, models = values_of(240)
    module = module_of(initial)
    ema = library.EMA(module, **arguments)
    theirs = updated(module, models, ema.update, lambda: ema.ema_model.weight)
    np.testing.assert_allclose(averages_of("ema_pytorch", initial, models, **arguments), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arguments", CASES["karras_ema"][1])
def test_karras_ema(arguments: dict[str, Any]) -> None:
    library = pytest.importorskip("ema_pytorch.post_hoc_ema")
    initial, models = values_of()
    module = module_of(initial)
    ema = library.KarrasEMA(module, update_every=1, **arguments)
    theirs = updated(module, models, ema.update, lambda: ema.ema_model.weight)
    np.testing.assert_allclose(averages_of("karras_ema", initial, models, **arguments), theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("with_step", [True, False])
def test_timm(with_step: bool) -> None:
    library = pytest.importorskip("timm.utils.model_ema")
    initial, models = values_of()
    for arguments in CASES["timm_v3" if with_step else "timm_v3_without_step"][1]:
        module = module_of(initial)
        ema = library.ModelEmaV3(module, **arguments)
        steps = iter(range(1, CALLS + 1))
        theirs = updated(
            module,
            models,
            lambda ema=ema, module=module, steps=steps: ema.update(module, step=next(steps) if with_step else None),
            lambda ema=ema: ema.module.weight,
        )
        ours = averages_of("timm_v3" if with_step else "timm_v3_without_step", initial, models, **arguments)
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("arguments", CASES["diffusers"][1])
def test_diffusers(arguments: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("diffusers.training_utils")
    initial, models = values_of()
    module = module_of(initial)
    ema = library.EMAModel(module.parameters(), **arguments)
    theirs = updated(module, models, lambda: ema.step(module.parameters()), lambda: ema.shadow_params[0])
    np.testing.assert_allclose(averages_of("diffusers", initial, models, **arguments), theirs, rtol=1e-11, atol=1e-11)


def fit(initial: np.ndarray, averaging: Any, **limits: Any) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Train by Lightning; return the model after each step and at the start of each epoch, and what fit leaves."""
    lightning, torch = pytest.importorskip("pytorch_lightning"), pytest.importorskip("torch")
    after_steps, at_epochs = [], []

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(initial))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch, index):
            return (self.weight * batch).sum()

    class Record(lightning.Callback):
        def on_train_epoch_start(self, trainer, module):
            at_epochs.append(module.weight.detach().clone().numpy())

        def on_train_batch_end(self, trainer, module, *args):
            after_steps.append(module.weight.detach().clone().numpy())

    model = Model()
    batches = torch.randn(5, len(initial), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Record(), averaging],
        **limits,
    )
    trainer.fit(model, torch.utils.data.DataLoader(batches))
    return after_steps, at_epochs, model.weight.detach().numpy()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arguments", CASES["lightning_ema"][1])
def test_lightning_ema(arguments: dict[str, Any]) -> None:
    callbacks = pytest.importorskip("pytorch_lightning.callbacks")
    initial, _ = values_of()
    after_steps, _, left = fit(initial, callbacks.EMAWeightAveraging(**arguments), max_steps=31, max_epochs=-1)
    assert len(after_steps) == 31
    ours = averages_of("lightning_ema", initial, np.array(after_steps), **arguments)
    np.testing.assert_allclose(ours[-1], left, rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arguments", [{"swa_epoch_start": 1}, {"swa_epoch_start": 3}])
def test_lightning_swa(arguments: dict[str, Any]) -> None:
    callbacks = pytest.importorskip("pytorch_lightning.callbacks")
    initial, _ = values_of()
    averaging = callbacks.StochasticWeightAveraging(swa_lrs=0.05, **arguments)
    _, at_epochs, left = fit(initial, averaging, max_epochs=6)
    assert len(at_epochs) == 6
    ours = averages_of("lightning_swa", initial, np.array(at_epochs), **arguments)
    np.testing.assert_allclose(ours[-1], left, rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore")
def test_keras(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    library = pytest.importorskip("keras")
    initial, models = values_of()
    variable = library.Variable(initial, dtype="float64")
    optimizer = library.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.9)
    optimizer.build([variable])
    (average,) = (own for own in optimizer.variables if "average" in own.path)
    theirs = []
    for model in models:
        optimizer.apply([library.ops.subtract(variable, model)], [variable])
        theirs.append(library.ops.convert_to_numpy(average).copy())
    ours = averages_of("keras", initial, models, ema_momentum=0.9)
    np.testing.assert_allclose(ours, np.array(theirs), rtol=1e-6, atol=1e-6)


def test_optax() -> None:
    """It computes in float32."""
    optax = pytest.importorskip("optax")
    initial, models = values_of()
    transform = optax.ema(0.9)
    state = transform.init(initial)
    for model, ours in zip(models, averages_of("optax_ema", initial, models, decay=0.9), strict=True):
        theirs, state = transform.update(model, state)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)

    theirs = initial
    ours = averages_of("optax_incremental_update", initial, models, step_size=0.1)
    for model, own in zip(models, ours, strict=True):
        theirs = optax.incremental_update(model, theirs, 0.1)
        np.testing.assert_allclose(own, theirs, rtol=1e-12)

    theirs = initial
    ours = averages_of("optax_periodic_update", initial, models, update_period=7)
    for step, (model, own) in enumerate(zip(models, ours, strict=True)):
        theirs = optax.periodic_update(model, theirs, step, 7)
        np.testing.assert_allclose(own, theirs, rtol=1e-6)
