"""Files weighed by their steps, summed to another average, or chosen by a score."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import functavg
from functavg import EMA, SWA, PowerEMA, Several, checkpoints
from functavg.checkpoints import CheckpointError
from tests import oracle
from tests.checkpoints.files import load, metadata_of, names_in, save


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("step-500.safetensors", 500),
        ("epoch=3-step=500.ckpt", 500),
        ("epoch=3-step=500-v1.ckpt", 500),
        ("checkpoint-500/model.safetensors", 500),
        ("checkpoint-500/model-00001-of-00003.safetensors", 500),
        ("run7/last.pt", 7),
        ("model_0012.pt", 12),
        ("last.pt", None),
    ],
)
def test_the_step_is_read_from_the_name_of_file_or_folder(path, step):
    assert checkpoints.step_of(path) == step


def test_files_are_sorted_by_step_as_numbers(tmp_path):
    paths = [tmp_path / name for name in ("step-1000.pt", "step-200.pt", "z.pt", "step-30.pt")]
    tmp_path = checkpoints.sort_by_step(paths)
    assert [path.name for path in tmp_path][-3:] == ["step-30.pt", "step-200.pt", "step-1000.pt"]


@pytest.mark.parametrize(
    ("rule", "profile"), [(PowerEMA(2.0), oracle.power(2.0)), (EMA(0.99), oracle.ema(0.99)), (SWA(), oracle.swa)]
)
def test_weights_of_steps_are_the_profile_of_the_rule(rule, profile):
    np.testing.assert_allclose(checkpoints.profile_weights(rule, [3, 10, 30]), profile([3, 7, 20])[1:], rtol=1e-12)


def test_steps_that_do_not_increase_and_rules_of_several_averages_are_refused():
    for steps in ([], [0, 1], [3, 3], [3, 2]):
        with pytest.raises(ValueError, match=r"steps must increase from above 0, got \["):
            checkpoints.profile_weights(SWA(), steps)
    with pytest.raises(ValueError, match="the rule must have one average, got Several"):
        checkpoints.profile_weights(Several({"a": SWA()}), [1])


GAMMAS = {"narrow": 17.0, "wide": 7.0}


@pytest.fixture
def tracked(tmp_path):
    """Snapshots of two averages of a random walk, and the walk."""
    rule = Several({name: PowerEMA(gamma) for name, gamma in GAMMAS.items()})
    walk = torch.randn(80, 5, generator=torch.Generator().manual_seed(0)).cumsum(0)
    state, paths = rule.init({"w": walk[0]}), []
    for step in range(1, 81):
        state = rule.update({"w": walk[step - 1]}, state)
        if step % 10 == 0:
            paths.append(tmp_path / f"step-{step}.safetensors")
            checkpoints.save_state(paths[-1], state, rule)
    return paths, walk.double().numpy()


def test_snapshots_make_an_average_that_was_not_tracked(tmp_path, tracked):
    paths, walk = tracked
    done = checkpoints.posthoc(paths, tmp_path / "out.safetensors", PowerEMA(10))
    expected = oracle.average(oracle.power(10.0)([1] * 80)[1:], walk)
    np.testing.assert_allclose(load(done.output)["w"].numpy(), expected, atol=0.1)
    assert load(done.output).keys() == {"w"}
    assert len(done.files) == 16
    assert done.synthesis.residual < 0.02
    record = json.loads(metadata_of(done.output)["functavg"])
    assert record["target"] == [repr(PowerEMA(10)), 80]
    assert record["snapshots"][0] == [repr(PowerEMA(17)), 10]
    assert sum(record["weights"]) == pytest.approx(1.0)


def test_a_tracked_average_at_a_tracked_time_is_taken_as_it_is(tmp_path, tracked):
    paths, walk = tracked
    checkpoints.posthoc(paths, tmp_path / "out.safetensors", (PowerEMA(7), 40))
    expected = oracle.average(oracle.power(7.0)([1] * 40)[1:], walk[:40])
    np.testing.assert_allclose(load(tmp_path / "out.safetensors")["w"].numpy(), expected, rtol=1e-5, atol=1e-5)
    checkpoints.posthoc(paths, tmp_path / "narrow.safetensors", PowerEMA(17), key="narrow")
    expected = oracle.average(oracle.power(17.0)([1] * 80)[1:], walk)
    np.testing.assert_allclose(load(tmp_path / "narrow.safetensors")["w"].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_files_that_say_nothing_need_a_rule_and_steps(tmp_path):
    paths = [save(tmp_path / f"{step}.pt", {"w": torch.full((1,), float(step))}) for step in (10, 20)]
    with pytest.raises(CheckpointError, match=r"10\.pt: does not say by what rule and how many steps it was averaged"):
        checkpoints.posthoc(paths, tmp_path / "out.pt", SWA())
    done = checkpoints.posthoc([(path, SWA(), int(path.stem)) for path in paths], tmp_path / "out.pt", (SWA(), 20))
    assert load(done.output)["w"].item() == pytest.approx(20.0)
    with pytest.raises(ValueError, match="snapshots must hold at least one snapshot, got none"):
        checkpoints.posthoc([], tmp_path / "out.pt", SWA())


def test_snapshots_of_one_average_and_a_count_on_a_device(tmp_path):
    rule = SWA()
    state = rule.init({"w": torch.ones(1)})._replace(count=torch.tensor(4))
    checkpoints.save_state(tmp_path / "4.safetensors", state, rule)
    done = checkpoints.posthoc([tmp_path / "4.safetensors"], tmp_path / "out.pt", rule)
    assert done.weights == (1.0,)


def test_a_greedy_soup_takes_what_makes_it_better(tmp_path):
    values = torch.tensor([1.0, 4.0, -1.0, math.nan, 0.5])
    paths = [save(tmp_path / f"{index}.safetensors", {"w": value}) for index, value in enumerate(values)]
    seen = []

    def score(path):
        seen.append(load(path)["w"].item())
        return -abs(seen[-1])

    before = names_in(tmp_path)
    done = checkpoints.greedy_soup(paths, tmp_path / "soup.safetensors", score)
    # 0.5 is the best alone; 1 does not help, -1 does, 4 does not, and what is no number never.
    assert [path.name for path in done.files] == ["2.safetensors", "4.safetensors"]
    assert load(done.output)["w"].item() == -0.25
    assert names_in(tmp_path) == before | {"soup.safetensors"}
    assert seen[:5] == pytest.approx(values.tolist(), nan_ok=True)


def test_a_soup_of_nothing_is_refused(tmp_path):
    path = save(tmp_path / "0.pt", {"w": torch.ones(1)})
    with pytest.raises(ValueError, match="paths must hold at least one path, got none"):
        checkpoints.greedy_soup([], tmp_path / "soup.pt", lambda path: 1.0)
    with pytest.raises(ValueError, match=r"one score at least must be above -inf, got \[-inf\]"):
        checkpoints.greedy_soup([path], tmp_path / "soup.pt", lambda path: math.nan)
    with pytest.raises(TypeError, match=r"score\(.*0\.pt\) must be a number, got 'good'"):
        checkpoints.greedy_soup([path], tmp_path / "soup.pt", lambda path: "good")
    with pytest.raises(CheckpointError, match=r"the output must end in one of"):
        checkpoints.greedy_soup([path], tmp_path / "soup", lambda path: 1.0)


def test_inspecting_tells_dicts_ties_dtypes_and_averages(tmp_path):
    shared = torch.ones(3)
    checkpoint = {"model": {"emb": shared, "head": shared, "n": torch.tensor(1)}, "deep": {"er": {"w": torch.ones(2)}}}
    torch.save(checkpoint, tmp_path / "in.pt")
    found = checkpoints.inspect(tmp_path / "in.pt")
    assert (found.format, found.kind, found.count) == ("torch", None, None)
    assert [holding.key for holding in found.holds] == ["model", "deep.er"]
    model = found.holds[0]
    assert (model.tensors, model.elements, model.nbytes) == (2, 4, 20)
    assert (model.dtypes, model.ties) == ({"float32": 1, "int64": 1}, [["emb", "head"]])


def test_inspecting_finds_averages_in_every_format(tmp_path):
    rule = functavg.EMA(0.9)
    averaged = functavg.AveragedModel(torch.nn.Linear(2, 2))
    averaged.n_averaged.fill_(7)
    for suffix in (".safetensors", ".pt"):
        checkpoints.save_state(tmp_path / f"state{suffix}", rule.init({"w": torch.ones(2)}), rule)
        found = checkpoints.inspect(tmp_path / f"state{suffix}")
        assert (found.kind, found.count, found.record["rule"]) == ("functavg", 0, repr(rule))
        save(tmp_path / f"averaged{suffix}", averaged.state_dict())
        found = checkpoints.inspect(tmp_path / f"averaged{suffix}")
        assert (found.kind, found.count, found.record) == ("averaged_model", 7, {})
    folder = tmp_path / "diffusers"
    folder.mkdir()
    save(folder / "diffusion_pytorch_model.safetensors", {"w": torch.ones(1)}, {"note": "x"})
    (folder / "config.json").write_text('{"optimization_step": 9}')
    found = checkpoints.inspect(folder)
    assert (found.kind, found.count, found.metadata) == ("diffusers", 9, {"note": "x"})
    (folder / "config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"config\.json: corrupt: no configuration of a model"):
        checkpoints.inspect(folder)
    (tmp_path / "m.safetensors.index.json").write_text('{"weight_map": {"w": "s.safetensors"}}')
    save(tmp_path / "s.safetensors", {"w": torch.ones(1)})
    assert checkpoints.inspect(tmp_path / "m.safetensors.index.json").format == "shards"


def test_weights_in_memory_are_stored_as_they_are(tmp_path):
    shared = torch.ones(2)
    weights = {"a": shared, "b": shared, "n": np.array(3), "t": torch.arange(6.0).reshape(2, 3).t()}
    for suffix in (".safetensors", ".pt"):
        checkpoints.save_weights(tmp_path / f"w{suffix}", weights)
        result = load(tmp_path / f"w{suffix}")
        assert torch.equal(result["t"], weights["t"])
        assert result["n"].item() == 3
    assert result["a"].data_ptr() == result["b"].data_ptr()
    with pytest.raises(TypeError, match="'a' cannot be stored: its dtype str"):
        checkpoints.save_weights(tmp_path / "w.pt", {"a": np.array("text")})
