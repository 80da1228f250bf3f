"""Stored size of a model, counted bit by bit: everything that a dequantizer reads is included."""

from typing import Any

from repro.core.errors import UserError
from repro.models.lowbit import LowBitModel, block_linears


def report(lm: LowBitModel, float_bits: int | None = None) -> dict[str, Any]:
    """Count every stored bit of `lm`; a plain model without quantized weights is counted alike.

    Args:
        lm: the model and what is stored for it; its parameters may be on the meta device.
        float_bits: width at which an unquantized parameter is stored; by default that of its dtype. Say 16 where a
            16-bit model is only computed in float32.

    Returns:
        `block`: bits by kind of the block linears' weights: codes, scales, zeros, indices, `unquantized` ones, and the
        kinds that steps reported in `extra_bits`; `block_weights`: how many weights these are; `bpw`: bits of `block`
        per block weight; `other`: bits of all other parameters (embedding, head, norms, biases), tied ones counted
        once; `bits`: the whole model; `bytes`: the same, rounded up.

    Raises:
        UserError: the model has no block linears.
    """
    in_blocks = {id(linear.weight) for linear in block_linears(lm.model).values()}
    if not in_blocks:
        raise UserError(
            f"{type(lm.model).__name__} has no linear layers in transformer blocks whose bits could be counted"
        )
    quantized = {id(lm.model.get_submodule(name).weight): weight for name, weight in lm.weights.items()}
    block = dict.fromkeys(("codes", "scales", "zeros", "indices", "unquantized"), 0)
    block_weights = other_bits = 0
    for parameter in lm.model.parameters():
        dense = {"unquantized": parameter.numel() * (float_bits or parameter.dtype.itemsize * 8)}
        stored = quantized[id(parameter)].stored_bits() if id(parameter) in quantized else dense
        if id(parameter) not in in_blocks:
            other_bits += sum(stored.values())
            continue
        block_weights += parameter.numel()
        for kind, bits in stored.items():
            block[kind] += bits
    for kind, bits in lm.extra_bits.items():
        block[kind] = block.get(kind, 0) + bits
    bits = sum(block.values())
    return {
        "block": block,
        "block_weights": block_weights,
        "bpw": bits / block_weights,
        "other": other_bits,
        "bits": bits + other_bits,
        "bytes": (bits + other_bits + 7) // 8,
    }
