"""Averages of other libraries are read by the names of the model, and what is none is refused with what was seen."""

from __future__ import annotations

import argparse
import copy
import json

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import functavg
from functavg import checkpoints
from functavg.checkpoints import CheckpointError
from functavg.checkpoints.safetensors_reader import SafetensorsReader
from functavg.checkpoints.wrappers import strip_wrappers
from tests.checkpoints.files import save


def model_of(value=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


@pytest.fixture
def model():
    return model_of(1.0)


def steps_of(model, update, count=3):
    """Change the model and average it, a few times."""
    for step in range(count):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(step + 1)
        update()


def params_of(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_same(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


def from_file(folder, checkpoint, **options):
    """Convert a checkpoint by way of a file, and check that the dict itself gives the same."""
    torch.save(checkpoint, folder / "checkpoint.pt")
    converted = checkpoints.convert(folder / "checkpoint.pt", **options)
    direct = checkpoints.convert(checkpoint, **options)
    if options.get("to") == "state":
        assert converted.count == direct.count
        converted, direct = converted.average, direct.average
    assert_same(converted, direct)
    return checkpoints.convert(checkpoint, **options)


@pytest.mark.parametrize("make", [AveragedModel, functavg.AveragedModel])
def test_an_averaged_model_goes_both_ways(tmp_path, model, make):
    averaged = make(torch.compile(model, backend="eager"), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    steps_of(model, lambda: averaged.update_parameters(model))
    expected = {name.removeprefix("_orig_mod."): value for name, value in averaged.module.state_dict().items()}
    assert_same(from_file(tmp_path, averaged.state_dict()), expected)
    state = from_file(tmp_path, averaged.state_dict(), to="state")
    assert state.count == 3
    assert_same(state.average, expected)
    again = make(model)
    again.load_state_dict(from_file(tmp_path, averaged.state_dict(), to="averaged_model"), strict=True)
    assert again.n_averaged == 3
    assert_same(dict(again.module.state_dict()), expected)
    model.load_state_dict(checkpoints.convert(averaged.state_dict()), strict=True)


def test_a_converted_state_goes_on_like_the_average_it_came_from(tmp_path, model):
    averaged = AveragedModel(model)
    steps_of(model, lambda: averaged.update_parameters(model))
    state = from_file(tmp_path, averaged.state_dict(), to="state")
    steps_of(model, lambda: averaged.update_parameters(model), 1)
    state = functavg.SWA().update(dict(model.state_dict()), state)
    for name, parameter in averaged.module.named_parameters():
        torch.testing.assert_close(state.average[name], parameter.detach())


def test_ema_pytorch(tmp_path, model):
    ema = pytest.importorskip("ema_pytorch").EMA(model, beta=0.9, update_after_step=0, update_every=1)
    steps_of(model, ema.update)
    assert_same(from_file(tmp_path, ema.state_dict()), dict(ema.ema_model.state_dict()))
    assert from_file(tmp_path, ema.state_dict(), to="state").count == 3


def test_torch_ema_needs_the_names(tmp_path, model):
    ema = pytest.importorskip("torch_ema").ExponentialMovingAverage(model.parameters(), decay=0.9)
    steps_of(model, ema.update)
    saved = ema.state_dict()
    with ema.average_parameters():
        expected = params_of(model)
    assert_same(from_file(tmp_path, saved, names=model), expected)
    assert_same(from_file(tmp_path, saved, names=[name for name, _ in model.named_parameters()]), expected)
    assert from_file(tmp_path, saved, names=model, to="state").count == 3
    with pytest.raises(ValueError, match="torch_ema keeps a list of 4 tensors; pass names=, their names in order or"):
        checkpoints.convert(saved)
    with pytest.raises(ValueError, match="names must hold one name for each of 4 tensors, got 1"):
        checkpoints.convert(saved, names=["weight"])
    with pytest.raises(CheckpointError, match=r"'0.weight' has shape \(3, 2\), that of the model \(2, 3\)"):
        checkpoints.convert(saved, names=nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(3)))


def test_lightning_weight_averaging(tmp_path, model):
    """As its WeightAveraging writes a checkpoint: average and model have changed places."""
    averaging = pytest.importorskip("pytorch_lightning.callbacks").WeightAveraging()
    averaged = averaging._average_model = AveragedModel(model)
    steps_of(model, lambda: averaged.update_parameters(model))
    checkpoint = {"epoch": 1, "state_dict": model.state_dict(), "callbacks": {"other": {"best": 1.0}}}
    averaging.on_save_checkpoint(None, model, checkpoint)
    assert_same(from_file(tmp_path, checkpoint), dict(averaged.module.state_dict()))
    assert from_file(tmp_path, checkpoint, to="state").count == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the trainer: few workers, no logger, fewer batches than it logs
def test_a_checkpoint_that_a_trainer_of_lightning_wrote_with_its_weight_averaging(tmp_path):
    pl = pytest.importorskip("pytorch_lightning")
    averaging = pytest.importorskip("pytorch_lightning.callbacks").WeightAveraging()
    saving = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    iterates = []

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model_of(0.5)

        def training_step(self, batch, _):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_batch_end(self, *_):
            iterates.append(params_of(self))

    shown = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        max_steps=4, accelerator="cpu", callbacks=[averaging, saving], default_root_dir=tmp_path, **shown
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(16, 2), batch_size=4))
    path = tmp_path / "step=3.ckpt"
    found = checkpoints.inspect(path)
    assert (found.kind, found.count) == ("lightning", 3)
    average = checkpoints.convert(path)
    for name in iterates[0]:
        mean = torch.stack([iterate[name].double() for iterate in iterates[:3]]).mean(0)
        torch.testing.assert_close(average[name].double(), mean, rtol=1e-6, atol=1e-7)
    assert not torch.equal(average["net.0.weight"], iterates[2]["net.0.weight"])
    Model().load_state_dict(average)


def test_of_safetensors_only_the_average_is_read_and_ties_stay(tmp_path, monkeypatch):
    model = nn.Module()
    model.emb = model.head = nn.Parameter(torch.ones(2, 3))
    saved = {f"ema_model.{name}": tensor for name, tensor in model.state_dict().items()}
    saved |= {f"online_model.{name}": tensor for name, tensor in copy.deepcopy(model).state_dict().items()}
    path = tmp_path / "ema.safetensors"
    checkpoints.save_weights(path, saved | {"step": torch.tensor(5)})
    read = []
    whole = SafetensorsReader.read_piece

    def read_piece(self, piece, out):
        read.append(piece.name)
        return whole(self, piece, out)

    monkeypatch.setattr(SafetensorsReader, "read_piece", read_piece)
    state = checkpoints.convert(path, to="state")
    assert state.count == 5
    assert state.average["emb"] is state.average["head"]
    assert sorted(read) == ["ema_model.emb", "step"]


def test_shards_with_an_index_are_converted(tmp_path):
    averaged = AveragedModel(model_of(2.0))
    averaged.update_parameters(model_of(3.0))
    tensors = averaged.state_dict()
    weight_map = {name: f"{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save(tmp_path / file, {name: tensor for name, tensor in tensors.items() if weight_map[name] == file})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert checkpoints.inspect(index).kind == "averaged_model"
    assert_same(checkpoints.convert(index), dict(averaged.module.state_dict()))


def test_lightning_stochastic_weight_averaging(tmp_path, model):
    average = model_of(5.0).state_dict()
    checkpoint = {
        "state_dict": model.state_dict(),
        "callbacks": {
            "ModelCheckpoint": {},
            "StochasticWeightAveraging": {"n_averaged": 7, "average_model_state": average},
        },
    }
    assert_same(from_file(tmp_path, checkpoint), average)
    assert from_file(tmp_path, checkpoint, to="averaged_model")["n_averaged"] == 7


def test_timm(tmp_path, model):
    average = model_of(5.0).state_dict()
    arguments = argparse.Namespace(model="resnet50", lr=0.1)
    checkpoint = {"epoch": 3, "args": arguments, "state_dict": model.state_dict(), "state_dict_ema": average}
    assert_same(from_file(tmp_path, checkpoint), average)
    with pytest.raises(ValueError, match="timm does not say how many steps were averaged; pass count="):
        checkpoints.convert(checkpoint, to="state")
    assert from_file(tmp_path, checkpoint, to="state", count=12).count == 12
    alone = {f"module.{name}": value for name, value in average.items()}
    assert_same(from_file(tmp_path, alone, kind="timm"), average)
    with pytest.raises(
        CheckpointError, match=r"ModelEma of timm has such names, and so has a model in DDP: kind='timm'"
    ):
        checkpoints.convert(alone)


def test_diffusers_as_a_list_and_as_a_saved_model(tmp_path, model):
    average = params_of(model_of(5.0))
    saved = {"decay": 0.9999, "min_decay": 0.0, "optimization_step": 9, "update_after_step": 0}
    saved |= {"use_ema_warmup": False, "inv_gamma": 1.0, "power": 0.75, "shadow_params": list(average.values())}
    assert_same(from_file(tmp_path, saved, names=model), average)
    assert from_file(tmp_path, saved, names=model, to="state").count == 9
    folder = tmp_path / "unet_ema"
    folder.mkdir()
    save(folder / "diffusion_pytorch_model.safetensors", average)
    (folder / "config.json").write_text(json.dumps({"optimization_step": 9, "decay": 0.9999}))
    state = checkpoints.convert(folder, to="state")
    assert state.count == 9
    assert_same(state.average, average)


@pytest.mark.parametrize("algorithms", [list, dict])
def test_composer_keeps_the_trained_weights_while_the_average_is_in_the_model(tmp_path, model, algorithms):
    average = model_of(5.0)
    ema = {
        "ema_model": {
            "named_parameters_dict": params_of(average),
            "named_buffers_dict": dict(copy.deepcopy(average).named_buffers()),
        },
        "ema_weights_active": False,
        "ema_started": True,
    }
    trained = {"state": {"model": model.state_dict(), "algorithms": algorithms([("EMA", ema)])}}
    assert_same(from_file(tmp_path, trained), dict(average.state_dict()))
    assert_same(from_file(tmp_path, ema), dict(average.state_dict()))
    ema = ema | {"ema_weights_active": True}
    swapped = {"state": {"model": average.state_dict(), "algorithms": algorithms([("EMA", ema)])}}
    assert_same(from_file(tmp_path, swapped), dict(average.state_dict()))
    with pytest.raises(CheckpointError, match="expected composer, got a dict with the keys 'ema_model', 'ema_weights"):
        checkpoints.convert(ema, "composer")


def test_nemo_as_the_state_of_its_optimizer_and_as_a_file_of_its_own(tmp_path, model):
    average = params_of(model_of(5.0))
    optimizer = {"opt": {"state": {}}, "ema": tuple(average.values()), "current_step": 11, "decay": 0.999}
    checkpoint = {"state_dict": model.state_dict(), "optimizer_states": [optimizer | {"every_n_steps": 1}]}
    assert_same(from_file(tmp_path, checkpoint, names=model), average)
    assert from_file(tmp_path, checkpoint, names=model, to="state").count == 11
    with pytest.raises(CheckpointError, match="got a dict with the keys 'state_dict'"):
        checkpoints.convert({"state_dict": average})
    assert_same(from_file(tmp_path, {"state_dict": average}, kind="nemo"), average)


def test_functavg(tmp_path, model):
    rule = functavg.EMA(0.9)
    params = params_of(model)
    state = rule.update(params, rule.init(params))
    for suffix in (".safetensors", ".pt"):
        checkpoints.save_state(tmp_path / f"state{suffix}", state, rule)
        assert_same(checkpoints.convert(tmp_path / f"state{suffix}"), params)
        converted = checkpoints.convert(tmp_path / f"state{suffix}", "functavg", to="averaged_model")
        AveragedModel(model).load_state_dict(converted, strict=False)
        assert converted["n_averaged"] == 1


@pytest.mark.parametrize(
    ("names", "stripped"),
    [
        (["module._orig_mod.a.w", "module._orig_mod.b"], ["a.w", "b"]),
        (["module.module.a", "module.module.b"], ["a", "b"]),
        (["module.a", "b"], ["module.a", "b"]),
        (["a._checkpoint_wrapped_module.w", "a._fsdp_wrapped_module.b"], ["a.w", "a.b"]),
        (["my_orig_mod.w"], ["my_orig_mod.w"]),
        ([], []),
    ],
)
def test_prefixes_of_wrappers_are_taken_off(names, stripped):
    assert list(strip_wrappers(dict.fromkeys(names))) == stripped


def test_names_that_become_one_are_refused():
    with pytest.raises(ValueError, match=r"\['a._orig_mod.w', 'a.w'\] all become 'a.w' without wrappers"):
        strip_wrappers({"a._orig_mod.w": 1, "a.w": 2})


def test_what_is_no_average_is_refused_with_what_was_seen(tmp_path, model):
    with pytest.raises(CheckpointError, match=r"the source: expected an average of a known kind "):
        checkpoints.convert(dict(model.state_dict()))
    path = save(tmp_path / "model.safetensors", model.state_dict())
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*got a dict with the keys .*no average"):
        checkpoints.convert(path)
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="got list"):
        checkpoints.convert(tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="expected lightning, got a dict with the keys 'n_averaged'"):
        checkpoints.convert(AveragedModel(nn.Linear(1, 1)).state_dict(), "lightning")
    with pytest.raises(CheckpointError, match="expected functavg, got a dict"):
        checkpoints.convert(path, "functavg")
    with pytest.raises(ValueError, match=r"kind must be one of averaged_model, .*functavg, got 'keras'"):
        checkpoints.convert(path, "keras")
    with pytest.raises(ValueError, match="to must be one of weights, averaged_model, state, got 'file'"):
        checkpoints.convert(path, to="file")
    with pytest.raises(TypeError, match="source must be a path or a dict, got int"):
        checkpoints.convert(3)
    with pytest.raises(ValueError, match="count must be an integer of at least 0, got -1"):
        checkpoints.convert(AveragedModel(nn.Linear(1, 1)).state_dict(), to="state", count=-1)


def test_a_conversion_shares_no_memory_with_its_source_and_keeps_ties():
    model = nn.Module()
    model.emb = model.head = nn.Parameter(torch.ones(2))
    source = AveragedModel(model).state_dict()
    average = checkpoints.convert(source)
    assert average["emb"] is average["head"]
    assert average["emb"].data_ptr() != source["module.emb"].data_ptr()
