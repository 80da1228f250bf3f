"""A linear layer with int8 weights and int8 activations for any number of tokens; picks the kernel.

    y = quantize(x) w_q^T * s_x * s_w

    decode   up to 8 tokens: `w8a8_gemv.py`, which quantizes x inside its one launch
    gemm     more, or a shape that `w8a8_gemv` does not support: `quantize_activation.py`, then `w8a8_gemm.py`

Both read the same weights: int8 [N, K] row-major with one float32 scale per output channel. On an H200 the decode path
is faster at 8 tokens for every layer shape that was measured, the gemm path at 16 tokens for the large ones.
"""

from math import prod

import torch

from repro.kernels import quantize_activation, w8a8_gemm, w8a8_gemv  # noqa: F401  (they register the operators)


def quantize_weight(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 [N, K], scales float32 [N]) of a weight [N, K]: symmetric, one scale per output channel."""
    return quantize_activation.reference(w)


def path(x: torch.Tensor, w_q: torch.Tensor) -> str:
    """The code path of `w8a8(x, w_q, ...)`: "decode" or "gemm"."""
    return "decode" if w8a8_gemv.takes(prod(x.shape[:-1]), *w_q.shape, w_q.device) else "gemm"


def w8a8(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor) -> torch.Tensor:
    """y [..., N] like x of fp16 or bf16 activations x [..., K], int8 codes w_q [N, K] and float32 scales s_w [N].

    Raises ValueError when shapes or dtypes do not fit.
    """
    tokens = x.reshape(-1, x.shape[-1])
    w8a8_gemv.check(tokens, w_q, s_w)
    if path(x, w_q) == "decode":
        y = torch.ops.lowbit.w8a8_gemv(tokens, w_q, s_w)
    else:
        y = torch.ops.lowbit.w8a8_gemm(*torch.ops.lowbit.quantize_activation(tokens), w_q, s_w, x.dtype)
    return y.view(*x.shape[:-1], w_q.shape[0])
