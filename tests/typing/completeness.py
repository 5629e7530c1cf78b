"""Ask pyright whether the types of all public names are known: those in the ``__all__`` of their module.

python -m tests.typing.completeness
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import functavg

ROOT = Path(functavg.__file__).parent


def public_names() -> set[str]:
    """Return what each module lists in ``__all__``, by its full name."""
    names, modules = set(), set()
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        modules.add(module)
        for node in ast.parse(path.read_text()).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and target.id == "__all__":
                names |= {f"{module}.{name}" for name in ast.literal_eval(node.value)}  # type: ignore[attr-defined]
    return names - modules


def is_within(symbol: str, names: set[str]) -> bool:
    """Tell whether a symbol is one of the names or a member of one."""
    parts = symbol.split(".")
    return any(".".join(parts[:end]) in names for end in range(1, len(parts) + 1))


def main() -> None:
    command = [sys.executable, "-m", "pyright", "--verifytypes", "functavg", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    symbols: list[dict[str, Any]] = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    names = public_names()
    public = [symbol for symbol in symbols if is_within(symbol["name"], names)]
    unknown = [symbol for symbol in public if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]]
    for symbol in unknown:
        print(symbol["name"], *(found["message"] for found in symbol["diagnostics"]), sep="\n    ")
    print(f"{len(public) - len(unknown)} of {len(public)} public names and members have a known type")
    sys.exit(bool(unknown or not public))


if __name__ == "__main__":
    main()
