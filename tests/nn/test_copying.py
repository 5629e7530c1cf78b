"""An average starts from a copy of the model's tensors, and not of the world that hangs on them."""

from __future__ import annotations

import copy
import functools
import threading
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode

from functavg import EMA, AveragedModel, swapped
from functavg.nn.copying import copy_model, overwrite_
from tests.nn.helpers import (
    Net,
    all_values,
    alone,
    bits,
    fill,
    parameters_of,
    quarter,
    randomise,
    scalar,
    tensors,
    unchanged,
)


def quartered(model, **arguments):
    """Average zeros and then ones."""
    averaged = quarter(model, **arguments)
    averaged.update_parameters(model)
    return averaged


# ---- modules that resist


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("forward", [False, True], ids=["before a forward", "after a forward"])
@pytest.mark.parametrize(
    "make", [nn.utils.weight_norm, parametrizations.weight_norm], ids=["legacy", "parametrization"]
)
def test_weight_norm_is_averaged(make, forward):
    model = nn.Sequential(make(nn.Linear(2, 2)))
    if forward:
        model(torch.ones(1, 2)).sum().backward()
    averaged = quartered(model)
    assert all_values(averaged) == {0.25}
    averaged(torch.ones(1, 2)).sum().backward()
    averaged.update_parameters(model)


