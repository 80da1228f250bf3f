"""Bit-by-Bit's group quantizer: known answers of the paper's formulas, a slow reference in fractions, properties."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known import W, X, errors

from repro.core.errors import UserError
from repro.models.groups import quantizer
from repro.models.groups.quantizer import GroupGrid, decode, encode, fake_quantize, fit, restored, shifted, split

FAST = settings(max_examples=60, deadline=None, derandomize=True)
CLOSE = 1e-5


def close(measured, want):
    """To 1e-5, or to half a unit of the last printed digit where fewer digits are known (`o` has seven decimals)."""
    assert measured[0] == pytest.approx(want[0], rel=CLOSE)
    assert measured[1] == pytest.approx(want[1], rel=CLOSE, abs=5.1e-8)


# --- known answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "group", "want"),
    [
        (8, 32, (4.0492502e-08, 0.0000175)),
        (4, 32, (1.1864765e-05, 0.0047604)),
        (2, 32, (3.0509320e-04, 0.1180231)),
        (2, 64, (3.2845695e-04, 0.1296434)),
        (2, 128, (3.4013191e-04, 0.1348470)),
    ],
)
@pytest.mark.parametrize("include_zero", [False, True], ids=["as is", "with 0"])
def test_known_answers_of_the_min_max_grid(bits, group, want, include_zero):
    """Every group of W has both signs, so that including 0 changes none."""
    close(errors(fake_quantize(W, GroupGrid(bits, group, include_zero=include_zero))), want)


@pytest.mark.parametrize(
    ("shift", "delta", "want"),
    [
        (4, "zero", (3.8989376e-05, 0.0171963)),
        (4, "centred", (1.1490490e-05, 0.0050941)),
        (6, "zero", (6.7805265e-04, 0.2791155)),
        (6, "centred", (1.8956256e-04, 0.0778405)),
    ],
)
def test_known_answers_of_shifted_codes(shift, delta, want):
    close(errors(fake_quantize(W, GroupGrid(8, 32), shift, delta)), want)


def test_codes_after_the_shift_to_two_bits():
    grid = GroupGrid(8, 32)
    groups = split(W, 32)
    scales, factor, z = fit(groups, grid)
    codes = shifted(encode(groups, restored(scales, factor), z, grid), 6)
    assert torch.bincount(codes.flatten().long()).tolist() == [3037, 5149, 5155, 3043]


@pytest.mark.parametrize(("bits", "want"), [(8, (3.5029417e-07, 0.0001693)), (2, (3.0497304e-04, 0.1181646))])
def test_known_answers_of_e4m3_scales(bits, want):
    close(errors(fake_quantize(W, GroupGrid(bits, 32, scale="e4m3"))), want)


def test_without_a_tensor_factor_every_8_bit_scale_rounds_to_zero():
    scales, _, _ = fit(split(W, 32), GroupGrid(8, 32))
    assert (scales.to(torch.float8_e4m3fn).float() == 0).sum() == 512 == scales.numel()
    scales, factor, _ = fit(split(W, 32), GroupGrid(8, 32, scale="e4m3"))
    assert scales.dtype == torch.float8_e4m3fn and factor.shape == (1,) and scales.float().max() == 448
    assert (scales.float() > 0).all()


def test_known_answer_of_seq_levels():
    close(errors(fake_quantize(W, GroupGrid(2, 32, "seq"))), (2.0150055e-04, 0.0858985))


@pytest.mark.parametrize(
    ("bits", "exact", "both"),
    [(8, 0.0000376, 0.1180187), (4, 0.0108340, 0.1291862), (2, 0.1697311, 0.2944298)],
)
def test_known_answers_of_activation_groups(bits, exact, both):
    """`o` of the reference with quantized inputs; weights exact, and 2-bit min-max."""
    x, want = fake_quantize(X, GroupGrid(bits, 32)).double(), X.double() @ W.double().T
    for weight, answer in ((W, exact), (fake_quantize(W, GroupGrid(2, 32)), both)):
        error = (x @ weight.double().T - want).square().mean().item()
        assert error == pytest.approx(answer, rel=CLOSE, abs=5.1e-8)


def test_two_bit_levels_of_seq_are_a_quarter_and_three_quarters():
    w = torch.linspace(-1, 1, 32)[None]
    assert fake_quantize(w, GroupGrid(2, 32, "seq")).unique().tolist() == [-0.75, -0.25, 0.25, 0.75]


# --- properties -------------------------------------------------------------------------------------------------------


def weights(seed: int, shift: float, size: float, rows: int = 3, columns: int = 64) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return size * (shift + torch.randn(rows, columns, generator=random))


def slow(values: list[Fraction], bits: int, include_zero: bool) -> list[Fraction]:
    """The four formulas of section 3.1 in exact fractions."""
    low, high = min(values), max(values)
    if include_zero:
        low, high = min(low, Fraction(0)), max(high, Fraction(0))
    s = (high - low) / (2**bits - 1)
    z = math.floor(-low / s + Fraction(1, 2))
    if include_zero:
        z = min(max(z, 0), 2**bits - 1)
    codes = [min(max(math.floor(v / s + Fraction(1, 2)) + z, 0), 2**bits - 1) for v in values]
    return [s * (q - z) for q in codes]


@FAST
@given(st.integers(0, 2**31), st.floats(-3, 3), st.sampled_from([2, 3, 4, 8]), st.booleans())
def test_is_the_formula_in_exact_fractions(seed, shift, bits, include_zero):
    w = weights(seed, shift, 0.1, 1, 32).double()
    want = slow([Fraction(v) for v in w[0].tolist()], bits, include_zero)
    quantized = fake_quantize(w, GroupGrid(bits, 32, include_zero=include_zero))[0]
    assert np.abs(quantized.numpy() - [float(v) for v in want]).max() <= 1e-6 * w.abs().max().item()


@FAST
@given(
    st.integers(0, 2**31),
    st.floats(-4, 4),
    st.floats(1e-6, 1e4),
    st.sampled_from([2, 4, 8]),
    st.sampled_from(["e4m3", "float16", "float32"]),
)
def test_with_zero_in_the_range_zeros_are_codes_and_zero_is_a_value(seed, shift, size, bits, scale):
    grid = GroupGrid(bits, 32, include_zero=True, scale=scale)
    w = weights(seed, shift, size)
    w[0, 5] = 0
    _, _, z = fit(split(w, 32), grid)
    assert torch.equal(z, z.round()) and z.min() >= 0 and z.max() <= 2**bits - 1
    assert fake_quantize(w, grid)[0, 5] == 0


@FAST
@given(st.integers(0, 2**31), st.floats(-2, 2), st.sampled_from([2, 4, 8]), st.booleans())
def test_error_is_at_most_half_a_step_and_rows_are_independent(seed, shift, bits, include_zero):
    """A step and a half where rounding z has moved the grid over one end of the range."""
    w, grid = weights(seed, shift, 0.1), GroupGrid(bits, 32, include_zero=include_zero)
    quantized = fake_quantize(w, grid)
    s = restored(*fit(split(w, 32), grid)[:2])
    off = (split(w - quantized, 32).abs() / s).flatten()
    assert off.max() <= 1 + 1e-4 and (off <= 0.5 + 1e-4).float().mean() > 0.85
    assert torch.equal(fake_quantize(w[1:2], grid), quantized[1:2])


@FAST
@given(st.integers(0, 2**31), st.floats(-2, 2), st.sampled_from(["asymmetric", "seq"]), st.booleans())
def test_shifts_in_two_steps_are_one_shift(seed, shift, levels, include_zero):
    """8 to 4 to 2 bits is 8 to 2 bits; a centred value lies amid the eight-bit values that share its code."""
    grid = GroupGrid(8, 32, levels, include_zero)
    groups = split(weights(seed, shift, 0.1), 32)
    scales, factor, z = fit(groups, grid)
    s = restored(scales, factor)
    codes = encode(groups, s, z, grid)
    assert torch.equal(shifted(shifted(codes, 4), 2), shifted(codes, 6))
    assert torch.equal(shifted(codes, 6), shifted(codes.to(torch.uint8), 6).float())
    for c in (4, 6):
        q = shifted(codes, c)
        ends = [decode(q * 2**c + end, s, z, 0) for end in (0, 2**c - 1)]
        torch.testing.assert_close(decode(q, s, z, c, "centred"), (ends[0] + ends[1]) / 2)
        torch.testing.assert_close(decode(q, s, z, c, "zero"), ends[0])


@pytest.mark.parametrize("scale", ["e4m3", "float16", "float32"])
@pytest.mark.parametrize("include_zero", [False, True])
def test_strange_groups_stay_finite_and_near_where_they_were(scale, include_zero):
    """Constant, all-zero, one-sided, nearly constant and tiny groups come out finite, and near where they were."""
    w = torch.zeros(7, 32)
    w[1], w[2], w[3] = 0.5, -0.25, torch.linspace(1, 2, 32)
    w[4] = 3 + 1e-7 * torch.arange(32)
    w[5], w[6] = torch.linspace(-2, -1, 32), 1e-3 * torch.linspace(-1, 1, 32)
    grid = GroupGrid(8, 32, include_zero=include_zero, scale=scale)
    quantized = fake_quantize(w, grid)
    _, _, z = fit(split(w, 32), grid)
    assert torch.isfinite(quantized).all() and (quantized[0] == 0).all() and z.abs().max() < 2**15
    assert (quantized[1:6] - w[1:6]).abs().max() <= 0.08 * w.abs().max()


def test_the_gradient_passes_straight_through():
    w = W[:4].clone().requires_grad_()
    g = X[:4]
    for options in ({}, {"shift": 6}, {"shift": 4, "delta": "zero"}):
        (result,) = torch.autograd.grad((fake_quantize(w, GroupGrid(8, 32, scale="e4m3"), **options) * g).sum(), w)
        assert torch.equal(result, g)
    assert torch.equal(fake_quantize(w, GroupGrid(2, 32)), fake_quantize(w.detach(), GroupGrid(2, 32)))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"bits": 1}, "bits is 1"), ({"bits": 9}, "bits is 9"), ({"group": 0}, "group is 0; it must be 1 or more")],
)
def test_grids_that_mean_nothing_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        GroupGrid(**options)


def test_a_group_that_k_does_not_divide():
    with pytest.raises(UserError, match="256 input channels do not divide into groups of 96"):
        fake_quantize(W, GroupGrid(2, 96))


def test_half_up_is_not_half_to_even():
    assert quantizer.half_up(torch.tensor([-1.5, -0.5, 0.5, 1.5, 2.5])).tolist() == [-1, 0, 1, 2, 3]
    assert quantizer.half_up(torch.tensor([0.49999997, -0.49999997, -0.50000006])).tolist() == [0, 0, -1]
