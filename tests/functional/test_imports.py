"""Imports go downwards only, and no array framework is loaded that the user did not load."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import functavg

ROOT = Path(functavg.__file__).parent

# From the top down; a module belongs to the longest name that begins its own. See the design, section 1.
LAYERS = [
    ["functavg"],
    ["functavg.__main__"],
    ["functavg.commands"],
    ["functavg.integrations"],
    ["functavg.checkpoints"],
    ["functavg.swa_utils"],
    ["functavg.nn"],
    ["functavg.extras"],
    ["functavg.profiles", "functavg.posthoc"],
    ["functavg.functional", "functavg.saving"],
    ["functavg.combinators"],
    ["functavg.rules"],
    ["functavg.plan"],
    ["functavg.kernels"],
    [
        "functavg.advice",
        "functavg.state",
        "functavg.trees",
        "functavg.scalars",
        "functavg.counts",
        "functavg.identity",
        "functavg.checks",
        "functavg.units",
        "functavg.schedules",
        "functavg.progress",
    ],
]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(module: str) -> set[str]:
    """Return every module that a source names, also under TYPE_CHECKING and within functions."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide what is imported"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & SOURCES.keys() or {node.module}
            if not names <= SOURCES.keys():
                found.add(node.module)
    return found


def layer(module: str) -> int:
    fitting = [
        (len(name), level)
        for level, names in enumerate(LAYERS)
        for name in names
        if module == name or (name != "functavg" and module.startswith(name + "."))
    ]
    assert fitting, f"{module} belongs to no layer"
    return max(fitting)[1]


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_downwards_only(module: str) -> None:
    own = layer(module)
    upwards = {name for name in imports(module) if name in SOURCES and layer(name) < own}
    assert not upwards


def test_within_a_layer_no_imports_go_round() -> None:
    graph = {module: imports(module) & SOURCES.keys() - {module} for module in SOURCES}
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_optree_is_imported_by_trees_alone() -> None:
    users = {name for name in SOURCES if any(used.split(".")[0] == "optree" for used in imports(name))}
    assert users == {"functavg.trees"}


@pytest.mark.slow
def test_the_core_imports_torch_in_its_kernels_only_and_jax_nowhere() -> None:
    users = {name for name in SOURCES if any(used.split(".")[0] == "torch" for used in imports(name))}
    core = {name for name in users if layer(name) >= layer("functavg.functional")}
    assert core == {name for name in SOURCES if name.startswith("functavg.kernels.torch")} - {"functavg.kernels.torch"}
    assert not any(used.split(".")[0] in ("jax", "jaxlib") for name in SOURCES for used in imports(name))


def test_the_adapter_has_no_arithmetic() -> None:
    """``averaged_model`` pairs tensors, calls a rule and keeps a count."""
    assert not {used for used in imports("functavg.nn.averaged_model") if used.startswith("functavg.kernels")}


def test_every_module_says_what_of_it_is_for_users() -> None:
    """By ``__all__``, which is empty where nothing is; packages that only pass names on say so by ``as``."""
    silent = []
    for module, path in SOURCES.items():
        nodes = ast.parse(path.read_text()).body
        if any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in nodes) and not any(
            isinstance(node, (ast.Assign, ast.AnnAssign)) and "__all__" in ast.unparse(node) for node in nodes
        ):
            silent.append(module)
    assert not silent, "add __all__, such as: __all__: list[str] = []"


def loaded_by(script: str) -> set[str]:
    """Return the top-level modules that a script loads in a fresh process."""
    script += "\nimport sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_functavg_loads_no_array_framework_but_numpy() -> None:
    loaded = loaded_by("import functavg; [getattr(functavg, name) for name in ('EMA', 'SWA', 'lerp', 'units')]")
    assert "numpy" in loaded
    assert not {"torch", "jax", "jaxlib", "ml_dtypes", "matplotlib"} & loaded


def test_the_integrations_load_no_framework_until_one_of_them_is_imported() -> None:
    loaded = loaded_by("import functavg, functavg.integrations")
    assert not {"torch", "transformers", "accelerate", "peft", "lightning", "pytorch_lightning"} & loaded


def test_averaging_numpy_arrays_never_loads_torch() -> None:
    loaded = loaded_by(
        """
import functavg, numpy as np
params = {"w": np.ones(3, np.float16), "b": 1.0, "n": 3}
for rule in (functavg.EMA(0.9), functavg.SWA(), functavg.PowerEMA(2), functavg.AvgFn(lambda a, x, n: (a + x) / 2)):
    state = rule.init(params, dtype="float64")
    for inplace in (False, True):
        state = rule.update(params, state, inplace=inplace, steps=2)
    functavg.cast_like(rule.extend(params | {"new": np.ones(1)}, state).average, params | {"new": np.ones(1)})
    try:
        rule.init({"w": object()})
    except TypeError:
        pass
    try:
        rule.init(params, dtype="bfloat16")  # ml_dtypes would bring it
    except ValueError as error:
        assert "dtype must be one that numpy has, got bfloat16" in str(error)
    else:
        raise AssertionError
"""
    )
    assert not {"torch", "jax", "ml_dtypes"} & loaded


