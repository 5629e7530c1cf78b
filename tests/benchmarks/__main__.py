"""Measures updates against the limit of memory and against other libraries: ``python -m tests.benchmarks``."""

from __future__ import annotations

import argparse
import gc
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.markdown import Markdown

import functavg
from functavg import swa_utils
from tests.benchmarks import checkpoints, contenders, measure, shapes, sharded
from tests.benchmarks.measure import Work, counted_host_reads, extra_peak, interleaved, kept_pages, kernel_launches
from tests.benchmarks.report import Ratio, against, markdown

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"
SUMMARY_HEADER = ("update of", "contender", "beside", "times its time", "what limits it")

Summary = list[tuple[str, ...]]


def main() -> None:
    """Measure, print and write the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31, help="rounds, in which all contenders take turns")
    parser.add_argument("--busy", action="store_true", help="measure CPU time, of one thread: others use the machine")
    parser.add_argument("--large", action="store_true", help="measure the scaling up to 10^9 parameters")
    parser.add_argument("--output", type=Path, default=DOCUMENT, help="the document to write")
    arguments = parser.parse_args()
    if arguments.busy:
        measure.clock = time.process_time
        torch.set_num_threads(1)
    summary: Summary = []
    sections = list(_sections(arguments.rounds, summary, arguments.large))
    text = "\n\n".join([_HEAD.format(**_machine()), markdown(SUMMARY_HEADER, summary), _NOTES, *sections]) + "\n"
    Console().print(Markdown(text))
    arguments.output.write_text(text)


def _sections(rounds: int, summary: Summary, large: bool) -> Iterator[str]:
    """Measure one work after another; yield its section and add its rows to the summary."""
    for count in (2, 6, 20):
        model = shapes.build(shapes.linear(count)).to(_device())
        work = f"a net of {count} tensors"
        ratios = [
            Ratio(work, "AveragedModel EMA", "torch EMA multi", "Python: the walk and the checks"),
            Ratio(work, "functional, in place", "loop of lerp_", "Python: the checks"),
        ]
        title = f"A net of {count} tensors of at most 16 × 16"
        yield _section(title, contenders.of_small(model), ratios, 20 * rounds, summary, calls=20)
    for title, shape, ratios in _MODULES:
        yield _section(title, contenders.of_module(shapes.build(shape()).to(_device())), ratios, rounds, summary)
    many = [shapes.build(shapes.many(), dtype).to(_device()) for dtype in (torch.float32, torch.bfloat16)]
    ratios = [
        Ratio(
            "2000 tensors, bfloat16",
            "AveragedModel EMA, bfloat16",
            "AveragedModel EMA, float32",
            "two conversions a tensor, to float32 and back",
        )
    ]
    yield _section("2000 tensors of 512 in bfloat16", contenders.of_many_low(*many), ratios, rounds, summary)
    del many
    yield from _large_sections(rounds, summary)
    jax = contenders.of_eager_jax()
    if jax:
        ratios = [Ratio("1000 JAX arrays, eager", "functional", "optax.incremental_update", "one compiled call")]
        yield _section("1000 JAX arrays of 512, outside jit", jax, ratios, rounds, summary)
    ratios = [Ratio("100 DTensors", "DTensors, in place", "local tensors, in place", "checks of meshes and placements")]
    title = "100 DTensors of 64 × 64 on a mesh of one process"
    yield _section(title, sharded.of_shards(), ratios, 10 * rounds, summary)  # they take a fraction of a millisecond
    yield _memory()
    yield _host_reads()
    yield checkpoints.of_files(summary)
    yield _scaling(large)
    yield _cuda()


def _large_sections(rounds: int, summary: Summary) -> Iterator[str]:
    model = shapes.build(shapes.gpt2()).to(_device())
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    ratios = [Ratio("GPT-2, pure, new pages", "functional, pure", "foreach_lerp", "new pages for each result")]
    title = "GPT-2, new memory for each result"
    yield _section(f"{title}: pages new each time", contenders.of_new_memory(params), ratios, rounds, summary)
    with kept_pages() as is_kept:
        if is_kept:
            ratios = [Ratio("GPT-2, pure, kept pages", "functional, pure", "foreach_lerp", "memory")]
            yield _section(f"{title}: pages kept", contenders.of_new_memory(params), ratios, rounds, summary)
    ratios = [
        Ratio("GPT-2, bfloat16", "AveragedModel EMA", "per leaf, with rounding", "memory, and conversions in cache"),
        Ratio("GPT-2, bfloat16", "functional, in place", "per leaf", "memory, and conversions in cache"),
    ]
    low = contenders.of_low_precision(model.bfloat16())
    yield _section("GPT-2 in bfloat16, averaged in float32", low, ratios, rounds, summary)
    del model, params, low
    ratios = [
        Ratio("50 M numbers of numpy", "functional, in place", "a + w * (b - a)", "memory, in blocks that fit a cache")
    ]
    title = "numpy, 50 M float32"
    yield _section(f"{title}: pages new each time", contenders.of_numpy(), ratios, rounds, summary)
    with kept_pages() as is_kept:
        if is_kept:
            yield _section(f"{title}: pages kept", contenders.of_numpy(), [], rounds, summary)


def _section(
    title: str, works: dict[str, Work], ratios: list[Ratio], rounds: int, summary: Summary, calls: int = 1
) -> str:
    times = interleaved(works, rounds, calls)
    summary += [ratio.row(times) for ratio in ratios]
    gc.collect()
    reference = next(iter(times))
    unit, name = (1e-3, "ms") if times[reference].least > 1e-4 else (1e-6, "µs")
    header = ("contender", f"least, {name}", f"median, {name}", f"× {reference}")
    return f"## {title}\n\n{markdown(header, against(times, reference, unit))}"


def _memory() -> str:
    rows = []
    for title, dtype in (("GPT-2 float32", torch.float32), ("GPT-2 bfloat16", torch.bfloat16)):
        model = shapes.build(shapes.gpt2(), dtype).to(_device())
        averaged = swa_utils.AveragedModel(model, rule=functavg.EMA(0.999))
        averaged.update_parameters(model)
        peak = extra_peak(lambda averaged=averaged, model=model: averaged.update_parameters(model))
        rows.append((title, "not told" if peak is None else f"{peak / 2**20:.1f} MiB"))
    return "## Extra peak memory of an update in place\n\n" + markdown(("model", "peak"), rows)


def _host_reads() -> str:
    model = shapes.build(shapes.resnet50()).to("meta")
    averaged = swa_utils.AveragedModel(model, "meta", rule=functavg.EMA(0.999), use_buffers=True)
    with counted_host_reads() as reads:
        for _ in range(3):
            averaged.update_parameters(model)
    return (
        "## Host reads\n\nThree updates of a model on the `meta` device, whose tensors have no values to read, with "
        f"all buffers averaged: {len(reads)} reads."
    )


def _cuda() -> str:
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
    threads = torch.get_num_threads()
    device = f"{threads} CPU thread{'s' if threads > 1 else ''}"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    busy = measure.clock is time.process_time
    return {
        "clock": "CPU time, on a machine that did other work, too" if busy else "wall time",
        "options": " -- --busy" if busy else "",
        "machine": f"{platform.machine()}, {device}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _module_ratios(title: str, limit: str) -> list[Ratio]:
    return [
        Ratio(title, "AveragedModel EMA", "limit", limit),
        Ratio(title, "AveragedModel EMA", contenders.PEERS, limit),
        Ratio(title, "AveragedModel avg_fn", "torch avg_fn", "the function itself, and new pages"),
        Ratio(title, "AveragedModel SWA", "torch SWA", limit),
    ]


_MODULES: list[tuple[str, Callable[[], shapes.Shapes], list[Ratio]]] = [
    ("GPT-2 small", shapes.gpt2, _module_ratios("GPT-2", "memory")),
    ("ResNet-50", shapes.resnet50, _module_ratios("ResNet-50", "memory, and 161 small calls of torch")),
    ("ViT-B/16", shapes.vit_b16, []),
    (
        "2000 tensors of 512",
        shapes.many,
        [
            Ratio("2000 tensors", "AveragedModel EMA", "torch EMA multi", "a few microseconds a tensor"),
            Ratio("2000 tensors", "functional, in place", "foreach_lerp_", "the checks, about a microsecond a tensor"),
        ],
    ),
]

_HEAD = """# Performance

What one update of an average costs, beside what else you could call. On a large model an update takes as long as it
takes to read two values and write one for each parameter, which is little beside a step of training. On a small net it
is some tens of microseconds of Python, about as many as the class of torch takes, which checks nothing.

Measured in {clock}: {machine}, with Python {python}, torch {torch} and numpy {numpy}, by

```shell
tox -e bench{options}  # python -m tests.benchmarks, which writes this page
```

All contenders of a table take turns in one process. Ratios are of least times: below 1, functavg takes less."""

_NOTES = """`limit` is one contiguous `lerp_` of as many elements. `AveragedModel EMA` and `SWA` are those of functavg,
`torch EMA multi` is torch's class with `get_ema_multi_avg_fn`. How far apart works are that do the same, such as
`AveragedModel` by EMA and by SWA, tells how far to trust a row.

Works that make new tensors (`functional, pure`, `avg_fn`, those of torch that are not in place) depend on the
allocator. By default glibc returns the pages of a large tensor to the system, so each new one pays for new pages; where
it keeps them (`MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647`), the same work can take half the time. Rows that
are about that are measured both ways; all other tables are with new pages."""

if __name__ == "__main__":
    main()
