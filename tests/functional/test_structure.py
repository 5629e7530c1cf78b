"""Trees are paired by path, strictly; every error says where, what was expected, what came and what to do."""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch

import functavg
from functavg import trees
from tests.tables import KINDS, LIBRARIES, read

ONE = np.ones(2)


class Layer(NamedTuple):
    weight: Any
    bias: Any


class Pair:
    """A user's container, registered with optree."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right

    def __repr__(self) -> str:
        return f"Pair({self.left}, {self.right})"


optree.register_pytree_node(
    Pair,
    lambda pair: ((pair.left, pair.right), None, ("left", "right")),
    lambda metadata, children: Pair(*children),
    namespace="functavg",
)


def update(old: Any, new: Any) -> Any:
    rule = functavg.EMA(0.5)
    return rule.update(new, rule.update(old, rule.init(old))).average


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ({"b": ONE}, {"a": ONE, "b": ONE}, r"missing nothing; unexpected tree\['a'\]\. Expected 1 leaves, got 2"),
        ({"a": ONE, "b": ONE}, {"b": ONE}, r"missing tree\['a'\]; unexpected nothing\. Expected 2 leaves, got 1"),
        ({"a": ONE}, {"b": ONE}, r"missing tree\['a'\]; unexpected tree\['b'\]"),
        ({"a": {"w": ONE}}, {"a": ONE}, r"missing tree\['a'\]\['w'\]; unexpected tree\['a'\]"),
        ([ONE, ONE], [ONE], r"missing tree\[1\]"),
        (Layer(ONE, ONE), Layer(ONE, None), r"missing tree\.bias"),
        (Pair(ONE, ONE), Pair(ONE, [ONE]), r"missing tree.*right.*; unexpected tree.*right"),
        (ONE, {}, r"missing tree; unexpected nothing"),
        ({}, {"a": ONE}, r"unexpected tree\['a'\]"),
        ({str(i): ONE for i in range(11)}, {}, r"missing (tree\['\d+'\], ){7}tree\['\d+'\] and 3 more; unexpected"),
    ],
    ids=str,
)
def test_missing_and_unexpected_leaves_are_named(old: Any, new: Any, message: str) -> None:
    """S8."""
    with pytest.raises(ValueError, match="do not have the structure of the average: .*" + message) as error:
        update(old, new)
    advice = "Pass the tree that `init` saw, or grow the state with `rule.extend(params, state)`"
    assert str(error.value).endswith(advice)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 3), (3,), (), (3, 1), (9,), (3, 3, 1)])
def test_nothing_is_broadcast(kind: str, shape: tuple[int, ...]) -> None:
    """S5."""
    make = KINDS[kind].make
    got = str(shape).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=rf"^tree\['w'\]: expected shape \(3, 3\), got {got}; nothing is broadcast"):
        update({"w": make(np.ones((3, 3)))}, {"w": make(np.ones(shape))})


def test_an_empty_parameter_is_explained() -> None:
    with pytest.raises(ValueError, match=r"got \(0,\); a parameter of size 0 is one that an engine has partitioned"):
        update(torch.ones(3), torch.ones(0))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (torch.ones(2), ONE, "tree: expected a torch tensor, got ndarray"),
        (torch.ones(()), 1.0, "tree: expected a torch tensor, got float"),
        (ONE, torch.ones(2), "tree: expected a numpy array or a number, got Tensor"),
        (ONE, "text", "tree: expected a numpy array or a number, got str"),
        (ONE, ONE + 0j, "tree: expected float64 or what it can hold, got complex128"),
        (np.array([True]), np.array([1]), "tree: expected bool or what it can hold, got int64"),
        (torch.ones(2), torch.ones(2) + 0j, "tree: expected torch.float32 or what it can hold, got torch.complex64"),
        (torch.tensor([1]), torch.tensor([1.0]), "tree: expected torch.int64 or what it can hold, got torch.float32"),
    ],
    ids=str,
)
def test_another_library_or_kind_is_named(old: Any, new: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        update(old, new)


def test_another_library_or_kind_is_named_for_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    for new, message in (
        (torch.ones(2), r"tree: expected an array of jax\.numpy, got Tensor"),
        ("text", r"tree: expected an array of jax\.numpy, got str"),
        (jnp.ones(2, jnp.complex64), "tree: expected float32 or what it can hold, got complex64"),
        (np.array(["a", "b"]), "tree: expected an array of numbers, got a numpy array of dtype"),
    ):
        with pytest.raises(TypeError, match=message):
            update(jnp.ones(2), new)


@pytest.mark.parametrize("inplace", [False, True])
def test_an_ordered_dict_and_dicts_in_any_order_pair_by_path(inplace: bool) -> None:
    def ordered(**leaves: Any) -> Any:
        return collections.OrderedDict(leaves)

    trees_ = [
        ordered(z=np.zeros(2), a=np.ones(3)),
        {"a": np.ones(3), "z": np.full(2, 2.0)},
        ordered(a=np.ones(3), z=np.full(2, 4.0)),
        collections.defaultdict(list, z=np.full(2, 6.0), a=np.ones(3)),
    ]
    rule = functavg.SWA()
    state = rule.init(trees_[0])
    for tree in trees_[1:]:
        state = rule.update(tree, state, inplace=inplace)
    assert type(state.average) is collections.OrderedDict
    assert list(state.average) == ["z", "a"]
    assert state.average["z"].tolist() == [4.0, 4.0]
    assert state.average["a"].tolist() == [1.0, 1.0, 1.0]


def test_containers_come_back_as_they_were() -> None:
    tree = {"layer": Layer(ONE, None), "pair": Pair([ONE], (ONE,)), "deque": collections.deque([ONE]), "empty": ()}
    average = update(tree, tree)
    assert type(average["layer"]) is Layer
    assert average["layer"].bias is None
    assert type(average["pair"]) is Pair
    assert type(average["pair"].right) is tuple
    assert type(average["deque"]) is collections.deque
    assert average["empty"] == ()


def test_dataclasses_registered_with_optree_are_containers() -> None:
    @optree.dataclasses.dataclass(namespace="functavg")
    class Weights:
        kernel: Any
        name: str = optree.dataclasses.field(pytree_node=False, default="dense")

    average = update(Weights(np.zeros(2)), Weights(np.ones(2)))
    assert type(average) is Weights
    assert average.name == "dense"
    assert average.kernel.tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match=r"tree\.kernel: expected shape \(2,\), got \(3,\)"):
        update(Weights(np.zeros(2)), Weights(np.ones(3)))


@pytest.mark.parametrize(
    ("register", "keys", "path"),
    [
        ("dataclass", ("kernel", "bias"), ".bias"),
        ("dict keys", ("k", "b"), "['b']"),
        ("sequence keys", (0, 7), "[7]"),
        ("mixed keys", ("k", 7), "[<flat index 7>]"),
        ("no keys", (0, 1), "[<flat index 1>]"),
    ],
)
def test_nodes_registered_with_jax_are_containers(register: str, keys: tuple[Any, Any], path: str) -> None:
    """Equinox modules and Flax states are such nodes; they may be registered after functavg first saw them."""
    jax = pytest.importorskip("jax")
    from jax.tree_util import DictKey, SequenceKey

    @dataclasses.dataclass
    class Node:
        kernel: Any
        bias: Any

    with pytest.raises(TypeError, match=r"^tree\['node'\]: cannot average Node: it is no array"):
        functavg.EMA().init({"node": Node(ONE, ONE)})
    if register == "dataclass":
        jax.tree_util.register_dataclass(Node, ["kernel", "bias"], [])
    elif register == "no keys":
        jax.tree_util.register_pytree_node(
            Node, lambda node: ((node.kernel, node.bias), None), lambda _, children: Node(*children)
        )
    else:
        make = {
            "dict keys": (DictKey("k"), DictKey("b")),
            "sequence keys": (SequenceKey(0), SequenceKey(7)),
            "mixed keys": (DictKey("k"), SequenceKey(7)),
        }[register]
        jax.tree_util.register_pytree_with_keys(
            Node,
            lambda node: (list(zip(make, (node.kernel, node.bias), strict=True)), None),
            lambda _, children: Node(*children),
        )
    average = update({"node": Node(np.zeros(2), {"x": np.zeros(3)})}, {"node": Node(np.ones(2), {"x": np.ones(3)})})
    assert type(average["node"]) is Node
    assert average["node"].kernel.tolist() == [0.5, 0.5]
    assert average["node"].bias["x"].tolist() == [0.5] * 3
    _, spec = trees.flatten({"node": Node(ONE, {"x": ONE})})
    assert spec.paths() == [("node", keys[0]), ("node", keys[1], "x")]
    with pytest.raises(ValueError, match=re.escape(f"tree['node']{path}['x']: expected shape (3,), got (2,)")):
        update({"node": Node(np.zeros(2), {"x": np.zeros(3)})}, {"node": Node(np.ones(2), {"x": np.ones(2)})})


def test_a_jax_node_whose_keys_have_no_name_is_named_by_their_text() -> None:
    jax = pytest.importorskip("jax")

    class Node:
        pass

    class Key:
        def __str__(self) -> str:
            return "<odd>"

    jax.tree_util.register_pytree_with_keys(Node, lambda node: ([(Key(), ONE)], None), lambda _, children: Node())
    assert trees.flatten(Node())[1].paths() == [("<odd>",)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_params_and_state_swapped(library: str) -> None:
    rule = functavg.EMA()
    params = {"w": LIBRARIES[library].make(ONE)}
    state = rule.init(params)
    with pytest.raises(TypeError, match=r"got an AverageState; `params` and `state` are swapped$"):
        rule.update(state, params)
    with pytest.raises(TypeError, match=r"state must be an AverageState, got dict$"):
        rule.update(params, params)
    with pytest.raises(TypeError, match=r"params must be a tree of arrays, got an AverageState$"):
        rule.update(state, state)
    with pytest.raises(TypeError, match=r"state must be an AverageState, got tuple$"):
        rule.update(params, tuple(state))


def test_names_join_keys_with_dots_and_paths_are_expressions() -> None:
    tree = {"encoder": {"weight": ONE}, "blocks": [ONE, Layer(ONE, ONE)]}
    _, spec = trees.flatten(tree)
    assert trees.names(spec) == ["blocks.0", "blocks.1.weight", "blocks.1.bias", "encoder.weight"]
    for path in trees.paths(spec):
        assert eval(path, {"tree": tree}) is ONE
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    nested = [{"weight": ONE, "bias": ONE}, {"weight": ONE, "bias": ONE}]
    assert set(trees.names(trees.flatten(nested)[1])) == set(dict(model.named_parameters()))


def test_tree_map_maps_leaves_and_keeps_none() -> None:
    assert trees.tree_map(read, {"a": torch.ones(()), "b": None}) == {"a": 1.0, "b": None}