@pytest.mark.slow
def test_averaging_tensors_never_loads_jax_and_names_dtypes_without_ml_dtypes() -> None:
    pytest.importorskip("torch")
    loaded = loaded_by(
        """
import functavg, torch
rule = functavg.EMA(0.9)
state = rule.init({"w": torch.ones(3)}, dtype="bfloat16")
assert rule.update({"w": torch.ones(3)}, state).average["w"].dtype == torch.bfloat16
"""
    )
    assert not {"jax", "ml_dtypes"} & loaded


def test_a_module_that_stands_in_for_jax_or_torch_is_not_taken_for_it() -> None:
    """``None`` in ``sys.modules`` is how an import is blocked."""
    loaded_by(
        """
import sys
sys.modules["jax"] = sys.modules["torch"] = None
import functavg, numpy as np
rule = functavg.SWA()
assert rule.update(np.ones(2), rule.init(np.ones(2))).count == 1
"""
    )


@pytest.mark.parametrize(
    "use",
    [
        "functavg.AveragedModel",
        "functavg.swapped",
        "functavg.checkpoints",
        "from functavg import update_bn",
        "from functavg.swa_utils import AveragedModel",
        "import functavg.nn",
        "import functavg.checkpoints.errors",
    ],
)
def test_what_needs_torch_says_what_to_install_where_it_is_missing(use: str) -> None:
    loaded_by(
        f"""
import sys
sys.modules["torch"] = None
import functavg
try:
    {use}
except ModuleNotFoundError as error:
    assert error.name == "torch"
    assert str(error).startswith("functavg.")
    assert str(error).endswith(" needs torch, which is not installed: pip install 'functavg[torch]'")
else:
    raise AssertionError
"""
    )


def test_a_torch_that_misses_something_of_its_own_says_so_itself(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import sympy_of_torch")
    loaded_by(
        f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import functavg
try:
    functavg.AveragedModel
except ModuleNotFoundError as error:
    assert error.name == "sympy_of_torch"
    assert "functavg" not in str(error)
else:
    raise AssertionError
"""
    )


@pytest.mark.parametrize("missing", ["torch", "sympy_of_torch"])
def test_only_a_missing_torch_is_told_to_be_installed(missing: str, tmp_path: Path, monkeypatch: Any) -> None:
    if missing == "torch":
        monkeypatch.setitem(sys.modules, "torch", None)
    else:
        (tmp_path / "torch.py").write_text(f"import {missing}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(ModuleNotFoundError) as raised:
        _ = functavg.AveragedModel
    assert raised.value.name == missing
    assert ("functavg.AveragedModel needs torch, which is not installed" in str(raised.value)) == (missing == "torch")


def test_without_torch_only_what_works_is_listed() -> None:
    """``help(functavg)`` and ``inspect`` read all that ``dir`` lists."""
    loaded_by(
        """
import importlib.util, inspect
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "torch" else find_spec(name)
import functavg
names = [name for name, _ in inspect.getmembers(functavg)]
assert "EMA" in names
assert not {"AveragedModel", "checkpoints", "swa_utils"} & set(names)
assert {"AveragedModel", "checkpoints", "swa_utils"} <= set(functavg.__all__)
"""
    )


@pytest.mark.slow
def test_jax_params_may_live_on_other_devices_than_the_average() -> None:
    pytest.importorskip("jax")
    loaded_by(
        """
import os
os.environ["JAX_PLATFORMS"], os.environ["XLA_FLAGS"] = "cpu", "--xla_force_host_platform_device_count=2"
import functavg, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
one, other = jax.devices()
sharded = NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec("x"))
for rule in (functavg.EMA(0.5), functavg.AvgFn(lambda a, x, n: (a + x) / 2)):
    for home in (other, sharded):
        for count in (0, jnp.asarray(0)):
            state = rule.init({"w": jnp.zeros(2)}, device=home)._replace(count=count)
            for place in (one, other, sharded):
                state = rule.update({"w": jax.device_put(jnp.ones(2), place)}, state)
                assert state.average["w"].device == home, (state.average["w"].device, home)
            state = rule.update({"w": np.ones(2)}, state)
            assert state.average["w"].device == home
            assert state.average["w"].tolist() == [1.0, 1.0]
assert functavg.cast_like(jax.device_put(jnp.ones(2), one), jax.device_put(jnp.ones(2), other)).device == other
"""
    )
