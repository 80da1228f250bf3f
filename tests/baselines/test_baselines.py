"""RTN and GPTQ: the known answers of the papers' own code, a slow GPTQ by the equations, and properties of the grid."""

import itertools
from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known import W, X, errors

from repro.baselines import BASELINES, dns, gptq, grid, hqq, rtn
from repro.baselines.gptq import Config
from repro.baselines.grid import Grid
from repro.core.errors import UserError
from repro.models.lowbit import LowBitModel, block_inputs, block_linears

CLOSE = 1e-5
SEQUENCES = X.view(4, 128, 256)
QUANTIZERS = sorted(name for name, module in BASELINES.items() if issubclass(module.Config, Grid))  # on a grid
SHORT = {
    "staged_ap": {"tokens": 144},
    "efficientqat": {"tokens": 144},  # all of tiny.tokens()
    "bitdistiller": {"tokens": 144, "batch": 1, "group": 64},
    "smoothquant": {"act_bits": 16},  # what it attaches has a test of its own
}


def hessian(x: torch.Tensor = SEQUENCES) -> torch.Tensor:
    """H of a single linear that reads sequences `x` `[S, L, K]`."""
    block = torch.nn.Sequential(torch.nn.Linear(x.shape[-1], 1))
    with torch.no_grad():
        return gptq.hessians(block, [["0"]], list(x[:, None]), {})[0]


def test_gptq_runs_no_block_for_states_that_nobody_reads():
    """Behind the last block nothing is read: it runs once less for each of the three sequences than the first."""
    lm, calls = LowBitModel(tiny.model("llama")), []
    for index, block in enumerate(lm.model.model.layers):
        block.register_forward_hook(lambda *_, index=index: calls.append(index))
    ids = tiny.tokens(3, 16)
    BASELINES["gptq"].apply(lm, ids, BASELINES["gptq"].Config())
    assert calls.count(0) - calls.count(1) == 3


def test_the_generated_inputs_are_the_known_ones():
    sums = [t.double().sum().item() for t in (W, W.double().square(), X, X.double().square())]
    assert sums == pytest.approx([-1.7142367, 36.149397, -334.77684, 213306.12], rel=1e-7)
    assert (W.double() @ X.double().T).square().mean().item() == pytest.approx(0.93972498, rel=1e-7)


@pytest.mark.parametrize(
    "options, weight_error, output_error",
    [
        ({}, 1.4347141e-05, 0.0058572236),
        ({"symmetric": True}, 1.4562789e-05, 0.0059384183),
        ({"group": 64}, 1.3058000e-05, 0.0052998594),
        ({"group": 64, "bits": 3}, 6.171135e-05, 0.025933147),
        ({"group": 64, "bits": 2}, 3.2845695e-04, 0.12964341),
        ({"clip": "mse"}, 1.342428e-05, 0.0055489725),
    ],
)
def test_rtn_known_answers(options, weight_error, output_error):
    measured = errors(grid.rtn(W, Grid(**options, scale_dtype="float32")).dequantize())
    assert measured == pytest.approx((weight_error, output_error), rel=CLOSE)


@pytest.mark.parametrize(
    "options, weight_error, output_error",
    [
        ({}, 3.3848746e-05, 0.0045283300),
        ({"group": 64}, 3.1230868e-05, 0.0042257811),
        ({"group": 64, "bits": 3}, 1.4838953e-04, 0.021159746),
        ({"group": 64, "bits": 2}, 8.0586994e-04, 0.12359632),
        ({"group": 64, "act_order": True}, 5.3655226e-05, 0.0032124721),
        ({"group": 64, "act_order": True, "static_groups": True}, 4.9445286e-05, 0.0031515656),
        ({"symmetric": True}, 3.4111515e-05, 0.0045833463),
    ],
)
def test_gptq_known_answers(options, weight_error, output_error):
    measured = errors(gptq.gptq(W, hessian(), Config(**options, scale_dtype="float32")).dequantize())
    assert measured == pytest.approx((weight_error, output_error), rel=CLOSE)


@pytest.mark.parametrize(
    "bits, weight_error, output_error",
    [
        (4, 1.1976445e-05, 0.0049691903),
        (3, 5.3716058e-05, 0.022945435),
        (2, 3.0146493e-04, 0.13300333),
    ],
)
def test_hqq_known_answers(bits, weight_error, output_error):
    weight = hqq.hqq(W, hqq.Config(bits=bits, scale_dtype="float32"))
    assert errors(weight.dequantize()) == pytest.approx((weight_error, output_error), rel=CLOSE)