def test_pruned_layers_are_averaged_and_stay_pruned():
    model = nn.Sequential(nn.Linear(4, 4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    model(torch.ones(1, 4)).sum().backward()
    averaged = quartered(model)
    assert all_values(averaged) == {0.25}
    averaged(torch.ones(1, 4))
    assert torch.equal(averaged.module[0].weight, 0.25 * model[0].weight_mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recurrent_layers_compute_with_the_average(dtype):
    """They hold their weights in a list beside their parameters, too."""
    model, wanted = (nn.LSTM(2, 3, num_layers=2, dtype=dtype) for _ in range(2))
    averaged = quartered(model)
    fill(wanted, 0.25)
    batch = torch.randn(4, 1, 2, dtype=dtype)
    assert torch.equal(averaged(batch)[0], wanted(batch)[0])
    averaged.load_state_dict(averaged.double().state_dict(), assign=True)
    fill(model, 0.25)
    averaged.update_parameters(model)
    torch.testing.assert_close(averaged(batch.double())[0], wanted.double()(batch.double())[0])


def test_a_model_without_parameters_counts_all_the_same():
    averaged = AveragedModel(nn.ReLU())
    for _ in range(2):
        averaged.update_parameters(nn.ReLU())
    averaged.half().load_state_dict(averaged.state_dict())
    assert (averaged.n_averaged.item(), averaged.state.average) == (2, {})


class Caching(nn.Module):
    """Keeps the output of its last forward, as a tensor and within containers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.last = None

    def forward(self, x):
        self.last = self.layer(x)
        self.history = {"all": [self.last, self.last * 2]}
        return self.last


def test_cached_activations_are_copied_without_their_graph():
    model = nn.Sequential(Caching())
    model(torch.ones(1, 2))
    averaged = AveragedModel(model, rule=EMA(0.75))
    cached = averaged.module[0].last
    assert torch.equal(cached, model[0].last)
    assert cached.grad_fn is None
    assert averaged.module[0].history["all"][0] is cached
    assert model[0].last.grad_fn is not None
    assert all_values(quartered(model)) == {0.25}


@pytest.mark.parametrize("with_gradients", [True, False])
def test_gradients_stay_behind(with_gradients):
    model = Net()
    model.cache.requires_grad_()
    if with_gradients:
        (model(torch.randn(4, 3)).sum() + model.cache.sum()).backward()
    averaged = AveragedModel(model)
    assert all(tensor.grad is None for tensor in tensors(averaged.module).values())
    assert averaged.module.cache.requires_grad
    assert averaged.module.hidden[1].weight is averaged.module.inputs.weight
    assert (model.inputs.weight.grad is not None) == with_gradients


def test_frozen_parameters_stay_frozen_and_are_averaged():
    model = Net()
    model.inputs.requires_grad_(False)
    averaged = quartered(model)
    assert not averaged.module.inputs.weight.requires_grad
    assert averaged.module.scale.requires_grad
    assert all_values(averaged) == {0.25}


def test_expanded_buffers_are_given_memory():
    model = scalar()
    model.register_buffer("mask", torch.zeros(1).expand(4, 3))
    averaged = quartered(model, use_buffers=True)
    model.mask = torch.ones(4, 3)
    averaged.update_parameters(model)
    assert averaged.module.mask.tolist() == [[0.25] * 3] * 4


def test_memory_formats_and_modes_are_kept():
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2)).to(memory_format=torch.channels_last)
    model[1].eval()
    averaged = quartered(model)
    assert averaged.module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert [module.training for module in averaged.module] == [True, False]


def test_hooks_and_attributes_come_along():
    model = scalar(2.0)
    model.config = {"name": ["x"]}
    model.register_forward_hook(double)
    averaged = AveragedModel(model)
    assert averaged(torch.ones(1, 1)).item() == 4.0
    assert averaged.module.config == model.config
    assert averaged.module.config["name"] is not model.config["name"]


def double(module, args, output, lock=None):
    """A forward hook."""
    return 2 * output


class Locked(nn.Module):
    """Holds what cannot be copied."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.lock = threading.Lock()


class Owner(nn.Module):
    """Holds one thing beside a weight."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.own = value


class Stubborn(torch.Tensor):
    """A tensor that cannot be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("no copies")


RESISTING = {
    "lock": threading.Lock,
    "lock in a dict": lambda: {"deep": [threading.RLock()]},
    "generator": lambda: (number for number in range(3)),
    "module": lambda: copy,
    "hooked": lambda: threading.Thread(target=print),
    "tensor": lambda: torch.zeros(1).as_subclass(Stubborn),
}


@pytest.mark.parametrize("kind", RESISTING)
def test_the_attribute_that_resists_is_named(kind):
    model = nn.Sequential(nn.ReLU(), Owner(RESISTING[kind]()), Net())
    with (
        unchanged(model),
        pytest.raises(TypeError, match=r"cannot copy 1 \(Owner\): its attribute own resists: .*module="),
    ):
        AveragedModel(model)


def test_an_open_file_is_named(tmp_path):
    with (
        (tmp_path / "log").open("w") as file,
        pytest.raises(TypeError, match=r"the model \(Owner\): its attribute own"),
    ):
        AveragedModel(Owner(file))


def test_parameters_buffers_and_hooks_that_resist_are_named():
    model = nn.Sequential(Owner(None))
    model[0].weight = nn.Parameter(torch.zeros(1).as_subclass(Stubborn), requires_grad=False)
    with pytest.raises(TypeError, match=r"cannot copy 0 \(Owner\): its attribute weight resists: no copies"):
        AveragedModel(model)
    model = nn.Sequential(Owner(None))
    model[0].register_buffer("state", torch.zeros(1).as_subclass(Stubborn))
    with pytest.raises(TypeError, match=r"cannot copy 0 \(Owner\): its attribute state resists: no copies"):
        AveragedModel(model)
    model = nn.Sequential(Owner(None))
    model[0].register_forward_hook(functools.partial(double, lock=threading.Lock()))
    with pytest.raises(TypeError, match=r"cannot copy 0 \(Owner\): its attribute _forward_hooks resists"):
        AveragedModel(model)


def test_what_is_copied_although_it_holds_more_than_values():
    held = {"reference": weakref.ref(Net()), "random": torch.Generator(), "function": lambda: 0}
    assert all_values(quartered(nn.Sequential(Owner(held)))) == {0.25}


def test_a_module_whose_own_copying_fails_is_named():
    class Refusing(nn.Linear):
        def __deepcopy__(self, memo):
            raise ValueError("never")

    with pytest.raises(TypeError, match=r"cannot copy 1 \(Refusing\): never"):
        AveragedModel(nn.Sequential(nn.ReLU(), Refusing(1, 1)))


# ---- devices and memory


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("gpu", ValueError, r"device must be one that torch knows, such as 'cpu' or 'cuda:0', got 'gpu'"),
        ("cuda:x", ValueError, r"device must be one that torch knows.*got 'cuda:x'"),
        ("", ValueError, "device must be one that torch knows.*got ''"),
        (3.5, TypeError, r"device must be a torch.device, its name or its index, got 3.5"),
        (["cpu"], TypeError, r"device must be a torch.device.*got \['cpu'\]"),
        ("privateuseone:5", RuntimeError, "device 'privateuseone:5' is not available: "),
        ("vulkan", RuntimeError, "device 'vulkan' is not available: "),
        (99, RuntimeError, "device '99' is not available: "),
    ],
)
def test_a_device_that_is_none_or_not_there_is_named(device, error, message):
    with pytest.raises(error, match=message) as caught:
        AveragedModel(nn.Sequential(Locked()), device=device)
    assert "Locked" not in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0", "meta"])
def test_devices_that_are_there_are_taken_by_any_name(device):
    averaged = AveragedModel(Net(), device=device)
    assert {tensor.device.type for tensor in tensors(averaged).values()} == {torch.device(device).type}


class Full(nn.Module):
    """Runs out of memory when it is copied."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def __deepcopy__(self, memo):
        raise self.error


SHORTAGES = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("MPS backend out of memory"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4398046511104 bytes."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4398046511104 bytes."),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: f"{type(error).__name__}: {str(error)[:30]}")
def test_a_copy_that_runs_out_of_memory_raises_that_error(error):
    with pytest.raises(type(error)) as caught:
        AveragedModel(nn.Sequential(Full(error)))
    assert caught.value is error


def test_memory_that_runs_out_while_the_cause_of_another_error_is_sought_is_what_is_told():
    with pytest.raises(MemoryError):
        AveragedModel(nn.Sequential(Locked(), Full(MemoryError())))


def test_a_device_that_is_full_is_not_called_missing(monkeypatch):
    def fill_up(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = Net()
    monkeypatch.setattr(torch, "empty", fill_up)
    with pytest.raises(torch.OutOfMemoryError):
        AveragedModel(model, device="cpu")


def test_a_copy_that_really_runs_out_of_memory_raises_the_error_of_the_allocator():
    model = nn.Linear(1, 1)
    model.register_buffer("huge", torch.zeros(1).expand(2**60))
    with pytest.raises(RuntimeError, match="allocate"):
        AveragedModel(model)


def test_a_model_must_be_a_module():
    with pytest.raises(TypeError, match=r"model must be the torch.nn.Module to average, got dict"):
        AveragedModel({"weight": torch.zeros(1)})
    with pytest.raises(TypeError, match=r"module= must be a ready copy of the model, a torch.nn.Module, got type"):
        AveragedModel(scalar(), module=nn.Linear)


def test_what_resists_is_named():
    model = nn.ModuleDict({"a": scalar(), "b": nn.Sequential(nn.ReLU(), Locked())})
    with pytest.raises(TypeError, match=r"cannot copy b\.1 \(Locked\): .*lock.*module="):
        AveragedModel(model)
    with pytest.raises(TypeError, match=r"cannot copy the model \(Locked\): .*Give it a __deepcopy__"):
        AveragedModel(Locked())


def test_what_only_the_whole_resists_is_said_of_the_model():
    class Whole(nn.Module):
        tries = 0

        def __deepcopy__(self, memo):
            Whole.tries += 1
            if Whole.tries == 1:
                raise RuntimeError("once")
            return scalar()

    with pytest.raises(TypeError, match=r"cannot copy the model \(Whole\): once"):
        AveragedModel(Whole())


def test_lazy_parameters_are_refused_by_name():
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(TypeError, match=r"0\.weight is an uninitialised \(lazy\) parameter; run one forward pass"):
        AveragedModel(model)
    model(torch.ones(1, 3))
    assert all_values(quartered(model)) == {0.25}


def test_lazy_buffers_are_refused_by_name():
    with pytest.raises(TypeError, match="running_mean is an uninitialised"):
        AveragedModel(nn.LazyBatchNorm1d(affine=False))


def test_the_model_is_left_as_it_is():
    model = Net()
    model(torch.randn(4, 3)).sum().backward()
    objects = {name: id(tensor) for name, tensor in tensors(model).items()}
    with unchanged(model):
        AveragedModel(model, use_buffers=True, dtype=torch.float64)
        AveragedModel(model, device="meta")
    assert {name: id(tensor) for name, tensor in tensors(model).items()} == objects
    assert model.inputs.weight.grad is not None


# ---- methods that were replaced


class Scaled(nn.Module):
    """A model with a layer of its own class, and one of torch's."""

    def __init__(self):
        super().__init__()
        self.layer = scalar(2.0)
        self.layers = nn.Sequential(scalar(1.0))

    def forward(self, x):
        return self.layers(self.encode(x))

    def encode(self, x):
        return self.layer(x)


def computed(averaged, model):
    """Return what an average computes of 1 after an update with all weights 3, which are 100 by then in the model."""
    fill(model, 3.0)
    averaged.update_parameters(model)
    fill(model, 100.0)
    with torch.no_grad():
        return averaged(torch.ones(1, 1)).item()


def test_an_average_computes_with_its_own_weights_where_another_method_was_compiled():
    model = Scaled()
    model.encode = torch.compile(model.encode, backend="eager")
    model.to = closure(model.to)  # as a launcher replaces it
    assert computed(AveragedModel(model, rule=EMA(0.75)), model) == 9.0


def replace_by_compiled(module):
    module.forward = torch.compile(module.forward, backend="eager")


def replace_by_method(module):
    def forward(self, x):
        return type(self).forward(self, x)

    module.forward = types.MethodType(forward, module)


def replace_by_partial(module):
    module.forward = functools.partial(type(module).forward, module)


@pytest.mark.filterwarnings("ignore:.*script_method.*deprecated")
@pytest.mark.parametrize("name", ["", "layer", "layers"])
@pytest.mark.parametrize("replace", [replace_by_compiled, replace_by_method, replace_by_partial])
@pytest.mark.parametrize("how", ["copy", "module"])
def test_an_average_computes_with_its_own_weights_where_a_forward_was_replaced(how, replace, name):
    model = Scaled()
    replace(model.get_submodule(name))
    ready = copy.deepcopy(model) if how == "module" else None
    averaged = AveragedModel(model, rule=EMA(0.75), module=ready)
    assert computed(averaged, model) == 9.0
    assert computed(copy.deepcopy(averaged), model) == 9.0


def closure(forward):
    return lambda x: 1.0 * forward(x)


@pytest.mark.parametrize("decorate", [torch.no_grad(), torch.autocast("cpu", torch.bfloat16), closure])
@pytest.mark.parametrize("name", ["", "layers"])
def test_a_forward_that_goes_on_to_compute_with_the_model_is_named(name, decorate):
    model = Scaled()
    part = model.get_submodule(name)
    part.forward = decorate(part.forward)
    message = f"^{name}.?forward of the model stands for a function that computes with the model.*inside swapped"
    with pytest.warns(UserWarning, match=message):
        averaged = AveragedModel(model, rule=EMA(0.75))
    with swapped(model, averaged):
        pass


def test_a_closure_over_the_model_is_named_and_one_over_something_else_is_not():
    model = Scaled()
    model.encode = lambda x: 1.0 * model.layer(x)
    model.activation = lambda x: 2.0 * torch.relu(x)
    with pytest.warns(UserWarning, match="^encode of the model stands for"):
        AveragedModel(model, rule=EMA(0.75))


def test_a_partial_over_the_model_inside_a_closure_is_named():
    model = Scaled()
    inner = functools.partial(Scaled.encode, model)
    model.encode = lambda x: 1.0 * inner(x)
    with pytest.warns(UserWarning, match="^encode of the model stands for"):
        AveragedModel(model, rule=EMA(0.75))


def test_functions_that_refer_to_themselves_or_to_nothing_yet_are_not_named():
    def halve(x, least=1.0):
        return x if x <= least else halve(x / 2)

    def call_later(x):
        return later(x)

    model = Scaled()
    model.halve, model.call_later = halve, call_later
    averaged = AveragedModel(model, rule=EMA(0.75))
    assert averaged.module.halve is halve
    later = abs
    assert averaged.module.call_later(-1) == 1


def test_an_average_does_not_keep_its_model_alive():
    model = Net()
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    reference = weakref.ref(model)
    del model
    assert reference() is None


# ---- module=


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("use_buffers", [False, True])
def test_a_ready_module_is_overwritten_and_used(dtype, use_buffers):
    model, ready = Net().to(dtype), Net().to(dtype)
    randomise(model, 0)
    randomise(ready, 1)
    averaged = AveragedModel(model, rule=EMA(0.75), use_buffers=use_buffers, module=ready)
    assert averaged.module is ready
    assert parameters_of(ready) == parameters_of(model)
    other = AveragedModel(model, rule=EMA(0.75), use_buffers=use_buffers)
    for seed in range(3):
        randomise(model, seed)
        averaged.update_parameters(model)
        other.update_parameters(model)
    assert parameters_of(averaged) == parameters_of(other)


def test_a_model_that_resists_is_averaged_with_a_ready_module():
    model = Locked()
    averaged = quartered(model, module=Locked())
    assert all_values(averaged) == {0.25}


def test_a_ready_module_may_be_in_another_precision():
    model = scalar(1.0, torch.bfloat16)
    averaged = AveragedModel(model, module=scalar(0.0, torch.float32), rule=EMA(0.999))
    averaged.update_parameters(model)
    fill(model, 2.0)
    averaged.update_parameters(model)
    assert averaged.module.weight.item() == pytest.approx(1.001)


def test_a_ready_module_is_moved_to_the_device_but_for_what_it_shares():
    model = with_frozen_base()
    ready = nn.ModuleDict({"base": model["base"], "head": scalar(), "nothing": None})
    averaged = AveragedModel(model, module=ready, device="cpu")
    assert averaged.module["base"] is model["base"]
    assert averaged.module["nothing"] is None


def test_a_ready_module_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="the model has no tensors named bias; it has weight"):
        AveragedModel(nn.Linear(1, 1), module=scalar())
    with pytest.raises(ValueError, match=r"weight.*expected shape \(1, 1\), got \(2, 2\)"):
        AveragedModel(nn.Linear(2, 2, bias=False), module=scalar())


