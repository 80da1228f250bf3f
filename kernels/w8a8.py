"""A linear layer with int8 weights and int8 activations for any number of tokens; picks the kernel.

    y = quantize(x) w_q^T * s_x * s_w

    decode   up to 8 tokens: `w8a8_gemv.py`, which quantizes x inside its one launch
    gemm     more, or a shape that `w8a8_gemv` does not support: `quantize_activation.py`, then `w8a8_gemm.py`, with one
             piece of memory between the two (`prepared.Scratch`); large tiles whose K is split take a third launch

Both read the same weights: int8 [N, K] row-major with one float32 scale per output channel. On an H200 the decode path
is faster at 8 tokens for every layer shape that was measured, the gemm path at 16 tokens for the large ones. A token
with a NaN or an infinite activation gives NaN in every channel.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from repro.kernels import quantize_activation, w8a8_gemm, w8a8_gemv
from repro.kernels.operators import HALVES, VECTOR, Argument, operator, plain


def quantize_weight(w: Tensor) -> tuple[Tensor, Tensor]:
    """(codes int8 [N, K], scales float32 [N]) of a weight [N, K]: symmetric, one scale per output channel.

    Raises:
        ValueError: not a matrix of floating-point numbers.
    """
    if w.ndim != 2 or not w.dtype.is_floating_point:
        raise ValueError(
            f"w8a8: a weight to quantize is a floating-point matrix [N, K], not {plain(w.dtype)} {list(w.shape)}"
        )
    return quantize_activation.reference(w)


def path(x: Tensor, w_q: Tensor) -> str:
    """The code path of `w8a8(x, w_q, ...)`: "decode" or "gemm"."""
    return path_of(x.numel() // x.shape[-1], w_q)


def path_of(tokens: int, w_q: Tensor) -> str:
    """The code path for a number of tokens and codes `[N, K]`."""
    return "decode" if w8a8_gemv.takes(tokens, *w_q.shape, w_q.device) and w_q.data_ptr() % VECTOR == 0 else "gemm"


def on_cpu(x: Tensor, w_q: Tensor, s_w: Tensor) -> Tensor:
    """y [M, N] of the operator by the reference."""
    return w8a8_gemv.reference(x, w_q, s_w).to(x.dtype)


def on_cuda(x: Tensor, w_q: Tensor, s_w: Tensor) -> Tensor:
    """y [M, N] of the operator by the kernels of its code path."""
    return prepare(x, w_q, s_w)(x, w_q, s_w)


def prepare(x: Tensor, w_q: Tensor, s_w: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The launches of the operator for calls like this one, by its code path."""
    if path_of(x.shape[0], w_q) == "decode":
        if x.data_ptr() % VECTOR == 0:
            return w8a8_gemv.prepare(x, w_q, s_w)
        decode = w8a8_gemv.prepare(x.clone(), w_q, s_w)
        return lambda x, w_q, s_w: decode(x.clone(), w_q, s_w)
    return w8a8_gemm.behind_quantizer(x, w_q, w8a8_gemm.configuration(x.shape[0], *w_q.shape, x.device))


def limit(x: Tensor, w_q: Tensor, s_w: Tensor) -> str | None:
    """What is wrong with checked arguments, or None."""
    return w8a8_gemm.too_many_columns(x.shape[1])


OPERATOR = operator(  # one around the choice, as in linear.py
    "w8a8",
    on_cpu,
    on_cuda,
    {
        "x": Argument(HALVES, "M K"),
        "w_q": Argument((torch.int8,), "N K"),
        "s_w": Argument((torch.float32,), "N"),
    },
    empty=lambda x, w_q, s_w: x.new_empty(x.shape[0], w_q.shape[0]),
    limit=limit,
    prepare=prepare,
)


def w8a8(x: Tensor, w_q: Tensor, s_w: Tensor) -> Tensor:
    """y [..., N] like x of fp16 or bf16 activations x [..., K], int8 codes w_q [N, K] and float32 scales s_w [N].

    x may have any layout, and no tokens. Raises ValueError when shapes, dtypes or devices do not fit.
    """
    if x.ndim == 2 and x.is_contiguous() and x.numel():
        return OPERATOR(x, w_q, s_w)
    if x.ndim == 0 or w_q.ndim != 2 or x.shape[-1] != w_q.shape[1] or not w_q.numel():
        raise ValueError(
            f"w8a8: x {list(x.shape)} does not fit codes w_q {list(w_q.shape)}; the last sizes are equal, none is 0"
        )
    tokens = x.reshape(-1, w_q.shape[1]).contiguous()
    if tokens.shape[0] == 0:
        if not torch.compiler.is_compiling():
            OPERATOR.check((x.new_empty(1, w_q.shape[1]), w_q, s_w))
        return x.new_empty(*x.shape[:-1], w_q.shape[0])
    return OPERATOR(tokens, w_q, s_w).view(*x.shape[:-1], w_q.shape[0])
