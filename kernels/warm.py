"""Compile and load the kernels of products before their first call is in a CUDA graph capture."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from repro.kernels import linear, w8a8
from repro.kernels.packing import TILE, PackedWeight, block_columns

Int8Weight = tuple[Tensor, Tensor]  # codes and scales as of `w8a8.quantize_weight`
Shape = tuple[int, int]  # N and K

COUNTS = (1, 8, 16, 32, 64, 128, 256)  # tokens: every one that a launch configuration is tuned for
FORM = re.compile(r"w([248])-(?:pc|g(\d+))(-sym)?")  # bits; group, or one scale a channel; symmetric


def warm(
    products: nn.Module | PackedWeight | Int8Weight | Shape | Iterable[PackedWeight | Int8Weight | Shape],
    counts: Sequence[int] = COUNTS,
    dtype: torch.dtype = torch.bfloat16,
    form: str = "w4-g128",
    device: torch.device | str = "cuda",
) -> None:
    """Launch `linear.wna16` or `w8a8.w8a8` once for every weight and number of tokens, and wait for it.

    Args:
        products: a model or an engine, whose modules are searched for weights; a packed weight, int8 codes with their
            scales, or a bare shape (N, K); or several of these. What has one form and shape is launched once.
        counts: numbers of tokens that will be asked for.
        dtype: of the activations, float16 or bfloat16.
        form: of bare shapes: `w8a8`, or bits and group as in `w4-g128`, `w8-pc` (a scale a channel), `w4-g64-sym`.
        device: of bare shapes.

    Raises:
        ValueError: another dtype, an unknown form, a shape that does not fit its form, no tokens, nothing to warm, or a
            device that this machine lacks.
    """
    if isinstance(counts, str) or not isinstance(counts, Sequence) or not counts or not all(map(is_size, counts)):
        raise ValueError(f"warm: counts of tokens are {counts!r:.60}; give a list of one or more, of at least 1")
    products = listed(products)
    if not products:
        raise ValueError("warm: no packed weight and no int8 codes with scales; give weights, or shapes as [(N, K)]")
    done, devices = set(), set()
    for product in products:
        if not isinstance(product, PackedWeight) and not (isinstance(product, tuple) and len(product) == 2):
            kinds = "a packed weight, int8 codes with scales, or a shape (N, K)"
            raise ValueError(f"warm: {product!r:.60} is no product; give a model, {kinds}")
        if isinstance(product, tuple) and not isinstance(product[0], Tensor):
            product = weight_of_zeros(product, form, torch.device(device))
        if isinstance(product, PackedWeight):
            codes, columns, launch = product.codes, product.columns, linear.wna16
            key = (product.rows, columns, product.bits, product.group, product.symmetric, codes.device)
            rest = (product,)
        else:
            codes = product[0]
            rest = product
            columns = codes.shape[1]
            launch = w8a8.w8a8
            key = (*codes.shape, "w8a8", codes.device)
        if key in done:
            continue
        done.add(key)
        devices.add(codes.device)
        for count in counts:
            launch(torch.zeros(count, columns, dtype=dtype, device=codes.device), *rest)
    for used in devices:
        if used.type == "cuda":
            torch.cuda.synchronize(used)


def is_size(number: object) -> bool:
    """Whether it is a whole number of 1 or more."""
    return isinstance(number, int) and number >= 1


def listed(products: Any) -> list[Any]:  # noqa: ANN401
    """The products of what `warm` takes, one by one."""
    modules = modules_of(products)
    if modules is not None:
        return list(weights_of(modules))
    if isinstance(products, PackedWeight) or (isinstance(products, tuple) and is_one(products)):
        return [products]
    return list(products) if isinstance(products, Iterable) and not isinstance(products, str) else [products]


def modules_of(model: Any) -> list[nn.Module] | None:  # noqa: ANN401
    """The modules of a model, of an engine or of its decoder; None for what is none of these."""
    if isinstance(model, nn.Module):
        return list(model.modules())
    decoder = getattr(model, "model", model)
    if not hasattr(decoder, "blocks"):
        return None
    modules = []
    for part in (*decoder.blocks, decoder):
        for value in vars(part).values():
            if isinstance(value, nn.Module):
                modules += value.modules()
    return modules


def is_one(product: tuple) -> bool:
    """Whether a tuple is a shape (N, K), or int8 codes with their scales, and not several products."""
    first = product[0] if product else None
    return isinstance(first, int) or (isinstance(first, Tensor) and first.dtype == torch.int8)


def weights_of(modules: Iterable[nn.Module]) -> Iterator[PackedWeight | Int8Weight]:
    """Packed weights of modules, as attributes or in a list or dict, and int8 `codes` beside `scales`."""
    for module in modules:
        for value in vars(module).values():
            several = [value]
            if isinstance(value, dict):
                several = list(value.values())
            elif isinstance(value, list | tuple):
                several = list(value)
            for one in several:
                if isinstance(one, PackedWeight):
                    yield one
        codes, scales = getattr(module, "codes", None), getattr(module, "scales", None)
        if isinstance(codes, Tensor) and codes.dtype == torch.int8 and isinstance(scales, Tensor):
            yield codes, scales


def weight_of_zeros(shape: Shape, form: str, device: torch.device) -> PackedWeight | Int8Weight:
    """A weight `[N, K]` in a form.

    Raises:
        ValueError: an unknown form, or a shape that does not fit it.
    """
    if not all(map(is_size, shape)):
        raise ValueError(f"warm: {shape} is no shape; give rows and columns (N, K), whole numbers of at least 1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"warm: this machine has no CUDA device, where {shape} is to be warmed; name another device")
    rows, columns = shape
    if form == "w8a8":
        return torch.zeros(shape, dtype=torch.int8, device=device), torch.zeros(rows, device=device)
    match = FORM.fullmatch(str(form))
    if match is None:
        raise ValueError(
            f"warm: unknown form {form!r}; choose w8a8, or bits and group as in w4-g128, w8-pc, w4-g64-sym"
        )
    bits = int(match[1])
    group = int(match[2] or 0)
    symmetric = bool(match[3])
    tiles = -(-rows // TILE)
    groups = columns // group if group else 1
    codes = torch.zeros(tiles, -(-columns // block_columns(bits)), 32, 4, dtype=torch.int32, device=device)
    sizes = (tiles, groups, 8, 2) if symmetric else (tiles, groups, 8, 2, 2)
    return PackedWeight(codes, torch.zeros(sizes, dtype=torch.float16, device=device), bits, group, *shape, symmetric)