def test_a_ready_module_that_shares_memory_with_the_model_is_refused():
    """Such an average would be the model, and every update would move the training weights."""
    model = Net()
    for ready in (model, copy.copy(model)):
        with unchanged(model), pytest.raises(ValueError, match=r"module= shares .* with the model"):
            AveragedModel(model, module=ready)


class Compiled(nn.Module):
    """A model with a wrapper inside."""

    def __init__(self):
        super().__init__()
        self.block = torch.compile(scalar(), backend="eager")
        self.rest = nn.ModuleList([nn.DataParallel(scalar()), nn.ReLU()])

    def forward(self, x):
        return self.rest[0](self.block(x))


WRAPPERS = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "both": lambda model: torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_ready_module_is_taken_out_of_its_wrappers(wrapper):
    model, ready = scalar(), scalar()
    with alone():
        averaged = quartered(model, module=WRAPPERS[wrapper](ready))
    assert averaged.module is ready
    assert set(averaged.state_dict()) == {"n_averaged", "module.weight"}
    assert all_values(averaged) == {0.25}


def test_wrappers_inside_a_ready_module_are_taken_off():
    model, ready = Compiled(), Compiled()
    averaged = quartered(model, module=ready)
    assert averaged.module is ready
    assert set(averaged.state_dict()) == {"n_averaged", "module.block.weight", "module.rest.0.weight"}
    assert set(averaged.state_dict()) == set(AveragedModel(model).state_dict())
    assert averaged(torch.ones(1, 1)).item() == 0.25**2
    assert type(model.block) is not nn.Linear


