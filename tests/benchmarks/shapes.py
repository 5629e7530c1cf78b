"""Models with the parameters and buffers of well-known ones; only their tensors matter, so they compute nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def build(shapes: Shapes, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a module with tensors of these names and shapes; a name that starts with ~ is that of a buffer."""
    root = nn.Module()
    for path, shape in shapes:
        *parents, name = path.lstrip("~").split(".")
        module = root
        for parent in parents:
            if parent not in module._modules:
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        if name == "num_batches_tracked":
            module.register_buffer(name, torch.zeros((), dtype=torch.int64))
        elif path.startswith("~"):
            module.register_buffer(name, torch.randn(shape, dtype=dtype))
        else:
            module.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=dtype)))
    return root


def gpt2() -> Shapes:
    """GPT-2 small: 148 tensors, 124 M parameters (the head is tied to the embedding)."""
    yield from (("wte.weight", (50257, 768)), ("wpe.weight", (1024, 768)))
    for block in range(12):
        for name, shape in (("attn.c_attn", (768, 2304)), ("attn.c_proj", (768, 768))):
            yield from _affine(f"h.{block}.{name}", shape, shape[1])
        for name, shape in (("mlp.c_fc", (768, 3072)), ("mlp.c_proj", (3072, 768))):
            yield from _affine(f"h.{block}.{name}", shape, shape[1])
        for name in ("ln_1", "ln_2"):
            yield from _affine(f"h.{block}.{name}", (768,), 768)
    yield from _affine("ln_f", (768,), 768)


def resnet50() -> Shapes:
    """ResNet-50: 161 parameter tensors, 25.6 M parameters, and the buffers of 53 BatchNorms."""
    yield "conv1.weight", (64, 3, 7, 7)
    yield from _batch_norm("bn1", 64)
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            sizes = ((width, inputs, 1), (width, width, 3), (4 * width, width, 1))
            for index, (out, into, kernel) in enumerate(sizes, 1):
                yield f"{name}.conv{index}.weight", (out, into, kernel, kernel)
                yield from _batch_norm(f"{name}.bn{index}", out)
            if block == 0:
                yield f"{name}.downsample.0.weight", (4 * width, inputs, 1, 1)
                yield from _batch_norm(f"{name}.downsample.1", 4 * width)
            inputs = 4 * width
    yield from _affine("fc", (1000, 2048), 1000)


def vit_b16() -> Shapes:
    """ViT-B/16: 152 tensors, 86.6 M parameters."""
    yield from (("class_token", (1, 1, 768)), ("pos_embedding", (1, 197, 768)))
    yield from _affine("conv_proj", (768, 3, 16, 16), 768)
    for block in range(12):
        name = f"layers.{block}"
        yield from _affine(f"{name}.ln_1", (768,), 768)
        yield from _affine(f"{name}.attention_in", (2304, 768), 2304)
        yield from _affine(f"{name}.attention_out", (768, 768), 768)
        yield from _affine(f"{name}.ln_2", (768,), 768)
        yield from _affine(f"{name}.mlp.0", (3072, 768), 3072)
        yield from _affine(f"{name}.mlp.3", (768, 3072), 768)
    yield from _affine("ln", (768,), 768)
    yield from _affine("head", (1000, 768), 1000)


def linear(count: int, width: int = 16) -> Shapes:
    """A small net: ``count`` tensors, two to a layer."""
    for index in range(count // 2):
        yield from _affine(f"layers.{index}", (width, width), width)


def many(count: int = 2000, size: int = 512) -> Shapes:
    """Many small tensors, two to a module, in nested modules."""
    for index in range(0, count, 2):
        name = f"{index // 200}.{index // 20 % 10}.{index // 2 % 10}"
        yield from ((f"{name}.weight", (size,)), (f"{name}.bias", (size,)))


def _affine(name: str, weight: tuple[int, ...], bias: int) -> Shapes:
    yield from ((f"{name}.weight", weight), (f"{name}.bias", (bias,)))


def _batch_norm(name: str, width: int) -> Shapes:
    yield from _affine(name, (width,), width)
    yield from ((f"~{name}.running_mean", (width,)), (f"~{name}.running_var", (width,)))
    yield f"~{name}.num_batches_tracked", ()