def test_hqq_stores_real_zeros_and_survives_constant_groups():
    flat = torch.cat([W[:, :64], torch.full((64, 64), 0.03), torch.zeros(64, 64)], 1)
    weight = hqq.hqq(flat, hqq.Config())
    assert weight.scales.dtype == weight.zeros.dtype == torch.float16
    assert (weight.zero_bits, weight.scale_bits) == (
        16,
        16,
    )
    assert (weight.zeros != weight.zeros.round()).any() and weight.stored_bits()["zeros"] == 64 * 3 * 16
    error = (weight.dequantize() - flat).abs()
    assert error[:, :64].max() < 0.02 and error[:, 64:].max() < 1e-4


@pytest.mark.parametrize(
    "options, message", [({"bits": 9}, "2 to 8"), ({"group": 0}, "group is 0"), ({"norm": 2.0}, "norm")]
)
def test_hqq_refuses_what_means_nothing(options, message):
    with pytest.raises(UserError, match=message):
        hqq.Config(**options)


def test_hessian_known_answer():
    H = hessian()
    assert [H.trace().item(), H[0, 0].item(), H[0, 1].item()] == pytest.approx(
        [106653.06, 1303.1703, 9.0969543], rel=CLOSE
    )


def slow_gptq(W: torch.Tensor, H: torch.Tensor, config: Config) -> torch.Tensor:
    """Equation 2 in float64: per column, invert what is left of H and spread the error; no blocks, no Cholesky."""
    K, W, H = W.shape[1], W.double().clone(), H.double().clone()
    group, levels = config.group or K, 2**config.bits - 1
    static = config.static_groups or group == K

    def fit(part):
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if config.symmetric:
            high = torch.maximum(-low, high)
            return 2 * high / levels, torch.full_like(high, (levels + 1) / 2)
        return (high - low) / levels, torch.round(-low * levels / (high - low))

    grids = [fit(W[:, i : i + group]) for i in range(0, K, group)]
    order = H.diagonal().argsort(descending=True) if config.act_order else torch.arange(K)
    W, H = W[:, order], H[order][:, order]
    H += config.percdamp * H.diagonal().mean() * torch.eye(K)
    seen, Q = W.clone(), torch.empty_like(W)
    for q in range(K):
        if q % config.blocksize == 0:
            seen = W.clone()  # groups are fitted on the weights as of the last block
        if not static and q % group == 0:
            grids[q // group] = fit(seen[:, q : q + group])
        scale, zero = grids[(order[q].item() if static else q) // group]
        Q[:, q] = ((W[:, q] / scale).round() + zero).clamp(0, levels).sub(zero) * scale
        H_F = torch.linalg.inv(H[q:, q:])
        W[:, q:] -= torch.outer((W[:, q] - Q[:, q]) / H_F[0, 0], H_F[0])
    return Q[:, order.argsort()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bits": 2, "group": 16},
        {"bits": 3, "group": 8, "blocksize": 16},
        {"bits": 8, "group": 24, "blocksize": 7},
        {"symmetric": True, "group": 16, "blocksize": 1},
        {"act_order": True, "group": 16, "blocksize": 48},
        {"act_order": True, "group": 16, "static_groups": True},
        {"act_order": True, "percdamp": 0.1},
    ],
    ids=str,
)
def test_gptq_agrees_with_the_equations(options):
    w, x = W[:24, :48], X[:64, :48]
    H = 2 * x.T @ x
    config = Config(**options, scale_dtype="float32")
    fast, slow = gptq.gptq(w, H, config).dequantize().double(), slow_gptq(w, H, config)
    off = (fast - slow).abs().amax(1) > 1e-5
    assert off.sum() <= 1, "at most one row may round a near tie the other way"


def correlated(seed: int, tokens: int = 200, columns: int = 48) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 12, generator=random) @ torch.randn(12, columns, generator=random) + 0.1 * torch.randn(
        tokens, columns, generator=random
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "options", [{"bits": 2}, {"bits": 3, "group": 16}, {"bits": 4, "act_order": True}, {"bits": 8}], ids=str
)
def test_gptq_is_better_than_rtn_on_its_calibration(options, seed):
    x, w = correlated(seed), W[:32, 48:96]
    config = Config(**options)
    plain, better = grid.rtn(w, config).dequantize(), gptq.gptq(w, hessian(x[None]), config).dequantize()
    assert ((better - w) @ x.T).norm() < ((plain - w) @ x.T).norm()


