"""Trees: flattening, pairing by path, names of leaves. The only importer of optree."""

from __future__ import annotations

__all__: list[str] = []

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import optree

from functavg.advice import advise
from functavg.scalars import is_compiling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from functavg.state import PyTree

NAMESPACE = "functavg"

# How optree spells paths through a node of JAX, by the class of its keys.
_ENTRIES: dict[str, type[optree.PyTreeEntry]] = {
    "DictKey": optree.MappingEntry,
    "GetAttrKey": optree.GetAttrEntry,
    "SequenceKey": optree.SequenceEntry,
}


@dataclass(eq=False, slots=True)
class NamedList:
    """A tree of leaves in one list, whose names are spelled only on request.

    Args:
        leaves: the leaves.
        spell: returns the name of each leaf.
    """

    leaves: list[Any]
    spell: Callable[[], Sequence[str]]


@dataclass(eq=False, slots=True)
class FlatSpec:
    """The structure of a NamedList, or of a dict of leaves in its own order, whatever the leaves are."""

    spell: Callable[[], Sequence[Any]]
    num_leaves: int
    is_dict: bool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatSpec) and (self.spell == other.spell or self.spell() == other.spell())

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def paths(self) -> list[tuple[Any, ...]]:
        """Return the keys that lead to each leaf."""
        return [(key,) for key in self.spell()]

    def unflatten(self, leaves: Sequence[Any]) -> dict[Any, Any] | NamedList:
        """Return the tree of these leaves."""
        return dict(zip(self.spell(), leaves, strict=True)) if self.is_dict else NamedList(list(leaves), self.spell)


Spec = FlatSpec | optree.PyTreeSpec


def flatten_flat(tree: dict[Any, Any] | NamedList) -> tuple[list[Any], FlatSpec]:
    """Return the leaves and the structure of a tree without nodes inside, in its own order."""
    if isinstance(tree, NamedList):
        return tree.leaves, FlatSpec(tree.spell, len(tree.leaves), False)
    keys = tuple(tree)
    return list(tree.values()), FlatSpec(lambda: keys, len(keys), True)


def flatten(tree: PyTree) -> tuple[list[Any], Spec]:
    """Return the leaves and the structure of a tree; ``None`` is structure.

    Containers are optree's. Where the user has loaded JAX, nodes registered with ``jax.tree_util`` are nodes too.
    """
    if type(tree) is NamedList:
        return flatten_flat(tree)
    leaves, spec = optree.tree_flatten(tree, namespace=NAMESPACE)
    # A compiler cannot look into JAX: nodes are known from `init` on, which runs before.
    if "jax.tree_util" in sys.modules and not is_compiling() and _register_jax_nodes(leaves):
        return flatten(tree)
    return leaves, spec


def unflatten(spec: Spec, leaves: Sequence[Any]) -> PyTree:
    """Return the tree of this structure and these leaves."""
    return spec.unflatten(leaves)


def tree_map(fn: Callable[..., Any], tree: PyTree) -> PyTree:
    """Return the tree with ``fn`` applied to each leaf."""
    leaves, spec = flatten(tree)
    return unflatten(spec, [fn(leaf) for leaf in leaves])


def register(node: type, flatten_func: Callable[[Any], Any], unflatten_func: Callable[[Any, Any], Any]) -> None:
    """Make instances of a class containers of trees."""
    optree.register_pytree_node(node, flatten_func, unflatten_func, namespace=NAMESPACE)


def paths(spec: Spec) -> list[str]:
    """Return the expression that reads each leaf: ``tree['encoder']['weight']``."""
    if isinstance(spec, FlatSpec):
        return [f"tree[{key!r}]" for key in spec.spell()]
    return [accessor.codify("tree") for accessor in optree.treespec_accessors(spec)]


