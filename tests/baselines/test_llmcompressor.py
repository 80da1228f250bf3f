"""SmoothQuant's scales and one GPTQ layer against llmcompressor, where it is installed (an optional peer)."""

import pytest
import torch
from known import W, X, errors
from torch import nn

from repro.baselines import gptq, smoothquant

WHY = "llmcompressor is not installed: pip install llmcompressor==0.14.0.1 in an environment of its own"


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("group", [64, 0])
def test_a_gptq_layer(bits, group):
    """The same grids, fitted beforehand, the same Hessian: the same codes but for ties of float32 sums."""
    theirs = pytest.importorskip("llmcompressor.modifiers.gptq.gptq_quantize", reason=WHY)
    from compressed_tensors.quantization import QuantizationArgs

    # N counts calibration sequences, 4 of 128; theirs is normalized by samples: H's scale cancels in both
    hessian = 2 / 4 * (X.double().T @ X.double()).float()
    options = {"bits": bits, "group": group, "static_groups": bool(group), "scale_dtype": "float32"}
    mine = gptq.gptq(W, hessian, gptq.Config(**options))
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=False, **strategy)
    zeros = mine.zeros - 2 ** (bits - 1)  # signed codes
    other, _, fallback = theirs.quantize_weight(
        W.clone()[None], hessian.clone()[None], mine.scales.float()[None], zeros.float()[None], None, args
    )
    assert not fallback.any()
    here, there = mine.dequantize(), other[0]
    assert (here != there).float().mean() < 0.01, "codes that a tie decides, and what follows from them"
    for a, b in zip(errors(here), errors(there)):
        assert a == pytest.approx(b, rel=2e-3)
    print(f"w{bits} g{group}: {(here != there).sum().item()} of {W.numel()} differ, o {errors(here)[1]:.8g}, "
          f"theirs {errors(there)[1]:.8g}")  # fmt: skip


@pytest.mark.parametrize("alpha", [0.5, 0.85])
def test_smoothquants_scales_differ_by_a_constant(alpha):
    """Theirs takes ranges, twice the largest magnitudes of a symmetric input: a constant, 1 at one half."""
    module = pytest.importorskip("llmcompressor.modifiers.smoothquant", reason=WHY)
    modifier = module.SmoothQuantModifier(smoothing_strength=alpha, mappings=[[["re:.*q_proj"], "re:.*norm"]])
    linears = [nn.Linear(256, 64, bias=False), nn.Linear(256, 64, bias=False)]
    for linear, weight in zip(linears, (W, W.flip(1))):
        linear.weight.data = weight.clone()
    largest = X.abs().amax(0)
    want = modifier._calculate_smoothing_scales(linears, 2 * largest)
    mine = smoothquant.scale(largest, [linear.weight.data for linear in linears], alpha)
    torch.testing.assert_close(mine * 2 ** (2 * alpha - 1), want, rtol=1e-5, atol=0)
