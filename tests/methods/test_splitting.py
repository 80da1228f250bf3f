"""Channel splitting: the identity in fractions and what breaks it, steps, columns, metrics, storage, training."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import tiny
import torch
from bit_streams import numbers, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from known import W, X
from tiny_results import refusal

from repro.baselines import planted, rtn
from repro.core.errors import UserError
from repro.engine import weights
from repro.methods import bitbybit
from repro.methods.bitbybit import branches, sliced, splitting
from repro.methods.bitbybit.branches import Rounding
from repro.methods.bitbybit.config import Config
from repro.models import bits
from repro.models.activations import watching
from repro.models.groups import inputs, quantizer
from repro.models.groups.columns import Columns, paired
from repro.models.groups.quantizer import GroupGrid, restored
from repro.models.groups.weight import GroupWeight, WideWeight
from repro.models.lowbit import LowBitModel, block_linears, blocks
from repro.models.quantized import FORMATS
from repro.recipes import recipe

pytestmark = pytest.mark.usefixtures("own_build_folder")  # where checkpoints lie
FAST = settings(max_examples=40, deadline=None, derandomize=True)
KINDS = ("rounding_aware", "naive")
HALF, QUARTER = Fraction(1, 2), Fraction(1, 4)
IDS, SCORED = tiny.tokens(6, 16), tiny.tokens(3, 20, seed=5)
SMALL = {"tokens": 96, "compute": "float32", "streams": "float32", "epochs": 1, "group": 16}


def made(layout="llama", **options) -> LowBitModel:
    lm = LowBitModel(tiny.model(layout))
    bitbybit.apply(lm, IDS, Config(**SMALL | options))
    return lm


def random(*shape, seed=0, size=0.1) -> torch.Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def columns(channels, split, group) -> Columns:
    return paired(torch.isin(torch.arange(channels), torch.tensor(split)), group)


# --- the identity and its conditions ----------------------------------------------------------------------------------


def up(u: Fraction) -> int:
    return math.floor(u + HALF)


@FAST
@given(st.fractions(-9, 9), st.fractions(Fraction(1, 64), 4), st.integers(-5, 5))
def test_both_branches_add_up_in_exact_fractions(w, step, zero):
    def rounded(v):  # with a zero point, which is a whole number of steps
        return step * (up(v / step) + zero - zero)

    assert rounded(w / 2 - step / 4) + rounded(w / 2 + step / 4) == step * up(w / step)


def test_condition_ties_are_half_up():
    """With ties to even half of the ties fail, such as u = 3/2: 0 + 1 for 2; no other value does."""
    u = [Fraction(n, 24) for n in range(-24 * 8, 24 * 8)]
    even = [round(v / 2 - QUARTER) + round(v / 2 + QUARTER) == round(v) for v in u]
    ties = [(v % 1 == HALF) for v in u]
    assert all(even[i] for i in range(len(u)) if not ties[i])
    assert sum(not good for good in even) == sum(ties) / 2
    assert round(HALF) + round(Fraction(1)) == 1 != round(Fraction(3, 2))


def on_a_grid(step=2.0**-6) -> torch.Tensor:
    """3-bit groups whose step is exactly `step`: singles set both ends, pairs are eighths of a step, ties too."""
    eighths = torch.arange(-40, 41).float() / 8
    single = torch.tensor([-3.0, 4.0, 1.0, -1.0])
    return step * torch.cat([single.expand(81, 4), eighths[:, None], eighths[:, None].flip(0)], 1)


def effective(weight, split=(4, 5), group=8, width=3, kind="rounding_aware", **grid) -> torch.Tensor:
    grid = GroupGrid(width, group, **grid)
    return branches.fake_quantize(weight, columns(weight.shape[1], list(split), group), Rounding(grid, kind))


def test_split_channels_are_rounded_half_up_to_whole_steps_of_the_unclipped_grid():
    """Two codes of 3 bits reach the 11 levels from -5 to 5 steps; ties such as 3/2 go up."""
    w, step = on_a_grid(), 2.0**-6
    steps = effective(w) / step
    assert torch.equal(steps[:, 4:], torch.floor(w[:, 4:] / step + 0.5)), "unclipped, half up"
    assert torch.equal(steps[:, :4], w[:, :4] / step), "single columns are on the grid"
    assert steps[:, 4].unique().tolist() == list(range(-5, 6))


def test_that_identity_breaks_with_ties_to_even(monkeypatch):
    monkeypatch.setattr(quantizer, "half_up", torch.round)
    w, step = on_a_grid(), 2.0**-6
    off = effective(w)[:, 4:] / step - torch.floor(w[:, 4:] / step + 0.5)
    assert off.abs().max() == 1 and ((w[off.nonzero()[:, 0], 4] / step) % 1).eq(0.5).all()


def test_condition_both_branches_are_in_one_group():
    """A copy at the end of the matrix has another step; then only |e| ≤ (Δ₁ + Δ₂) / 2 remains."""
    with pytest.raises(UserError, match="channel 2 is in columns 2 and 14, of two groups of 8; both copies"):
        Columns.of(torch.tensor([*range(14), 2, 3]), 14, 8)
    w, grid = random(64, 16), GroupGrid(3, 8)
    w[:, 8:] *= 3
    one, two = quantizer.fit(quantizer.split(w, 8), grid)[0].unbind(1)
    apart = one * quantizer.half_up((w / 2 - one / 4) / one) + two * quantizer.half_up((w / 2 + one / 4) / two) - w
    assert (apart.abs() <= (one + two) / 2 * 1.001).all() and (apart.abs() > one).float().mean() > 0.1
    assert ((by_hand(w, one / 4, one) - w).abs() <= one / 2 * 1.001).all()


def by_hand(w: torch.Tensor, offset: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    return step * (quantizer.half_up((w / 2 - offset) / step) + quantizer.half_up((w / 2 + offset) / step))


def test_condition_the_step_is_the_stored_one():
    """Offsets of the step before it was rounded to E4M3 do not add up on the stored one; those of `fit` do."""
    w, grid, kept = random(256, 24), GroupGrid(2, 16, scale="e4m3"), columns(24, [*range(0, 24, 3)], 16)
    groups, scales, factor, z = branches.fit(w, kept, Rounding(grid))
    s = restored(scales, factor)
    first, wide = kept.first[::3], groups.flatten(1)
    torch.testing.assert_close(wide[:, first + 1] - wide[:, first], s.expand_as(groups).flatten(1)[:, first] / 2)
    halves = quantizer.split(kept.gather(w) * (1 - kept.sign.abs() / 2), 16)
    before = branches.step(halves, quantizer.split(kept.sign != 0, 16), grid)
    assert 0.01 < ((before - s).abs() / s).max() <= 2**-4
    step, early = (each.expand_as(groups).flatten(1)[:, first] for each in (s, before))
    want = step * quantizer.half_up(w[:, ::3] / step)
    assert (by_hand(w[:, ::3], step / 4, step) - want).abs().max() <= 1e-6
    assert ((by_hand(w[:, ::3], early / 4, step) - want).abs() > 0.5 * step).float().mean() > 0.001


def test_condition_no_branch_is_clipped():
    """A step that E4M3 rounds down clips end codes; the identity holds for all other entries and fails for some."""
    w, grid, kept = random(512, 24), GroupGrid(4, 16, scale="e4m3"), columns(24, [*range(0, 24, 3)], 16)
    groups, scales, factor, z = branches.fit(w, kept, Rounding(grid))
    s = restored(scales, factor)
    codes = quantizer.half_up(groups / s) + z
    clipped = ((codes < 0) | (codes > 15)).float().flatten(1)
    clipped = kept.joined(clipped)[:, ::3] > 0
    step = s.expand_as(groups).flatten(1)[:, kept.first[::3]]
    off = (branches.fake_quantize(w, kept, Rounding(grid))[:, ::3] - step * quantizer.half_up(w[:, ::3] / step)).abs()
    assert (off[~clipped] < 1e-6).all() and clipped.any() and (off[clipped] > 0.5 * step[clipped]).all()


def test_condition_the_reference_is_the_unclipped_grid_of_that_step():
    """The sum of two 2-bit codes is a code of 0 to 6; single columns of the same step have four values, -1 to 2."""
    step, u = 2.0**-6, torch.arange(-12, 29).float() / 8  # -3/2 to 7/2, which needs no larger step
    w = step * torch.cat([torch.tensor([-1.0, 2.0, 0.0, 1.0]).expand(41, 4), u[:, None].expand(41, 2)], 1)
    kept = columns(6, [4, 5], 8)
    weight = branches.pack(w, kept, Rounding(GroupGrid(2, 8)))
    assert (weight.scales == step).all() and weight.codes.max() == 3
    sums = kept.joined(weight.codes.int())[:, 4]
    assert (weight.dequantize()[:, 4] / step).tolist() == torch.floor(u + 0.5).tolist()
    assert sums.unique().tolist() == [1, 2, 3, 4, 5, 6] and len(weight.dequantize()[:, :4].unique()) == 4


@pytest.mark.parametrize("levels", ["asymmetric", "seq"])
def test_error_of_the_naive_split_is_four_times_as_large(levels):
    """Δ²/12 and Δ²/3 on uniform weights (appendix C); ends are set by single columns, so that both have one step."""
    u = torch.rand(4000, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    w = torch.cat([torch.tensor([-1.0, 1.0]).expand(4000, 2), u[:, 2:]], 1)
    result, kept = {}, columns(32, [*range(2, 32)], 64)
    for kind in ("rounding_aware", "naive"):
        grid = GroupGrid(8, 64, levels)
        _, scales, _, _ = branches.fit(w, kept, Rounding(grid, kind))
        step = scales.unique().item()
        error = (branches.fake_quantize(w, kept, Rounding(grid, kind)) - w)[:, 2:]
        result[kind] = error.square().mean().item() / step**2
        assert error.abs().max() <= step * (0.5 if kind == "rounding_aware" else 1) * 1.001
    assert result["rounding_aware"] == pytest.approx(1 / 12, rel=0.02)
    assert result["naive"] == pytest.approx(1 / 3, rel=0.02)
    assert result["naive"] / result["rounding_aware"] == pytest.approx(4.0, rel=0.02)


@pytest.mark.parametrize(("width", "factor"), [(2, 0.36), (4, 0.2675), (8, 0.2510)])
def test_a_channel_that_sets_both_ends_gets_the_step_of_the_closed_form(width, factor):
    """Δ = R/2 / (2^b - 1.5), Δ₀ = R / (2^b - 1): 0.6 Δ₀ at 2 bits, where the offsets take a tenth of the gain."""
    w = torch.rand(200, 16, generator=torch.Generator().manual_seed(1)).double() * 2 - 1
    w[:, 0], w[:, 1] = -1.0, 1.0
    kept = columns(16, [*range(16)], 32)
    step = branches.fit(w, kept, Rounding(GroupGrid(width, 32)))[1].double().flatten()
    torch.testing.assert_close(step, torch.full_like(step, 1 / (2**width - 1.5)), rtol=1e-6, atol=0)
    assert ((step[0] * (2**width - 1) / 2) ** 2).item() == pytest.approx(factor, rel=2e-3)


# --- the step and the whole formula -----------------------------------------------------------------------------------


def slow(values, sign, width, include_zero, levels="asymmetric"):
    """One group of section 3.1 with branches, in exact fractions, its step by iteration; the values of all columns."""
    halves = [v / 2 if o else v for v, o in zip(values, sign)]
    step = Fraction(0)
    for _ in range(60):
        moved = [v + o * step / 4 for v, o in zip(halves, sign)]
        low, high = min(moved), max(moved)
        if include_zero and levels == "asymmetric":
            low, high = min(low, Fraction(0)), max(high, Fraction(0))
        step = 2 * max(-low, high) / 2**width if levels == "seq" else (high - low) / (2**width - 1)
        step = step.limit_denominator(10**24)
    zero = up(-low / step)
    if include_zero:
        zero = min(max(zero, 0), 2**width - 1)
    return step, [step * (min(max(up(v / step) + zero, 0), 2**width - 1) - zero) for v in moved]


@FAST
@given(st.integers(0, 2**31), st.sampled_from([2, 3, 4, 8]), st.booleans(), st.integers(0, 8), st.floats(-3, 3))
def test_is_the_formula_in_exact_fractions(seed, width, include_zero, pairs, shift):
    """The closed form of the step is where its iteration ends; codes follow from it."""
    w = random(1, 16 - pairs, seed=seed).double() + 0.1 * shift
    kept = columns(16 - pairs, [*range(0, 2 * pairs, 2)][: 16 - pairs], 16)
    wide = [Fraction(v) for v in kept.gather(w)[0].tolist()]
    step, want = slow(wide, [int(v) for v in kept.sign.tolist()], width, include_zero)
    grid = GroupGrid(width, 16, include_zero=include_zero)
    _, scales, _, _ = branches.fit(w, kept, Rounding(grid))
    assert scales.flatten()[0].item() == pytest.approx(float(step), rel=1e-6)
    quantized = branches.fake_quantize(w, kept, Rounding(grid))[0]
    merged = kept.joined(torch.tensor([float(v) for v in want], dtype=torch.float64))
    assert (quantized - merged).abs().max() <= 1e-6 * w.abs().max()


@FAST
@given(st.integers(0, 2**31), st.sampled_from([2, 4, 8]), st.integers(0, 8))
def test_the_step_of_seq_levels_is_where_its_iteration_ends(seed, width, pairs):
    w = random(1, 16 - pairs, seed=seed).double()
    kept = columns(16 - pairs, [*range(pairs)], 16)
    wide, sign = [Fraction(v) for v in kept.gather(w)[0].tolist()], [int(v) for v in kept.sign.tolist()]
    _, scales, _, z = branches.fit(w, kept, Rounding(GroupGrid(width, 16, "seq")))
    assert scales.flatten()[0].item() == pytest.approx(float(slow(wide, sign, width, False, "seq")[0]), rel=1e-6)
    assert z.flatten()[0] == (2**width - 1) / 2


def test_groups_of_zeros_and_of_one_value():
    for value in (0.0, 0.5, -3.0):
        w = torch.full((2, 12), value)
        merged = effective(w, [0, 5, 6, 7], 16, 2)
        assert torch.isfinite(merged).all() and (merged - w).abs().max() <= abs(value) / 2 * 1.001
    assert torch.equal(effective(torch.zeros(2, 12), [0, 5], 16, 2), torch.zeros(2, 12))


@FAST
@given(
    st.integers(0, 2**31), st.sampled_from(["rounding_aware", "naive"]), st.sampled_from(["e4m3", "float16", "float32"])
)
def test_a_packed_weight_is_the_fake_quantized_one_at_every_width(seed, kind, scale):
    w, kept, grid = random(5, 56, seed=seed), columns(56, [1, 2, 30, 55], 16), GroupGrid(8, 16, scale=scale)
    for delta in ("centred", "zero"):
        master = branches.pack(w, kept, Rounding(grid, kind), delta)
        for width in (8, 4, 2):
            assert torch.equal(
                master.at(width).dequantize(), branches.fake_quantize(w, kept, Rounding(grid, kind), 8 - width, delta)
            )
        assert torch.equal(master.rows(1, 3).dequantize(), master.dequantize()[1:3])


@pytest.mark.parametrize("kind", ["rounding_aware", "naive"])
def test_gradient_passes_straight_through(kind):
    w = random(3, 28).requires_grad_()
    coefficients = random(3, 28, seed=1)
    quantized = branches.fake_quantize(w, columns(28, [3, 9, 10, 27], 16), Rounding(GroupGrid(2, 16), kind))
    (quantized * coefficients).sum().backward()
    assert torch.equal(w.grad, coefficients) and not torch.equal(quantized, w)


def test_without_split_channels_a_weight_is_quantized_as_elsewhere():
    for kind in ("rounding_aware", "naive"):
        for levels in ("asymmetric", "seq"):
            grid = GroupGrid(2, 32, levels, scale="e4m3")
            quantized = branches.fake_quantize(W, columns(256, [], 32), Rounding(grid, kind))
            assert torch.equal(quantized, quantizer.fake_quantize(W, grid))


# --- columns ----------------------------------------------------------------------------------------------------------


@FAST
@given(st.integers(1, 90), st.integers(0, 2**31), st.sampled_from([2, 4, 16, 32]), st.floats(0, 1))
def test_columns_hold_every_pair_in_one_group(channels, seed, group, share):
    twice = torch.rand(channels, generator=torch.Generator().manual_seed(seed)) < share
    result, size = paired(twice, group), int(twice.sum())
    index = result.index.tolist()
    assert len(index) == math.ceil((channels + size) / group) * group, "filled up to whole groups, no further"
    assert [index.count(i) for i in range(channels)] == (1 + twice.int()).tolist()
    assert index.count(channels) == len(index) - channels - size
    empty = [index[i : i + group].count(channels) for i in range(0, len(index), group)]
    assert max(empty) - min(empty) <= 3, "spread over the groups; one more beside an odd channel"
    for i in twice.nonzero().flatten().tolist():
        copies = [column for column, other in enumerate(index) if other == i]
        assert copies[0] // group == copies[1] // group and [result.first[i], result.second[i]] == copies
        assert result.sign[copies].tolist() == [-1, 1]
    singles = [i for i in index if i < channels and not twice[i]]
    assert singles == sorted(singles) and (result.sign != 0).sum() == 2 * size
    again = Columns.of(result.stored(), channels, group)
    assert all(torch.equal(getattr(again, key), getattr(result, key)) for key in ("index", "first", "second", "sign"))


def test_widened_layers_of_the_paper():
    """10 % of 4096 and of 14336 channels."""
    for channels, width in ((4096, 4512), (14336, 15776)):
        assert splitting.count(0.1, channels) == math.ceil(channels / 10)
        result = splitting.chosen(torch.arange(channels).double(), splitting.count(0.1, channels), 32)
        assert len(result.index) == width and result.stored().dtype == torch.int16
    assert columns(2**15, [5], 32).stored().dtype == torch.int32


def test_what_columns_do_to_numbers():
    kept = columns(5, [1, 4], 8)
    assert kept.index.tolist() == [0, 2, 1, 1, 3, 5, 4, 4]
    x = torch.tensor([[10.0, 20, 30, 40, 50]])
    wide = kept.gather(x)
    assert wide.tolist() == [[10, 30, 20, 20, 40, 0, 50, 50]]
    assert kept.joined(wide).tolist() == [[10, 40, 30, 40, 100]] and torch.equal(kept.taken(wide), x)


@pytest.mark.parametrize(
    ("index", "group", "message"),
    [
        ([0, 1, 2], 2, "3 columns of 3 channels do not divide into groups of 2"),
        ([0, 1, 2, 4], 2, "names channels other than 0 to 2"),
        ([0, 1, 2, -1], 2, "names channels other than 0 to 2"),
        ([0, 1, 1, 3], 4, "channel 2 has 0 columns; each channel has one or two"),
        ([0, 0, 0, 1, 2, 3], 2, "channel 0 has 3 columns"),
        (
            [0, 1, 1, 2],
            2,
            "channel 1 is in columns 1 and 2, of two groups of 2; both copies of a channel share one step",
        ),
    ],
)
def test_index_lists_that_mean_nothing_are_refused(index, group, message):
    with pytest.raises(UserError, match=message):
        Columns.of(torch.tensor(index), 3, group)


# --- metrics ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen():
    layer = torch.nn.Identity()
    with watching({"x": layer}, 4, ("kurtosis",)) as statistics:
        layer(X.view(4, 128, 256))
    return statistics["x"]


@pytest.mark.parametrize(
    ("metric", "want"),
    [
        ("product", [111, 222, 74, 185, 37, 148, 0, 139, 69, 216]),
        ("weight", [204, 173, 101, 218, 62, 71]),
        ("activation", [111, 222, 74, 185, 37, 148]),
    ],
)
def test_known_answers_of_the_outlier_metrics(seen, metric, want):
    values = splitting.sensitivity(metric, W, seen)
    assert values.argsort(descending=True, stable=True)[: len(want)].tolist() == want
    kept = splitting.chosen(values, len(want), 32)
    assert sorted((kept.sign > 0).nonzero().flatten().tolist()) == sorted(kept.second[want].tolist())


def test_values_of_the_outlier_metrics(seen):
    x, largest = X.double(), W.abs().amax(0).double()
    close = {"rtol": 1e-5, "atol": 0}
    product = splitting.sensitivity("product", W, seen) * math.sqrt(len(X))
    torch.testing.assert_close(product, x.norm(dim=0) * largest, **close)
    torch.testing.assert_close(splitting.sensitivity("activation", W, seen), x.abs().amax(0), **close)
    kurtosis = ((x - x.mean(0)) ** 4).mean(0) / x.var(0, correction=0) ** 2 - 3
    torch.testing.assert_close(splitting.sensitivity("kurtosis", W, seen), kurtosis, rtol=1e-4, atol=1e-4)


def test_a_constant_channel_has_no_kurtosis_and_comes_last():
    layer, x = torch.nn.Identity(), X[:64, :32].clone()
    x[:, 7] = 1.0
    with watching({"x": layer}, 1, ("kurtosis",)) as statistics:
        layer(x[None])
    values = splitting.sensitivity("kurtosis", W[:, :32], statistics["x"])
    assert values[7] == -math.inf and values.argsort(descending=True)[-1] == 7


def test_ratios_grow_with_depth_and_their_mean_is_a_tenth():
    config = Config()
    for depth in (1, 2, 16, 32):
        result = [splitting.ratio(i, depth, config.split_first, config.split_last) for i in range(depth)]
        assert sum(result) / depth == pytest.approx(0.1) and all(a < b for a, b in pairwise(result))
    assert splitting.ratio(3, 5, 0.2, 0.6) == pytest.approx(0.5)
    assert [splitting.count(r, 256) for r in (0.05, 0.1, 0.15)] == [13, 26, 39] and splitting.count(0.07, 100) == 7


def test_equal_channels_are_taken_in_their_order():
    kept = splitting.chosen(torch.tensor([1.0, 3, 2, 3, 2, 2]), 3, 2)
    assert (kept.second < len(kept.index)).tolist() == [False, True, True, True, False, False]


# --- as it is stored --------------------------------------------------------------------------------------------------


def test_stored_bits_are_those_that_are_packed():
    """Codes of all columns, scales and zero points of all groups, 16 bits for each entry of the list."""
    kept = splitting.chosen(W.abs().amax(0).double(), 26, 32)
    weight = branches.pack(W, kept, Rounding(GroupGrid(2, 32, scale="e4m3", include_zero=True)))
    assert weight.codes.shape == (64, 288) and weight.shape == (64, 256)
    assert weight.stored_bits() == {
        "codes": 64 * 288 * 2, "scales": 64 * 9 * 8 + 32, "zeros": 64 * 9 * 2, "indices": 288 * 16,
    }  # fmt: skip
    parts = stream(weight.codes, 2), weight.index.numpy().tobytes()
    assert [8 * len(part) for part in parts] == [weight.stored_bits()[kind] for kind in ("codes", "indices")]
    codes = numbers(parts[0], 2, weight.codes.shape)
    index = torch.frombuffer(bytearray(parts[1]), dtype=torch.int16)
    read = WideWeight(codes, weight.scales, weight.factor, weight.zeros, 2, 32, index=index, channels=256)
    assert torch.equal(read.dequantize(), weight.dequantize())


@torch.no_grad()
@pytest.mark.parametrize("act_bits", [16, 4])
def test_saved_loaded_and_refused_by_a_reader_without_it(tmp_path, monkeypatch, act_bits):
    lm, path = made(act_bits=act_bits), tmp_path / "model.safetensors"
    lm.save(path, {"of": "a test"})
    again = LowBitModel(tiny.model("llama"))
    again.load(path)
    assert torch.equal(tiny.logits(again.model, SCORED), tiny.logits(lm.model, SCORED))
    for name, weight in again.weights.items():
        assert isinstance(weight, WideWeight) and torch.equal(weight.dequantize(), lm.weights[name].dequantize())
        assert torch.equal(again.model.get_submodule(name).weight, weight.dequantize())
        assert len(again.attachments.get(name, [])) == (act_bits != 16)
    counted = bits.report(again)
    widths = {name: len(weight.index) for name, weight in lm.weights.items()}
    assert counted["block"]["indices"] == 16 * sum(widths.values()), "the list is counted once"
    assert counted["block"]["codes"] == 2 * sum(len(lm.weights[name].codes) * width for name, width in widths.items())
    assert bits.report(lm) == counted
    with monkeypatch.context() as patch:
        patch.delitem(FORMATS, WideWeight.FORMAT)
        with pytest.raises(UserError, match="not a compressed model that this version reads"):
            LowBitModel(tiny.model("llama")).load(path)
    assert GroupWeight.FORMAT in FORMATS


def test_a_list_of_another_layer_is_refused(tmp_path):
    lm = made(epochs=0)
    name = "model.layers.0.self_attn.q_proj"
    object.__setattr__(lm.weights[name], "index", lm.weights[name].index[:-16].contiguous())
    lm.save(tmp_path / "model.safetensors", {})
    with pytest.raises(UserError, match="an index list of 64 columns for 80 columns of codes"):
        LowBitModel(tiny.model("llama")).load(tmp_path / "model.safetensors")


# --- inputs -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_inputs_are_quantized_in_the_groups_of_the_columns():
    """The layer computes what a kernel would: gathered inputs, rounded, times the codes of every column."""
    linear, kept, grid = (
        torch.nn.Linear(60, 8),
        columns(60, [0, 7, 33, 34, 59], 16),
        GroupGrid(3, 16, include_zero=True),
    )
    weight = branches.pack(linear.weight, kept, Rounding(GroupGrid(2, 16)))
    x = torch.randn(4, 5, 60, generator=torch.Generator().manual_seed(2)) * (1 + torch.arange(60) % 9)
    wide = quantizer.fake_quantize(kept.gather(x), grid) @ GroupWeight.dequantize(weight).T + linear.bias
    linear.weight.data = weight.dequantize()
    attachment = inputs.attachment("bitbybit", 60, grid, kept)
    layer = inputs.attached(linear, attachment.tensors, attachment.numbers)
    torch.testing.assert_close(layer(x), wide, rtol=1e-5, atol=1e-5)
    assert (layer(x) - linear(x)).abs().max() > 0.01 and attachment.stored_bits() == 0
    block, want = torch.nn.Sequential(linear), layer(x)
    assert torch.equal(inputs.on_quantized_inputs(block, {"0": 3}, grid, {"0": kept})(x), want)
    assert not torch.equal(block(x), want)
    x.requires_grad_()
    with torch.enable_grad():
        layer(x).sum().backward()
    torch.testing.assert_close(x.grad[0, 0], linear.weight.sum(0), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_engine_runs_the_sum_of_the_columns():
    lm, names = made(epochs=0), [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    want = torch.cat([lm.model.get_submodule(name)(x) for name in names], 1)
    torch.testing.assert_close(weights.product(lm, names, torch.device("cpu"), torch.float32)(x), want)


def test_inputs_with_a_list_of_another_layer_are_refused():
    attachment = inputs.attachment("bitbybit", 60, GroupGrid(3, 16), columns(60, [0, 7, 33, 59], 16))
    with pytest.raises(UserError, match="64 columns of 60 channels do not divide into groups of 48"):
        inputs.attached(torch.nn.Linear(60, 8), attachment.tensors, attachment.numbers | {"group": 48})


# --- training ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("layout", ["llama", "qwen2", "mistral", "phi"])
def test_what_is_stored_is_what_was_trained(monkeypatch, layout):
    last, true_at = {}, bitbybit.TrainedBlock.at

    def noted(self, precision, kwargs):
        run = true_at(self, precision, kwargs)
        return lambda x: last.update({id(self): (x.detach().clone(), kwargs, run)}) or run(x)

    monkeypatch.setattr(bitbybit.TrainedBlock, "at", noted)
    lm = made(layout, act_bits=4, lr=1e-3)
    for block, (x, kwargs, run) in zip(lm.model.base_model.layers, last.values(), strict=True):
        torch.testing.assert_close(block(x, **kwargs), run(x), rtol=1e-5, atol=1e-5)
    assert all(isinstance(weight, WideWeight) for weight in lm.weights.values())


def test_channels_are_ranked_in_full_precision_whatever_blocks_compute_in(monkeypatch):
    seen, true_channels = [], bitbybit.split_channels
    noted = lambda model, *rest: seen.append(model.dtype) or true_channels(model, *rest)  # noqa: E731
    monkeypatch.setattr(bitbybit, "split_channels", noted)
    made(compute="bfloat16", epochs=0)
    assert seen == [torch.float32]


def test_training_beats_rounding():
    ids, errors = tiny.tokens(32, 24), []
    full = tiny.logits(tiny.model("llama"), ids)
    for rate in (1e-3, 0.0):
        lm = LowBitModel(tiny.model("llama"))
        bitbybit.apply(lm, ids, Config(**SMALL | {"tokens": 768, "epochs": 3, "lr": rate}))
        errors.append((tiny.logits(lm.model, ids) - full).square().mean().item())
    assert errors[0] < 0.7 * errors[1], errors  # 0.37 of it


def test_columns_are_those_of_the_metric_with_more_in_the_later_block():
    lm = made(epochs=0, split_first=0.1, split_last=0.3, split_metric="weight")
    model = tiny.model("llama")
    counts = []
    for number, prefix in enumerate(blocks(model)):
        for name, linear in block_linears(model).items():
            if name.startswith(prefix):
                size = math.ceil(round((0.1, 0.3)[number] * linear.in_features, 9))
                top = linear.weight.abs().amax(0).argsort(descending=True)[:size].tolist()
                index = lm.weights[name].index.tolist()
                twice = {i for i in index if index.count(i) == 2 and i < linear.in_features}
                assert twice == set(top)
                counts.append(size)
    assert lm.facts["layers/split"] == counts and counts[0] == 7 and counts[7] == 20


@pytest.mark.parametrize("metric", ["product", "activation", "kurtosis"])
def test_every_metric_reads_the_inputs_of_the_full_precision_model(monkeypatch, metric):
    noted, true = [], splitting.sensitivity
    monkeypatch.setattr(splitting, "sensitivity", lambda *a: noted.append((a[0], true(*a))) or noted[-1][1])
    made(epochs=0, split_metric=metric)
    model, names = tiny.model("llama"), list(block_linears(tiny.model("llama")))
    with watching({name: model.get_submodule(name) for name in names}, 6, ("kurtosis",)) as seen:
        tiny.logits(model, IDS)
    assert {kind for kind, _ in noted} == {metric} and len(noted) == 14
    for (_, read), name in zip(noted, names, strict=True):
        want = true(metric, model.get_submodule(name).weight, seen[name])
        torch.testing.assert_close(read, want, rtol=1e-3, atol=1e-3)


def test_channels_are_chosen_on_the_second_text_and_trained_on_the_first():
    def stored(ids, text="", second=None, **options):
        lm = LowBitModel(tiny.model("llama"))
        bitbybit.apply(lm, ids, Config(**SMALL | {"split_text": text} | options), second)
        return lm.weights, lm.facts.get("training/loss")

    other = tiny.tokens(6, 16, seed=9)
    on_other, alike = stored(IDS, "c4", other, epochs=0)[0], stored(other, epochs=0)[0]
    plain = stored(IDS, epochs=0)[0]
    assert all(torch.equal(on_other[name].index, alike[name].index) for name in alike)
    assert any(not torch.equal(on_other[name].index, plain[name].index) for name in plain)
    assert stored(IDS, "c4", IDS, lr=1e-3)[1] == stored(IDS, lr=1e-3)[1] != stored(other, "c4", IDS, lr=1e-3)[1]


def test_columns_do_not_change_while_weights_are_trained(monkeypatch):
    result, true = [], branches.fake_quantize
    monkeypatch.setattr(
        branches, "fake_quantize", lambda w, kept, *rest: result.append(id(kept)) or true(w, kept, *rest)
    )
    lm = made(lr=1e-3, schedule=["w4a16", "w2a16"], epochs=2)
    assert len(set(result)) == len(lm.weights) and len(result) > 4 * len(lm.weights)


def test_full_precision_is_left_alone_before_its_stage():
    lm = LowBitModel(tiny.model("llama"))
    config = Config(**SMALL)
    states = bitbybit.trained_blocks(lm, lm.model, {}, config)
    bitbybit.split_channels(lm.model, states, IDS, config)
    for state in states:
        for name, weight in state.weights(16).items():
            assert torch.equal(weight, state.block.get_parameter(name))
        assert all(not torch.equal(w, state.block.get_parameter(n)) for n, w in state.weights(4).items())
        assert set(state.columns) == set(state.latent)


@torch.no_grad()
def test_on_planted_outliers_splitting_beats_none_and_the_aware_split_the_naive_one():
    """4 bits without training: error of the logits, and of the weights of split channels."""
    options = {"epochs": 0, "bits": 4, "schedule": ["w4a16"], "split_metric": "weight"}
    result, of_weights, full = {}, {}, tiny.logits(tiny.model("llama"), SCORED)
    for kind in ("none", "naive", "rounding_aware"):
        lm = LowBitModel(tiny.model("llama"))
        planted.apply(lm, None, planted.Config(share=0.05, factor=4))
        assert torch.equal(tiny.logits(lm.model, SCORED), full)
        bitbybit.apply(lm, IDS, Config(**SMALL | options, split=kind))
        result[kind] = (tiny.logits(lm.model, SCORED) - full).square().mean().item()
        of_weights[kind] = 0.0
        for name, weight in lm.weights.items():
            if kind != "none":
                twice = weight.columns.second < len(weight.index)
                of_weights[kind] += (weight.dequantize() - lm.full[name])[:, twice].square().sum().item()
    assert result["rounding_aware"] < result["naive"] < 0.75 * result["none"], result
    assert of_weights["rounding_aware"] < 0.6 * of_weights["naive"], of_weights


@pytest.mark.parametrize("widths", [[], [8], [4], [2], [8, 4]])
def test_branches_of_a_master_at_every_width(widths):
    """1/3 - φ (1 - φ) of the squared step, where φ steps of the width that is read lie between branches."""
    u = torch.rand(4000, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    w = torch.cat([torch.tensor([-1.0, 1.0]).expand(4000, 2), u[:, 2:]], 1)
    kept = columns(32, [*range(2, 32)], 64)
    rounding = Config(any_precision=True, split_widths=widths, group=64, scale="float32").splitting(8)
    assert rounding.offset == sum(2 ** (8 - width) / 4 for width in widths or [8, 4, 2])
    master = branches.pack(w, kept, rounding)
    for read in (8, 4, 2):
        error = ((master.at(read).dequantize() - w) / (master.scales * 2 ** (8 - read)))[:, 2:]
        phase = rounding.offset * 2 / 2 ** (8 - read) % 1
        want = 1 / 3 - phase * (1 - phase)
        rel = 0.02 if read > 2 else 0.35  # weights of a few steps are not uniform modulo one
        assert error.square().mean().item() == pytest.approx(want, rel=rel), (read, phase)


def test_the_offset_of_a_master_is_for_the_widths_of_its_stages():
    assert Config(any_precision=True).splitting(8) == Config(any_precision=True, split_widths=[2, 4, 8]).splitting(8)
    assert Config(any_precision=True, bits=4).splitting(8).offset == 17 / 4 and Config().splitting(2).offset == 0.25


def test_a_master_of_split_columns_is_read_at_fewer_bits():
    lm = made(any_precision=True, lr=1e-3)
    before = dict(lm.weights)
    sliced.apply(lm, None, sliced.Config(4))
    for name, weight in lm.weights.items():
        assert weight.bits == 4 and torch.equal(weight.codes, before[name].codes >> 4)
        assert weight.shape == before[name].shape and torch.equal(weight.index, before[name].index)


def test_continues_from_a_step_that_came_before():
    lm = LowBitModel(tiny.model("llama"))
    rtn.apply(lm, None, rtn.Config(bits=4, group=16))
    bitbybit.apply(lm, IDS, Config(**SMALL))
    assert all(isinstance(weight, WideWeight) for weight in lm.weights.values())


# --- recipes and bad input --------------------------------------------------------------------------------------------


BAD = {
    "bitbybit(split_first=0)": "split_first is 0.0; a share of the channels above 0 and below 1 is split (split=none",
    "bitbybit(split_last=1)": "split_last is 1.0; a share of the channels above 0 and below 1 is split",
    "bitbybit(split=half)": "split",
    "bitbybit(split_metric=norm)": "split_metric",
    "bitbybit(split_widths=[2])": "split_widths is for any_precision",
    "bitbybit(any_precision, split_widths=[3])": "3 bits are not nested in a master of 8",
    "bitbybit(split=none, split_text=c4)": "split_text is 'c4', and split=none reads no text; leave one out",
    "bitbybit(split_metric=weight, split_text=c4)": "split_text is 'c4', and split_metric=weight reads no text",
    "bitbybit-g15": "group is 15; both copies of a split channel take an even one",
}


@pytest.mark.parametrize("text", BAD)
def test_options_that_mean_nothing_are_refused(text):
    assert BAD[text] in refusal(recipe.parse, text)


def test_groups_and_weights_that_do_not_fit_are_refused():
    assert Config(group=15, split="none").group == 15
    with pytest.raises(UserError, match="split_last is nan"):
        Config(split_last=math.nan)
    with pytest.raises(UserError, match="layers.0.self_attn.q_proj: 64 input channels do not divide into groups of 48"):
        made(group=48)
    with pytest.raises(
        UserError, match="a group of 5 cannot hold pairs of columns alone; splitting takes an even group"
    ):
        columns(20, [3], 5)
    with pytest.raises(UserError, match="a 2x32 weight holds NaN or Inf"):
        branches.pack(torch.full((2, 32), math.nan), columns(32, [3], 16), Rounding(GroupGrid(2, 16), "naive"))
    lm = LowBitModel(tiny.model("llama"))
    lm.model.model.layers[1].mlp.up_proj.weight.data[3, 4] = math.nan
    with pytest.raises(UserError, match="layers.1.mlp.down_proj: its inputs hold NaN"):
        bitbybit.apply(lm, IDS, Config(**SMALL))
