"""Compensators of several tokens: the references against the method's own module, the kernels on a GPU."""

import pytest
import torch
from relative_error import relative_error

pytest.importorskip("triton")

from repro.kernels import compensate as kernel  # noqa: E402
from repro.kernels.compensated_gemv import pack, parts, random_compensator  # noqa: E402
from repro.methods.spear.compensator import Compensator, unpack  # noqa: E402


@pytest.mark.parametrize("hidden", [4, 0])
def test_a_correction_is_the_method_s_own(hidden):
    """Equation 3 on two of three layers, alpha 2 in the second; the layer between has none."""
    generator = torch.Generator().manual_seed(0)
    stored = [random_compensator(r, n, 48, hidden, generator) for r, n in ((5, 17), (20, 24))]
    made = pack([0, 33], stored, [1.0, 2.0], hidden)
    x, y = torch.randn(7, 48, generator=generator), torch.randn(7, 57, generator=generator)
    want = y.clone()
    for start, tensors, alpha in zip((0, 33), stored, (1.0, 2.0)):
        more = Compensator(unpack(tensors), alpha)(x)
        want[:, start : start + more.shape[1]] += more
    kernel.add(y, kernel.latent(x, made), made)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    assert len(parts(made.down, made.gates, made.scales, made.up, 48, made.spans)) == 2


def test_programs_fill_the_device_but_no_more_than_there_are_columns():
    assert kernel.splits_of(32, 1, 11008, 132) == 86, "a step of 128 columns each"
    assert kernel.splits_of(32, 3, 4096, 132) == 32
    assert kernel.splits_of(512, 3, 4096, 132) == 5
    assert kernel.splits_of(4096, 3, 4096, 132) == 1
    assert [kernel.tokens_of_tile(count) for count in (2, 17, 33, 512)] == [16, 32, 64, 64]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_kernels_agree_with_the_references(case):
    inputs = kernel.make_inputs(case, "cuda")
    x, y, made = inputs["x"], inputs["y"], inputs["made"]
    want_latent = kernel.latent_reference(x, made)
    latent = kernel.latent(x, made)
    assert relative_error(latent, want_latent) < 1e-4
    want_y, rounding = y.clone(), torch.finfo(y.dtype).eps
    kernel.add_reference(want_y, latent, made)
    kernel.add(y, latent, made)
    torch.testing.assert_close(y, want_y, rtol=2 * rounding, atol=1e-3)
