"""Measures updates against the limit of memory and against other libraries: ``python -m tests.benchmarks``."""

from __future__ import annotations

import argparse
import gc
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.markdown import Markdown

import functavg
from functavg import swa_utils
from tests.benchmarks import checkpoints, contenders, shapes, sharded
from tests.benchmarks.measure import Work, counted_host_reads, extra_peak, interleaved, kernel_launches
from tests.benchmarks.report import Target, against, markdown

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"
TARGET_HEADER = ("work", "contender", "against", "ratio", "target", "met")
TIME_HEADER = ("contender", "least, ms", "median, ms", "× limit")


def main() -> None:
    """Measure, print and write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31, help="rounds, in which all contenders take turns")
    parser.add_argument("--large", action="store_true", help="measure the scaling up to 10^9 parameters")
    parser.add_argument("--output", type=Path, default=DOCUMENT, help="the document to write")
    arguments = parser.parse_args()
    targets: list[tuple[str, ...]] = []
    sections = list(_sections(arguments.rounds, targets, arguments.large))
    text = "\n\n".join([_HEAD.format(**_machine()), markdown(TARGET_HEADER, targets), *sections]) + "\n"
    Console().print(Markdown(text))
    arguments.output.write_text(text)


def _sections(rounds: int, targets: list[tuple[str, ...]], large: bool) -> Iterator[str]:
    """Measure one work after another; yield its section and add its rows to the targets."""
    for title, shape, goals in _MODULES:
        yield _section(title, contenders.of_module(shapes.build(shape()).to(_device())), goals, rounds, targets)
    model = shapes.build(shapes.gpt2()).to(_device())
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    pure = {
        "foreach_lerp": contenders.raw_foreach_pure(params),
        "functional, pure": contenders.functional(functavg.EMA(0.999), params, inplace=False),
    }
    goals = [Target("GPT-2, pure", "functional, pure", "foreach_lerp", 1.15)]
    yield _section("GPT-2, new memory for each result", pure, goals, rounds, targets)
    low = contenders.of_low_precision(model.bfloat16())
    goals = [
        Target("GPT-2 bfloat16", "AveragedModel EMA", "per leaf, with rounding", 1.8, faster=True),
        Target("GPT-2 bfloat16", "functional, in place", "per leaf", 2.5, faster=True),
    ]
    yield _section("GPT-2 in bfloat16, averaged in float32", low, goals, rounds, targets)
    goals = [Target("numpy, 50 M float32", "functional, in place", "a + w * (b - a)", 2.5, faster=True)]
    yield _section("numpy, 50 M float32", contenders.of_numpy(), goals, rounds, targets)
    goals = [Target("100 DTensors of 64 × 64", "DTensors, in place", "local tensors, in place", 1.3)]
    title = "100 DTensors of 64 × 64 on a mesh of one process"
    yield _section(title, sharded.of_shards(), goals, 10 * rounds, targets)  # they take a fraction of a millisecond
    yield _memory(targets)
    yield _host_reads(targets)
    yield checkpoints.of_files(targets)
    yield _scaling(large)
    yield _cuda(targets)


def _section(
    title: str, works: dict[str, Work], goals: list[Target], rounds: int, targets: list[tuple[str, ...]]
) -> str:
    times = interleaved(works, rounds)
    targets += [goal.row(times) for goal in goals]
    gc.collect()
    return f"## {title}\n\n{markdown(TIME_HEADER, against(times, next(iter(times))))}"


def _memory(targets: list[tuple[str, ...]]) -> str:
    rows = []
    for title, dtype in (("GPT-2 float32", torch.float32), ("GPT-2 bfloat16", torch.bfloat16)):
        model = shapes.build(shapes.gpt2(), dtype).to(_device())
        averaged = swa_utils.AveragedModel(model, rule=functavg.EMA(0.999))
        averaged.update_parameters(model)
        peak = extra_peak(lambda averaged=averaged, model=model: averaged.update_parameters(model))
        shown = "not told" if peak is None else f"{peak / 2**20:.1f} MiB"
        rows.append((title, shown))
        met = "?" if peak is None else "yes" if peak <= 16 * 2**20 else "no"
        targets.append((title, "AveragedModel EMA", "extra peak memory", shown, "≤ 16 MiB", met))
    return "## Extra peak memory of an update in place\n\n" + markdown(("model", "peak"), rows)


def _host_reads(targets: list[tuple[str, ...]]) -> str:
    model = shapes.build(shapes.resnet50()).to("meta")
    averaged = swa_utils.AveragedModel(model, "meta", rule=functavg.EMA(0.999), use_buffers=True)
    with counted_host_reads() as reads:
        for _ in range(3):
            averaged.update_parameters(model)
    met = "yes" if not reads else "no"
    targets.append(("ResNet-50 on meta", "AveragedModel EMA", "host reads per update", str(len(reads)), "0", met))
    return (
        "## Host reads\n\nThree updates of a model on the `meta` device, whose tensors have no values to read, with "
        f"all buffers averaged: {len(reads)} reads."
    )


def _cuda(targets: list[tuple[str, ...]]) -> str:
    title = "## Kernel launches on CUDA\n\n"
    if not torch.cuda.is_available():
        return title + "Not measured: this machine has no such device."
    rows = []
    for name, shape in (("GPT-2 small", shapes.gpt2), ("2000 tensors of 512", shapes.many)):
        model = shapes.build(shape()).cuda()
        averaged = swa_utils.AveragedModel(model, rule=functavg.EMA(0.999))
        averaged.update_parameters(model)
        torch.cuda.set_sync_debug_mode("error")
        try:
            launches = kernel_launches(lambda averaged=averaged, model=model: averaged.update_parameters(model))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        rows.append((name, str(launches)))
        targets.append((f"{name} on CUDA", "AveragedModel EMA", "synchronisations per update", "0", "0", "yes"))
    return title + "Measured where a synchronisation is an error.\n\n" + markdown(("model", "launches"), rows)


def _scaling(large: bool) -> str:
    def time_of(model: torch.nn.Module, rounds: int) -> float:
        averaged = swa_utils.AveragedModel(model, rule=functavg.EMA(0.999))
        averaged.update_parameters(model)
        return interleaved({"ours": lambda: averaged.update_parameters(model)}, rounds)["ours"].least

    tensors = [10**2, 10**3, 10**4, 10**5]
    rows = [
        (f"{n:,} tensors of 16", f"{1e6 * time_of(shapes.build(shapes.many(n, 16)), 7) / n:.2f} µs a tensor")
        for n in tensors
    ]
    for size in [10**6, 10**7, 10**8, *([10**9] if large else [])]:
        model = shapes.build(iter([(f"{index}.weight", (size // 10,)) for index in range(10)]))
        rows.append((f"{size:,} parameters", f"{1e9 * time_of(model, 7) / size:.3f} ns a parameter"))
        del model
        gc.collect()
    return "## Cost in the number of tensors and of parameters\n\n" + markdown(("size", "cost"), rows)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _machine() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    return {
        "machine": f"{platform.machine()}, {device}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _module_targets(title: str) -> list[Target]:
    return [
        Target(title, "AveragedModel EMA", "limit", 1.10),
        Target(title, "AveragedModel avg_fn", "torch avg_fn", 0.95, faster=True),
        Target(title, "AveragedModel EMA", contenders.PEERS, 1.05),
    ]


_MODULES: list[tuple[str, Callable[[], shapes.Shapes], list[Target]]] = [
    (
        "GPT-2 small",
        shapes.gpt2,
        [*_module_targets("GPT-2"), Target("GPT-2", "AveragedModel SWA", "torch SWA", 9.0, faster=True)],
    ),
    ("ResNet-50", shapes.resnet50, _module_targets("ResNet-50")),
    ("ViT-B/16", shapes.vit_b16, []),
    (
        "2000 tensors of 512",
        shapes.many,
        [
            Target("2000 tensors", "AveragedModel EMA", "torch EMA multi", 3.5, faster=True),
            Target("2000 tensors", "functional, in place", "foreach_lerp_", 2.5),
        ],
    ),
]

_HEAD = """# Performance

One update of an average of weights, against the limit of memory and against other libraries. The limit is one
contiguous `lerp_` of as many elements. All contenders of a table take turns in one process; ratios are of least times.
How far apart works are that do the same, such as `AveragedModel` by EMA and by SWA, tells how far to trust them. Works
that make new tensors pay for new pages here; where the allocator has pages left over, they can be twice as fast.
Written by `tox -e bench` on {machine}, with Python {python}, torch {torch} and numpy {numpy}."""

if __name__ == "__main__":
    main()
