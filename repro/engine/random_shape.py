"""Decoders of public shapes with random weights, in one weight format, for speed and memory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from repro.core.errors import UserError
from repro.engine import corrected, q4_k, shape_sparsity, two_bit, weights
from repro.engine.shapes import random_weight
from repro.engine.step import Decoder
from repro.kernels.compensated_gemv import random_compensator
from repro.kernels.w2a2_format import GROUP
from repro.methods import spear
from repro.methods.bitbybit import splitting
from repro.methods.spear import compensator
from repro.models.groups.columns import Columns
from repro.models.lowbit import block_linears
from repro.recipes.recipe import Recipe


def random_decoder(recipe: Recipe, config: Any, context: int, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A shape with random weights on a device, which can be `meta` to count bytes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    grid, sparsity, ecs = shape_recipe(recipe)
    compensated = set() if ecs is None else compensated_layers(list(block_linears(model)), ecs)
    stored = 0

    def dense(weight: Tensor) -> Tensor:
        nonlocal stored
        stored += weight.numel() * dtype.itemsize
        fill = torch.ones if weight.ndim == 1 else torch.randn
        return fill(weight.shape, dtype=dtype, device=device) * (1 if weight.ndim == 1 else weight.shape[1] ** -0.5)

    def product(names: Sequence[str]) -> nn.Module:
        nonlocal stored
        linears = [model.get_submodule(name) for name in names]
        rows = sum(linear.out_features for linear in linears)
        columns = linears[0].in_features
        bias = None if linears[0].bias is None else dense(torch.empty(rows, device="meta"))
        if grid is None:
            return weights.Dense(dense(torch.empty(rows, columns, device="meta")), bias)
        if hasattr(grid, "split_metric"):
            shared = [rows] if grid.split == "none" else [linear.out_features for linear in linears]
            parts = []
            for number, size in enumerate(shared):  # each layer has split channels of its own
                split = split_columns(grid, names[number], columns, config.num_hidden_layers)
                part_of_bias = None if bias is None else bias.split(shared)[number].contiguous()
                parts.append(two_bit.random(size, columns, split, grid.act_bits, part_of_bias, device, dtype))
                stored += stored_bytes(size, columns if split is None else len(split.index), split is not None)
            return parts[0] if len(parts) == 1 else weights.joined(parts)
        if hasattr(grid, "layout"):
            random_product = q4_k.random(rows, columns, grid.layout != "row", bias, device)
            stored += random_product.codes.nbytes + random_product.headers.nbytes
            return (
                random_product
                if weights.runs_q4_k(device, dtype) or device.type == "meta"
                else random_product.expanded(2, dtype)
            )
        packed = random_weight(rows, columns, grid, device)
        stored += (rows * columns * grid.bits + rows * packed.groups * (16 + (0 if grid.symmetric else grid.bits))) // 8
        made_here = weights.packed_product(packed, bias, dtype)
        start = 0
        starts = []
        tensors = []
        for name, linear in zip(names, linears):
            if name in compensated:
                size = linear.out_features
                starts.append(start)
                tensors.append(random_compensator(ecs.rank, size, columns, ecs.hidden, None, device))
                stored += compensator.stored_bytes(ecs.rank, [(size, columns)], ecs.hidden)
            start += linear.out_features
        alphas = [1.0] * len(starts)
        return corrected.compensated(made_here, starts, tensors, alphas) if starts else made_here

    decoder = replace(weights.assemble(model, context, product, dense), stored_bytes=stored)
    return decoder if device.type == "meta" else shape_sparsity.with_thresholds(decoder, sparsity)


def split_columns(grid: Any, name: str, columns: int, blocks: int) -> Columns | None:
    """Columns of a layer whose random channels are split, as many as Bit-by-Bit splits in its block; None of none."""
    if grid.split == "none":
        return None
    block = int(name.rpartition(".layers.")[2].partition(".")[0])
    share = splitting.ratio(block, blocks, grid.split_first, grid.split_last)
    values = torch.rand(columns, generator=torch.Generator().manual_seed(block))
    return splitting.chosen(values, splitting.count(share, columns), GROUP)


def stored_bytes(rows: int, columns: int, split: bool) -> int:
    """Stored bits of 2-bit codes, E4M3 scales, 2-bit zeros, a factor, and 16 bits a column if channels are split."""
    return (rows * (2 * columns + (8 + 2) * columns // GROUP) + 32 + 16 * columns * split) // 8


def compensated_layers(names: list[str], ecs: spear.Config) -> set[str]:
    """The layers of a shape that have a compensator: all, or a share that a seed chooses."""
    if ecs.placement == "full":
        return set(names)
    return set(spear.at_random(names, spear.count(ecs.k_share, len(names)), ecs.seed))


def shape_recipe(recipe: Recipe) -> tuple[Any, float, spear.Config | None]:
    """The configs of a shape's weight quantizer, None for none, and of SPEAR; between them the sparsity of its inputs.

    UserError for a recipe that is not one uniform quantizer, with SPEAR after it or not, Q4_K with SpQt's sparsity
    after it or not, or Bit-by-Bit's 2 bits in groups of 32 with inputs of 2 or of 16 bits. Of SPEAR's compensators
    places and rank have to be said, since random weights have no damage to choose them by.
    """
    configs = [step.config for step in recipe.steps]
    grid = configs[0] if configs else None
    if hasattr(grid, "split_metric"):
        quantizes = (grid.bits, grid.group, grid.any_precision) == (2, GROUP, False) and grid.act_bits in (2, 16)
    else:
        quantizes = grid is None or hasattr(grid, "symmetric") or hasattr(grid, "layout")
        quantizes = quantizes and getattr(grid, "act_bits", 16) == 16
    sparse = len(configs) == 2 and hasattr(grid, "layout") and hasattr(configs[1], "sparsity")
    compensates = len(configs) == 2 and hasattr(grid, "symmetric") and isinstance(configs[1], spear.Config)
    if not quantizes or not (len(configs) < 2 or sparse or compensates):
        hint = "name one weight quantizer, fp16, q4_k with spqt behind it, or bitbybit at w2a2 or w2a16 in groups of 32"
        raise UserError(f"recipe {recipe.name!r}: a shape has random weights; {hint}")
    if compensates:
        ecs = configs[1]
        if not ecs.rank or not (ecs.placement == "full" or (ecs.placement == "random" and ecs.k_share)):
            hint = "give spear a rank, and placement=full, or placement=random and a k_share"
            raise UserError(f"recipe {recipe.name!r}: a shape has random weights, whose damage says nothing; {hint}")
        return grid, 0.0, ecs
    return grid, configs[1].sparsity if sparse else 0.0, None
