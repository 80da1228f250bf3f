"""Compile and load the kernels of products before their first call is in a CUDA graph capture."""

import re
from collections.abc import Iterable, Iterator, Sequence

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
        products: a model, whose modules are searched for weights; a packed weight, int8 codes with their scales, or a
            bare shape (N, K); or several of these. What has one form and shape is launched once.
        counts: numbers of tokens that will be asked for.
        dtype: of the activations, float16 or bfloat16.
        form: of bare shapes: `w8a8`, or bits and group as in `w4-g128`, `w8-pc` (a scale a channel), `w4-g64-sym`.
        device: of bare shapes.

    Raises:
        ValueError: another dtype, an unknown form, a shape that does not fit its form, no tokens, nothing to warm.
    """
    if min(counts, default=0) < 1:
        raise ValueError(f"warm: counts of tokens are {list(counts)}; give one or more, of at least 1")
    if isinstance(products, nn.Module):
        products = weights_of(products)
    elif isinstance(products, PackedWeight) or (isinstance(products, tuple) and is_one(products)):
        products = [products]
    products = list(products)
    if not products:
        raise ValueError("warm: no packed weight and no int8 codes with scales; give weights, or shapes as [(N, K)]")
    done, devices = set(), set()
    for product in products:
        if isinstance(product, tuple) and isinstance(product[0], int):
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


def is_one(product: tuple) -> bool:
    """Whether a tuple is a shape (N, K), or int8 codes with their scales, and not several products."""
    first = product[0] if product else None
    return isinstance(first, int) or (isinstance(first, Tensor) and first.dtype == torch.int8)


def weights_of(model: nn.Module) -> Iterator[PackedWeight | Int8Weight]:
    """Packed weights of a model's modules, as attributes or in a list or dict, and int8 `codes` beside `scales`."""
    for module in model.modules():
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
    rows, columns = shape
    if form == "w8a8":
        return torch.zeros(shape, dtype=torch.int8, device=device), torch.zeros(rows, device=device)
    match = FORM.fullmatch(form)
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
