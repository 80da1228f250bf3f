"""The dense weight that a matrix library multiplies with: the source, the operator, and what it refuses."""

import cuda_on_cpu
import pytest
import torch
from w4a16 import random_weight, weight

from repro.kernels import dequantize, nvrtc, packing


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("bits, group, symmetric, dtype, rows, columns", [
    (4, 128, False, "float16", 40, 384), (2, 0, True, "bfloat16", 33, 301), (8, 64, False, "bfloat16", 16, 320),
])  # fmt: skip
def test_dequantize_on_the_cpu(bits, group, symmetric, dtype, rows, columns, monkeypatch):
    """The dense weight that the library multiplies with, also where a row ends inside eight columns."""
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    packed = random_weight(rows, columns, bits, group, symmetric)
    want = packing.dequantize(packed).to(getattr(torch, dtype))
    assert torch.equal(dequantize.launch(packed, want.dtype), want)


@pytest.mark.parametrize("case", [c for c in dequantize.CASES if c["N"] < 1000], ids=str)
def test_dequantize_on_a_cpu(case):
    packed, dtype = dequantize.make_inputs(case), getattr(torch, case["dtype"])
    w = torch.ops.lowbit.dequantize(*weight(packed), dtype)
    assert torch.equal(w, dequantize.reference(packed).to(dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", dequantize.CASES, ids=str)
def test_dequantize_on_a_gpu(case):
    packed, dtype = dequantize.make_inputs(case, "cuda"), getattr(torch, case["dtype"])
    w = torch.ops.lowbit.dequantize(*weight(packed), dtype)
    assert torch.equal(w, dequantize.reference(packed).to(dtype))


def test_dequantize_is_traceable_and_refuses_other_types():
    packed = dequantize.make_inputs(dequantize.CASES[2])
    torch.library.opcheck(torch.ops.lowbit.dequantize.default, (*weight(packed), torch.float16))
    with pytest.raises(ValueError, match="float32 for a weight of 130 x 672"):
        torch.ops.lowbit.dequantize(*weight(packed), torch.float32)