def test_a_ready_module_that_is_refused_keeps_its_wrappers():
    model, ready = Compiled(), nn.ModuleDict({"block": torch.compile(nn.Linear(1, 1))})
    with unchanged(ready), pytest.raises(ValueError, match="the model has no tensors named"):
        AveragedModel(model, module=ready)
    assert hasattr(ready["block"], "_orig_mod")


def with_frozen_base():
    """Return a model of a frozen part and a trained one."""
    model = nn.ModuleDict({"base": Net(), "head": scalar()})
    model["base"].requires_grad_(False)
    return model


def test_a_ready_module_may_share_what_is_frozen():
    model = with_frozen_base()
    ready = nn.ModuleDict({"base": model["base"], "head": scalar(5.0)})
    before = parameters_of(model["base"])
    averaged = AveragedModel(model, module=ready, rule=EMA(0.75))
    assert averaged.module["head"].weight.item() == 0.0
    for value in (0.0, 1.0):
        fill(model["head"], value)
        averaged.update_parameters(model)
    assert averaged.module["head"].weight.item() == 0.25
    assert averaged.module["base"] is model["base"]
    assert parameters_of(model["base"]) == before


def test_a_ready_module_with_a_shared_part_leaves_the_wrappers_in_it():
    model = nn.ModuleDict({"base": Compiled().requires_grad_(False), "head": scalar()})
    AveragedModel(model, module=nn.ModuleDict({"base": model["base"], "head": scalar()}))
    assert hasattr(model["base"].block, "_orig_mod")