def test_dead_columns_become_zero_and_cost_nothing():
    H = hessian()
    H[5], H[:, 5] = 0, 0
    quantized = gptq.gptq(W, H, Config()).dequantize()
    assert (quantized[:, 5] == 0).all()
    wild = W.clone()
    wild[:, 5] = 100
    assert torch.equal(quantized, gptq.gptq(wild, H, Config()).dequantize())


def test_a_dead_column_ranks_as_one_in_act_order_and_touches_no_other():
    H, live = torch.diag(torch.tensor([4.0, 0, 0.5, 2])), [0, 2, 3]
    config = Config(group=2, act_order=True)
    quantized = gptq.gptq(W[:8, :4], H, config)
    assert quantized.group_index.tolist() == [0, 1, 1, 0]  # order 0, 3, 1, 2: the dead column comes before H_ii = 0.5
    assert (quantized.dequantize()[:, 1] == 0).all()
    alone = gptq.gptq(W[:8, live], H[live][:, live], Config()).dequantize()
    assert torch.equal(gptq.gptq(W[:8, :4], H, Config()).dequantize()[:, live], alone)


def test_act_order_stores_an_index_only_where_groups_are_permuted():
    H = hessian()
    permuted = gptq.gptq(W, H, Config(group=64, act_order=True))
    assert permuted.group_index.dtype == torch.int32
    assert permuted.group_index.bincount().tolist() == [64] * 4
    strongest = H.diagonal().argsort(descending=True)[:64]
    assert (permuted.group_index[strongest] == 0).all()
    for options in ({"group": 64, "act_order": True, "static_groups": True}, {"act_order": True}, {"group": 64}):
        assert gptq.gptq(W, H, Config(**options)).group_index is None


grids = st.builds(
    Grid,
    bits=st.sampled_from([2, 3, 4, 8]),
    group=st.sampled_from([0, 4, 6]),
    symmetric=st.booleans(),
    clip=st.sampled_from(["none", "mse"]),
    scale_dtype=st.sampled_from(["float16", "float32"]),
)