def keys(spec: Spec) -> list[tuple[Any, ...]]:
    """Return the keys, indices and fields that lead to each leaf; optree's accessors take ten times as long."""
    if isinstance(spec, FlatSpec):
        return spec.paths()
    if spec.is_leaf():
        return [()]
    heads = getattr(spec.type, "_fields", None) or spec.entries()
    return [(head, *rest) for head, child in zip(heads, spec.children(), strict=True) for rest in keys(child)]


def names(spec: Spec) -> list[str]:
    """Return the keys of each leaf joined by dots, as ``torch.nn.Module.named_parameters`` does."""
    return [".".join(map(str, path)) for path in keys(spec)]


def pair_prefix(prefix: PyTree, tree: PyTree) -> list[tuple[Any, PyTree]]:
    """Return each leaf of ``prefix`` with the subtree in its place in ``tree``; ValueError if it is not a prefix."""
    leaves, spec = optree.tree_flatten(prefix, namespace=NAMESPACE)
    return list(zip(leaves, spec.flatten_up_to(tree), strict=True))


def align(old: Spec, new: Spec, leaves: list[Any], old_leaves: Sequence[Any] = ()) -> list[Any]:
    """Return the leaves of ``new`` in the order of ``old``, paired by path.

    Raises:
        TypeError: one is not a tree but a module or an iterator; the message says how to make it one.
        ValueError: the two do not have the same paths; the message names what is missing and what is unexpected.
    """
    # Compilers of torch before 2.13 cannot compare the structures of optree.
    if old.paths() == new.paths() if type(old) is not FlatSpec and is_compiling() else old == new:
        return leaves
    by_path = dict(zip(new.paths(), leaves, strict=True))
    old_paths = old.paths()
    if set(old_paths) == by_path.keys():
        return [by_path[path] for path in old_paths]
    for path, leaf in [*zip(paths(old), old_leaves, strict=False), *zip(paths(new), leaves, strict=True)]:
        if advice := advise(leaf):
            raise TypeError(f"{path}: expected an array, got {type(leaf).__name__}{advice}")
    known, given = dict.fromkeys(paths(old)), dict.fromkeys(paths(new))
    missing = [path for path in known if path not in given]
    unexpected = [path for path in given if path not in known]
    raise ValueError(
        "the params do not have the structure of the average: "
        f"missing {some(missing)}; unexpected {some(unexpected)}. "
        f"Expected {old.num_leaves} leaves, got {new.num_leaves}. Pass the tree that `init` saw, "
        "or grow the state with `rule.extend(params, state)`"
    )


def some(names: list[str], most: int = 8) -> str:
    """Return names for a message, cut if there are many."""
    shown = ", ".join(names[:most]) or "nothing"
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _register_jax_nodes(leaves: list[Any]) -> bool:
    """Register with optree the classes among the leaves that JAX knows as nodes; tell whether there were any."""
    all_leaves = sys.modules["jax.tree_util"].all_leaves
    examples = dict(zip(map(type, leaves), leaves, strict=True))
    found = [node for node, leaf in examples.items() if not all_leaves([leaf])]
    for node in found:
        children, _ = _flatten_one_level(examples[node])
        keys = {type(path[0]).__name__ for path, _ in children}
        optree.register_pytree_node(
            node,
            _flatten_jax_node,
            _unflatten_jax_node,
            path_entry_type=_ENTRIES.get("".join(keys), optree.FlattenedEntry),
            namespace=NAMESPACE,
        )
    return bool(found)


def _flatten_one_level(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    flatten_with_path = sys.modules["jax.tree_util"].tree_flatten_with_path
    children, spec = flatten_with_path(node, is_leaf=lambda child: child is not node)
    return children, spec


def _flatten_jax_node(node: Any) -> tuple[list[Any], Any, tuple[Any, ...]]:
    children, spec = _flatten_one_level(node)
    return [child for _, child in children], spec, tuple(_jax_key(path[0]) for path, _ in children)


def _unflatten_jax_node(spec: Any, children: Any) -> Any:
    return spec.unflatten(children)


def _jax_key(entry: Any) -> Any:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)
