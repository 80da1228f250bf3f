"""A public shape with random weights as a decoder, under a recipe of one weight format, for speed and memory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from repro.engine import q4_k, shape_sparsity, weights
from repro.engine.shapes import random_weight
from repro.engine.step import Decoder
from repro.errors import UserError
from repro.jobs.target import Target


def random_decoder(target: Target, config: Any, context: int, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A shape with random weights on a device, which can be `meta` to count bytes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    grid, sparsity = shape_recipe(target)
    stored = 0

    def dense(weight: Tensor) -> Tensor:
        nonlocal stored
        stored += weight.numel() * dtype.itemsize
        fill = torch.ones if weight.ndim == 1 else torch.randn
        return fill(weight.shape, dtype=dtype, device=device) * (1 if weight.ndim == 1 else weight.shape[1] ** -0.5)

    def product(names: Sequence[str]) -> nn.Module:
        nonlocal stored
        linears = [model.get_submodule(name) for name in names]
        rows, columns = sum(linear.out_features for linear in linears), linears[0].in_features
        bias = None if linears[0].bias is None else dense(torch.empty(rows, device="meta"))
        if grid is None:
            return weights.Dense(dense(torch.empty(rows, columns, device="meta")), bias)
        if hasattr(grid, "layout"):
            made = q4_k.random(rows, columns, grid.layout != "row", bias, device)
            stored += made.codes.nbytes + made.headers.nbytes
            return made if weights.runs_q4_k(device, dtype) or device.type == "meta" else made.expanded(2, dtype)
        packed = random_weight(rows, columns, grid, device)
        stored += (rows * columns * grid.bits + rows * packed.groups * (16 + (0 if grid.symmetric else grid.bits))) // 8
        return weights.made(packed, bias, dtype)

    decoder = replace(weights.assemble(model, context, product, dense), stored_bytes=stored)
    return decoder if device.type == "meta" else shape_sparsity.with_thresholds(decoder, sparsity)


def shape_recipe(target: Target) -> tuple[Any, float]:
    """The config of a shape's weight quantizer, None for none, and the sparsity of its inputs.

    UserError for a recipe that is not one uniform quantizer, or Q4_K with SpQt's sparsity behind it or not.
    """
    configs = [step.config for step in target.recipe.steps]
    grid = configs[0] if configs else None
    quantizes = grid is None or hasattr(grid, "symmetric") or hasattr(grid, "layout")
    sparse = len(configs) == 2 and hasattr(grid, "layout") and hasattr(configs[1], "sparsity")
    if not quantizes or getattr(grid, "act_bits", 16) < 16 or not (len(configs) < 2 or sparse):
        said = "name one weight quantizer, fp16, or q4_k with spqt behind it"
        raise UserError(f"recipe {target.text!r}: a shape has random weights; {said}")
    return grid, configs[1].sparsity if sparse else 0.0