@st.composite
def weights(draw, rows=5, columns=12):
    """Rows of ordinary weights, of one sign, constant, zero, and of very different sizes."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    w = torch.randn(rows, columns, generator=random) * 10.0 ** draw(st.integers(-9, 3))
    for row, kind in enumerate(
        draw(st.lists(st.sampled_from("ordinary positive negative constant zero".split()), max_size=rows))
    ):
        w[row] = {
            "ordinary": w[row],
            "positive": w[row].abs(),
            "negative": -w[row].abs(),
            "constant": w[row, 0],
            "zero": 0,
        }[kind]
    return w


many = settings(max_examples=150, deadline=None, derandomize=True)


@many
@given(weights(), grids)
def test_codes_and_zeros_are_in_range(w, g):
    q = grid.rtn(w, g)
    assert q.codes.dtype == torch.uint8 and q.codes.max().item() < 2**g.bits
    assert q.zeros.min() >= 0 and q.zeros.max().item() < 2**g.bits and torch.equal(q.zeros, q.zeros.round())
    assert (q.scales > 0).all() and q.scales.dtype == getattr(torch, g.scale_dtype)
    assert torch.isfinite(q.dequantize()).all()


@many
@given(weights(), grids)
def test_error_is_at_most_half_a_step_inside_the_range(w, g):
    q = grid.rtn(w, g)
    index = q.column_group()
    scale, zero = q.scales.float()[:, index], q.zeros.float()[:, index]
    inside = (w >= -zero * scale) & (w <= (2**g.bits - 1 - zero) * scale)
    error = (w - q.dequantize()).abs()
    assert (error <= scale / 2 * (1 + 1e-4))[inside].all()
    if g.clip == "none":  # nothing of the weight is outside by more than half a step, and half precision's own rounding
        assert (error <= scale / 2 * (1 + 1e-4) + w.abs() * 2**-10).all()


@many
@given(weights(), grids)
def test_quantizing_what_was_dequantized_changes_nothing(w, g):
    columns = grid.split(w, g)
    scale, zero = grid.fit(columns, g)
    codes = grid.quantize(columns, scale, zero, g.bits)
    again = grid.quantize(grid.dequantize(codes, scale, zero), scale, zero, g.bits)
    assert torch.equal(codes, again)


@many
@given(weights(), grids, st.permutations(range(5)))
def test_rows_are_independent(w, g, order):
    assert torch.equal(grid.rtn(w[order], g).dequantize(), grid.rtn(w, g).dequantize()[order])


@many
@given(weights(), grids)
def test_one_group_per_row_is_per_channel(w, g):
    one, row = grid.rtn(w, replace(g, group=12)), grid.rtn(w, replace(g, group=0))
    assert torch.equal(one.codes, row.codes)
    assert torch.equal(one.scales, row.scales)
    assert torch.equal(one.zeros, row.zeros)


@many
@given(st.floats(-100, 100, width=32), st.sampled_from([2, 3, 4, 8]))
def test_a_constant_row_is_exact_up_to_its_stored_scale(value, bits):
    w = torch.full((1, 8), value)
    for dtype, close in (("float32", 1e-6), ("float16", 2**-10)):
        rounded = grid.rtn(w, Grid(bits=bits, scale_dtype=dtype)).dequantize()
        assert torch.allclose(rounded, w, rtol=close, atol=2**-15)


def test_zero_rows_stay_zero():
    for g in (Grid(), Grid(symmetric=True), Grid(clip="mse", group=4)):
        assert (grid.rtn(torch.zeros(3, 8), g).dequantize() == 0).all()


def test_clipping_never_raises_its_own_error():
    plain, clipped = (grid.rtn(W, Grid(bits=3, clip=c)).dequantize() for c in ("none", "mse"))
    plain, clipped = ((t - W).abs().pow(2.4).sum(1) for t in (plain, clipped))
    assert (clipped <= plain).all() and (clipped < plain).any()


def test_half_scales_are_rounded_before_the_codes():
    half, single = grid.rtn(W, Grid(bits=8)), grid.rtn(W, Grid(bits=8, scale_dtype="float32"))
    assert torch.equal(half.scales, single.scales.half())
    late = replace(single, scales=single.scales.half())
    assert errors(half.dequantize())[0] < errors(late.dequantize())[0]


def test_a_scale_too_small_for_half_precision_becomes_the_smallest_normal_half():
    q = grid.rtn(torch.tensor([[1e-7, -1e-7, 3e-5, 1e-4]]), Grid())
    assert q.scales.item() == 2**-14 and q.codes.tolist() == [[0, 0, 0, 2]]


def state(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("baseline", QUANTIZERS)
@pytest.mark.parametrize("layout", sorted(tiny.MODELS))
def test_every_block_linear_changes_and_nothing_else(layout, baseline):
    lm = LowBitModel(tiny.model(layout))
    before, linears = state(lm.model), {f"{name}.weight" for name in block_linears(lm.model)}
    module = BASELINES[baseline]
    module.apply(
        lm,
        tiny.tokens() if module.CALIBRATED else None,
        module.Config(**SHORT.get(baseline, {}) | {"bits": 3, "group": 32}),
    )
    after = lm.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert linears <= changed <= linears | set(lm.dense)
    assert {f"{name}.weight" for name in lm.weights} == linears
    for name, weight in lm.weights.items():
        assert torch.equal(lm.model.get_submodule(name).weight, weight.dequantize())


@pytest.mark.parametrize("options", [{}, {"act_order": True, "group": 32}, {"true_sequential": True}], ids=str)
@pytest.mark.parametrize("layout", sorted(tiny.MODELS))
def test_gptq_is_deterministic_and_better_than_rtn_end_to_end(layout, options):
    ids = tiny.tokens(16, 48)
    want = tiny.model(layout)(ids).logits

    def quantized(module, config):
        lm = LowBitModel(tiny.model(layout))
        module.apply(lm, ids, config)
        return lm

    first, second = (quantized(gptq, Config(bits=3, **options)) for _ in range(2))
    assert first.weights.keys() == second.weights.keys()
    for name, weight in first.weights.items():
        assert torch.equal(weight.codes, second.weights[name].codes)
        assert torch.equal(weight.scales, second.weights[name].scales)
    plain = quantized(rtn, rtn.Config(bits=3, group=options.get("group", 0)))
    assert (first.model(ids).logits - want).norm() < (plain.model(ids).logits - want).norm()


def test_outliers_are_the_largest_weights_and_what_is_left_has_zeros_there():
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    sparse = dns.outliers(weight, 0.02)
    kept = sparse != 0
    assert kept.sum() == 10 and weight[kept].abs().min() > weight[~kept].abs().max()
    assert torch.equal(sparse[kept], weight[kept].half().float())
    tensors = dns.stored(sparse)
    assert [t.dtype for t in tensors.values()] == [torch.float16, torch.int16, torch.int32]
    assert len(tensors["values"]) == 10 and tensors["starts"][-1] == 10
    layer = dns.attached(torch.nn.Linear(32, 16, bias=False), tensors, {})
    x = torch.randn(3, 32)
    assert torch.allclose(layer(x), x @ (layer.weight + sparse).T, atol=1e-5)


@pytest.mark.parametrize("layout", sorted(tiny.MODELS))
def test_dense_and_sparse_is_better_than_gptq_alone_and_is_read_back_whole(layout, tmp_path):
    ids = tiny.tokens(16, 48)
    full = tiny.model(layout)
    want, weights = full(ids).logits, {name: linear.weight.clone() for name, linear in block_linears(full).items()}

    def quantized(module, config):
        lm = LowBitModel(tiny.model(layout))
        module.apply(lm, ids, config)
        return lm

    both = quantized(dns, dns.Config(bits=3, share=0.05))
    alone = quantized(gptq, Config(bits=3))
    assert (both.model(ids).logits - want).norm() < 0.9 * (alone.model(ids).logits - want).norm()
    name = next(iter(both.weights))
    zero = dns.outliers(weights[name], 0.05) != 0
    grid_of = both.weights[name].scales.float().max(), alone.weights[name].scales.float().max()
    assert grid_of[0] < grid_of[1], "the range of what is left is narrower"
    assert zero.sum() == len(both.attachments[name][0].tensors["values"])
    attachments = itertools.chain.from_iterable(both.attachments.values())
    assert both.extra_bits["dns"] == sum(attachment.stored_bits() for attachment in attachments)
    both.save(tmp_path / "data.safetensors", {})
    again = LowBitModel(tiny.model(layout))
    again.load(tmp_path / "data.safetensors")
    assert torch.equal(again.model(ids).logits, both.model(ids).logits)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", [{}, {"act_order": True, "group": 32, "clip": "mse"}], ids=str)
def test_gptq_on_cuda_agrees_with_cpu(tmp_path, options):
    cpu, cuda = LowBitModel(tiny.model("llama")), LowBitModel(tiny.model("llama").cuda())
    ids, want = tiny.tokens(), tiny.model("llama")(tiny.tokens()).logits.detach()
    for lm in (cpu, cuda):
        gptq.apply(lm, ids, Config(**options))
    if not options:  # act order: near ties of diag(H) fall either way, and another order gives other codes
        for name, weight in cpu.weights.items():
            assert (weight.codes == cuda.weights[name].codes.cpu()).float().mean() > 0.98, name
    errors = [float((lm.model(ids.to(lm.model.device)).logits.detach().cpu() - want).norm()) for lm in (cpu, cuda)]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)
    cuda.save(tmp_path / "model.safetensors", {})
    before = state(cuda.model)
    cuda.load(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in cuda.model.state_dict().items())


@pytest.mark.parametrize("layout", sorted(tiny.MODELS))
def test_blocks_run_one_by_one_as_in_the_model(layout):
    """Masks and positions reach every block: a block by block run gives the model's own hidden states."""
    made, ids = tiny.model(layout), tiny.tokens(2)
    with torch.no_grad():
        seen = []
        made.model.layers[-1].register_forward_hook(lambda module, args, out: seen.append(out))
        made(ids)
        hidden, kwargs = block_inputs(made, ids)
        for block, kw in zip(made.model.layers, kwargs, strict=True):
            hidden = [block(h, **kw) for h in hidden]
    assert torch.allclose(torch.cat(hidden), seen[0], atol=1e-5)
    assert all("forward" not in vars(block) for block in made.model.layers)