def test_a_ready_module_may_not_share_what_is_trained_or_stands_elsewhere():
    model = with_frozen_base()
    trained = nn.ModuleDict({"base": model["base"], "head": scalar()})
    trained["head"].weight = model["head"].weight
    elsewhere = copy.deepcopy(model)
    elsewhere["base"].hidden[0].weight = model["base"].inputs.weight
    memory = copy.deepcopy(model)
    memory["head"].weight.data = model["head"].weight.data
    for ready, name in ((trained, "head.weight"), (elsewhere, "base.hidden.0.weight"), (memory, "head.weight")):
        with unchanged(model), pytest.raises(ValueError, match=f"module= shares {name} with the model"):
            AveragedModel(model, module=ready)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"module= shares .* with the model"):
        AveragedModel(model, module=model)


def test_a_predicate_says_what_a_ready_module_may_share():
    model = scalar(1.0)
    ready = copy.copy(model)
    with pytest.raises(ValueError, match="module= shares weight"):
        overwrite_(ready, model, share=lambda name, tensor: name != "weight")
    assert overwrite_(ready, model, share=lambda name, tensor: name == "weight") is ready
    assert model.weight.item() == 1.0


# ---- share=


class Packed(nn.Parameter):
    """A parameter of packed integers, whose every computation fails, as those of a quantised base may."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in ("__get__", "dim", "size", "is_floating_point", "is_complex", "data_ptr"):
            return super().__torch_function__(func, types, args, kwargs or {})
        pytest.fail(f"{func.__name__} of a shared tensor")


class Quantised(nn.Module):
    """A layer on a packed base, with the state of its quantisation on the parameter and on itself."""

    def __init__(self):
        super().__init__()
        self.weight = Packed(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
        self.weight.quant_state = {"scale": torch.ones(1)}
        self.quant_state = self.weight.quant_state
        self.weight.owners = self
        self.lora = nn.Linear(2, 2)


def is_packed(name, tensor):
    return isinstance(tensor, Packed)


def test_a_shared_tensor_that_resists_is_not_what_keeps_a_model_from_being_copied():
    model = nn.Sequential(Owner(threading.Lock()), Owner(None))
    model[1].weight = nn.Parameter(torch.zeros(1).as_subclass(Stubborn), requires_grad=False)
    with pytest.raises(TypeError, match=r"cannot copy 0 \(Owner\): its attribute own resists"):
        copy_model(model, share=lambda name, tensor: name == "1.weight")


@pytest.mark.parametrize("device", [None, "cpu"])
def test_shared_tensors_are_the_very_same_and_nothing_is_computed_with_them(device):
    model = nn.Sequential(Quantised())
    made = copy_model(model, device, share=is_packed)
    assert made[0].weight is model[0].weight
    assert made[0].quant_state is model[0].quant_state
    assert made[0].lora.weight is not model[0].lora.weight


def test_shared_tensors_are_shared_at_every_place_whatever_name_is_asked_for():
    model = Net()
    model.again = [model.inputs.weight]
    made = copy_model(model, share=lambda name, tensor: name in ("hidden.1.weight", "ids"))
    assert made.inputs.weight is made.hidden[1].weight is made.again[0] is model.inputs.weight
    assert made.ids is model.ids
    assert made.cache is not model.cache


def test_names_of_shared_tensors_are_those_without_wrappers():
    asked = []
    copy_model(nn.DataParallel(Compiled()), share=lambda name, tensor: asked.append(name))
    assert asked == ["block.weight", "rest.0.weight"]


def test_shared_tensors_inside_wrappers_are_shared():
    model = Compiled()
    made = copy_model(model, share=lambda name, tensor: name == "block.weight")
    assert made.block.weight is model.block._orig_mod.weight
    assert made.rest[0].weight is not model.rest[0].module.weight


def test_a_shared_tensor_stays_on_its_device():
    model = scalar()
    with unchanged(model), pytest.raises(ValueError, match=r"weight is to be shared.*is on cpu, not on device=meta"):
        copy_model(model, "meta", share=lambda name, tensor: True)


def test_share_must_be_a_function():
    with pytest.raises(TypeError, match=r"share must be a function share\(name, tensor\) -> bool, got \['weight'\]"):
        copy_model(scalar(), share=["weight"])


# ---- dtype=


@pytest.mark.parametrize("name", [False, True], ids=["torch.dtype", "name"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_average_may_be_held_in_more(dtype, name):
    model = scalar(1.0, dtype)
    averaged = AveragedModel(model, rule=EMA(1 - 1e-12), dtype="float64" if name else torch.float64)
    averaged.update_parameters(model)
    fill(model, 2.0)
    averaged.update_parameters(model)
    assert averaged.state.average["weight"].dtype == torch.float64
    assert averaged.state.average["weight"].item() == pytest.approx(1 + 1e-12, rel=1e-15)
    assert averaged.module.weight.dtype == dtype
    assert averaged.state_dict()["module.weight"].dtype == torch.float64
    other = AveragedModel(model, rule=EMA(1 - 1e-12), dtype=torch.float64)
    other.load_state_dict(averaged.state_dict())
    assert bits(other.state.average["weight"]) == bits(averaged.state.average["weight"])


def test_an_average_of_bfloat16_may_opt_out_of_float32():
    model = scalar(1.0, torch.bfloat16)
    averaged = AveragedModel(model, rule=EMA(0.9999), dtype=torch.bfloat16)
    for value in (1.0, 2.0):
        fill(model, value)
        averaged.update_parameters(model)
    assert averaged.state.average["weight"].dtype == torch.bfloat16
    assert averaged.state_dict()["module.weight"].dtype == torch.bfloat16
    assert averaged.module.weight.item() == 1.0  # which is why float32 is the default


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_an_average_may_be_held_in_less(narrow):
    model = Net().double()
    averaged = AveragedModel(model, rule=EMA(0.75), dtype=narrow)
    assert averaged.module.hidden[1].weight is averaged.module.inputs.weight
    for value in (0.0, 1.0):
        fill(model, value)
        averaged.update_parameters(model)
    assert {parameter.dtype for parameter in averaged.module.parameters()} == {narrow}
    assert averaged.module.ids.dtype == torch.int64
    assert all_values(averaged) == {0.25}
    assert {tensor.dtype for tensor in tensors(model).values()} == {torch.float64, torch.int64}


@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [
        (torch.int32, ValueError, "dtype must be real or complex floating of at least 16 bits, got int32"),
        (torch.float8_e4m3fn, ValueError, "at least 16 bits, got float8_e4m3fn"),
        ("float17", ValueError, "dtype must be one that torch has, got float17"),
        ("ema", TypeError, "dtype must be a dtype.*got 'ema'"),
        (3.5, TypeError, "dtype must be a dtype.*got 3.5"),
    ],
)
def test_a_dtype_must_be_able_to_hold_an_average(dtype, error, message):
    with pytest.raises(error, match=message):
        AveragedModel(scalar(), dtype=dtype)


class Made(TorchDispatchMode):
    """Collects the devices of new memory."""

    def __init__(self):
        super().__init__()
        self.devices = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.devices.append(result.device.type)
        return result


def test_a_copy_for_another_device_makes_no_stop_on_that_of_the_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model(torch.ones(2, 2)).sum().backward()
    with Made() as made:
        averaged = AveragedModel(model, device="meta")
    assert {tensor.device.type for tensor in tensors(averaged).values()} == {"meta"}
    assert made.devices == ["meta"] * 7
    assert all(isinstance(parameter, nn.Parameter) for parameter in averaged.module.parameters())
    assert [parameter.requires_grad for parameter in averaged.module.parameters()] == [True] * 4


# ---- tensors of other classes


class NoLerp(torch.Tensor):
    """A subclass that does not say how it is copied, which torch refuses, and that cannot take a step."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if "lerp" in func.__name__:
            raise NotImplementedError(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class NoClone(NoLerp):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.clone:
            raise NotImplementedError("no clones")
        return super().__torch_function__(func, types, args, kwargs)


def with_subclass(kind):
    model = nn.ModuleDict({"plain": nn.Linear(2, 2), "packed": nn.Linear(2, 2)})
    model["packed"].weight = nn.Parameter(torch.ones(2, 2).as_subclass(kind), requires_grad=False)
    model["packed"].weight.scale = torch.ones(3)
    return model


def test_a_subclass_without_copying_of_its_own_is_cloned():
    """With its class and its attributes; the step that it cannot take is refused by name before anything is written."""
    model = with_subclass(NoLerp)
    averaged = AveragedModel(model, rule=EMA(0.5))
    copied = averaged.module["packed"].weight
    assert type(copied) is NoLerp
    assert copied.scale is not model["packed"].weight.scale
    assert copied.data_ptr() != model["packed"].weight.data_ptr()
    averaged.update_parameters(model)
    fill(model["plain"], 5.0)
    with unchanged(averaged), pytest.raises(TypeError, match=r"tree\['packed\.weight'\]: cannot average NoLerp"):
        averaged.update_parameters(model)


def test_a_subclass_that_cannot_be_cloned_is_named():
    with pytest.raises(TypeError, match=r"cannot copy packed \(Linear\): its attribute weight resists"):
        AveragedModel(with_subclass(NoClone))


class NoCopy(NoLerp):
    """A subclass whose copy raises what is set, and whose clone is a plain tensor."""

    error: Exception

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__deepcopy__:
            raise cls.error
        result = super().__torch_function__(func, types, args, kwargs)
        return result.as_subclass(torch.Tensor) if func is torch.Tensor.clone else result


@pytest.mark.parametrize(
    ("error", "raised", "match"),
    [
        (
            RuntimeError("no copies"),
            TypeError,
            r"cannot copy packed \(Linear\): its attribute weight resists: no copies",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "^CUDA out of memory"),
    ],
    ids=["another class", "out of memory"],
)
def test_a_subclass_is_not_cloned_where_that_loses_its_class_or_memory_has_run_out(error, raised, match, monkeypatch):
    monkeypatch.setattr(NoCopy, "error", error, raising=False)
    with pytest.raises(raised, match=match):
        AveragedModel(with_subclass(NoCopy))