QKV = {"q_proj", "k_proj", "v_proj"}


@pytest.mark.parametrize(
    "layout, want",
    [
        ("llama", [QKV, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}]),
        ("phi", [QKV | {"fc1"}, {"dense"}, {"fc2"}]),
    ],
)
def test_linears_with_one_input_share_a_hessian(layout, want):
    made = tiny.model(layout)
    hidden, kwargs = block_inputs(made, tiny.tokens(1))
    families = gptq.same_input(made.model.layers[0], hidden[0], kwargs[0])
    last_names = []
    for family in families:
        last_names.append({name.split(".")[-1] for name in family})
    assert last_names == want


def test_true_sequential_feeds_quantized_outputs_forward_inside_a_block():
    made = [LowBitModel(tiny.model("llama")) for _ in range(2)]
    for lm, flag in zip(made, (False, True)):
        gptq.apply(lm, tiny.tokens(), Config(bits=2, true_sequential=flag))
    plain, sequential = (lm.weights for lm in made)
    first, last = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
    assert torch.equal(plain[first].codes, sequential[first].codes)
    assert not torch.equal(plain[last].codes, sequential[last].codes)


@pytest.mark.parametrize("baseline", QUANTIZERS)
@pytest.mark.parametrize(
    "damage, options, message",
    [
        (None, {"group": 48}, r"model\.layers\.0\.self_attn\.q_proj: .*64x64 weight .*groups of 48"),
        (float("nan"), {}, r"model\.layers\.1\.mlp\.up_proj: .*NaN or Inf"),
        (float("inf"), {}, r"model\.layers\.1\.mlp\.up_proj: .*NaN or Inf"),
    ],
)
def test_a_layer_that_cannot_be_quantized_is_named(baseline, damage, options, message):
    lm, module = LowBitModel(tiny.model("llama")), BASELINES[baseline]
    if damage is not None:
        lm.model.model.layers[1].mlp.up_proj.weight.data[3, 5] = damage
    with pytest.raises(UserError, match=message):
        module.apply(lm, tiny.tokens(), module.Config(**SHORT.get(baseline, {}) | options))


@pytest.mark.parametrize("calibration", [None, torch.empty(0, 16, dtype=torch.int64)])
def test_gptq_without_calibration(calibration):
    with pytest.raises(UserError, match="calibration"):
        gptq.apply(LowBitModel(tiny.model("llama")), calibration, Config())


def test_the_hessian_counts_sequences_not_tokens():
    torch.testing.assert_close(hessian().double(), 2 / 4 * X.double().T @ X.double(), rtol=1e-5, atol=1e-2)


def test_activations_that_are_not_finite():
    lm = LowBitModel(tiny.model("llama"))
    lm.model.model.layers[1].post_attention_layernorm.weight.data[3] = torch.nan
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.gate_proj, .*up_proj: the 64x64 Hessian holds NaN or Inf"):
        gptq.apply(lm, tiny.tokens(), Config())


def test_a_singular_or_broken_hessian_is_refused():
    singular = torch.ones(8, 8)
    with pytest.raises(UserError, match="not positive definite with percdamp 0"):
        gptq.gptq(W[:, :8], singular, Config(percdamp=0))
    gptq.gptq(W[:, :8], singular, Config())
    with pytest.raises(UserError, match="Hessian holds NaN"):
        gptq.gptq(W[:, :8], singular * torch.nan, Config())
    with pytest.raises(ValueError, match="expected"):
        gptq.gptq(W, singular, Config())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": 1}, "bits is 1"),
        ({"bits": 9}, "bits is 9"),
        ({"group": -1}, "group is -1"),
        ({"percdamp": -0.1}, "percdamp"),
        ({"blocksize": 0}, "blocksize"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Config(**options)


def test_a_scale_too_large_for_half_precision():
    huge = torch.tensor([[-1e7, 1e7]])
    with pytest.raises(UserError, match="too large for float16; scale_dtype=float32 in the recipe stores it"):
        grid.rtn(huge, Grid())
    with pytest.raises(UserError, match="too large for float32$"):
        grid.rtn(torch.tensor([[-3e38, 3e38]]), Grid(scale_dtype="float32"))
    assert torch.allclose(grid.rtn(huge, Grid(bits=8, scale_dtype="float32")).dequantize(), huge, rtol=0.01)
