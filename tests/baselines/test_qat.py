"""ParetoQ, BitDistiller and MatQuant: official gradients and losses, rate 0, what is trained, stored and read again."""

import itertools
import math
from dataclasses import replace
from itertools import product

import pytest
import tiny
import torch
from bit_streams import numbers, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from known import W, X, errors, uniform
from tiny_results import refusal
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from repro import models
from repro.baselines import asymmetric_clip, bitdistiller, grid, matquant, paretoq, qat, rtn
from repro.core.errors import NotMeasurable, UserError
from repro.data import corpora
from repro.methods.bitbybit import sliced
from repro.models import perplexity
from repro.models.groups.quantizer import GroupGrid, encode, fit, split
from repro.models.groups.weight import GroupWeight, pack
from repro.models.lowbit import LowBitModel, block_linears
from repro.models.quantized import FORMATS
from repro.recipes import recipe
from repro.train import end_to_end
from repro.train.blocks import batch_rows

pytestmark = pytest.mark.usefixtures("own_build_folder")  # where checkpoints lie
FAST = settings(max_examples=40, deadline=None, derandomize=True)
IDS, SCORED = tiny.tokens(8, 16), tiny.tokens(3, 20, seed=5)
SHARED = {"compute": "float32", "tokens": 128, "batch": 2, "epochs": 4, "lr": 3e-3}
SMALL = {
    paretoq: {},
    bitdistiller: {"group": 16, "data": "text", "held_out": 0.25, "lr": 3e-4},
    matquant: {"group": 16},
}
STEPS = pytest.mark.parametrize("step", list(SMALL), ids=lambda step: step.__name__.rpartition(".")[2])


def made(step, layout="llama", ids=IDS, dtype=torch.float32, **options) -> LowBitModel:
    lm = LowBitModel(tiny.model(layout).to(dtype))
    step.apply(lm, ids, step.Config(**SHARED | SMALL[step] | options))
    return lm


def same(a: LowBitModel, b: LowBitModel) -> bool:
    one, other = a.model.state_dict(), b.model.state_dict()
    return all(torch.equal(one[name], other[name]) for name in one)


def rounded(model, how) -> torch.nn.Module:
    """The model with every block linear's weight changed by `how(name, weight)`."""
    for name, linear in block_linears(model).items():
        linear.weight.data = how(name, linear.weight.data.float()).to(linear.weight.dtype)
    return model


# --- all three --------------------------------------------------------------------------------------------------------


@STEPS
def test_training_lowers_the_loss_and_notes_it(step):
    lm = made(step, epochs=16)
    used = 6 if step is bitdistiller else 8  # two of eight sequences are held out
    steps = 16 * used // 2
    losses = lm.facts["training/loss"]
    assert lm.facts["training/tokens"] == [16 * used * 16] and len(losses) == steps
    assert sum(losses[-steps // 4 :]) < 0.9 * sum(losses[: steps // 4])


@STEPS
def test_one_seed_gives_the_same_bits_and_another_does_not(step):
    first = made(step, epochs=2)
    assert same(first, made(step, epochs=2)) and not same(first, made(step, epochs=2, seed=1))


@STEPS
@pytest.mark.parametrize("layout", ["llama", "qwen2", "mistral", "phi"])
def test_what_is_stored_is_what_was_trained(monkeypatch, step, layout, tmp_path):
    """The student's logits of the last trained tensors are bit for bit those of the stored model, saved and loaded."""
    seen = []
    true_train, true_logits = step.train, qat.logits

    def train(loss, *rest):
        losses = true_train(loss, *rest)
        with torch.no_grad():
            loss(SCORED)
        return losses

    monkeypatch.setattr(step, "train", train)
    monkeypatch.setattr(qat, "logits", lambda *args: seen.append(true_logits(*args)) or seen[-1])
    lm = made(step, layout, **({"lambdas": {8: 1.0}} if step is matquant else {"act_bits": 4}))
    assert torch.equal(tiny.logits(lm.model, SCORED), seen[-1])
    lm.save(tmp_path / "model.safetensors", {"of": "a test"})
    again = LowBitModel(tiny.model(layout))
    again.load(tmp_path / "model.safetensors")
    assert torch.equal(tiny.logits(again.model, SCORED), seen[-1])
    for name, weight in lm.weights.items():
        assert torch.equal(weight.dequantize(), again.weights[name].dequantize())
        assert weight.stored_bits() == again.weights[name].stored_bits()


class NoReads(TorchDispatchMode):
    """Refuses what copies a value or a size that depends on values to the CPU, as the capture of a CUDA graph does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "masked_select", "equal"), func
        return func(*args, **kwargs or {})


@STEPS
def test_a_step_can_be_captured(monkeypatch, step):
    true_train, captured = step.train, []

    def train(loss, tensors, ids, *rest):
        with NoReads(), torch.enable_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # transformers asks
            trained = [tensor.requires_grad_() for tensor in tensors.values()]
            captured.append(torch.autograd.grad(loss(ids[:2]), trained))
        return true_train(loss, tensors, ids, *rest)

    monkeypatch.setattr(step, "train", train)
    made(step, epochs=1, **({} if step is matquant else {"act_bits": 2}))
    assert len(captured) == 1


@STEPS
def test_models_in_half_precision(step):
    lm = made(step, dtype=torch.bfloat16, epochs=1)
    assert torch.isfinite(tiny.logits(lm.model, SCORED)).all() and lm.model.dtype == torch.bfloat16


@STEPS
def test_models_texts_and_rates_that_do_not_fit_are_refused(step):
    name = step.__name__.rpartition(".")[2]
    with pytest.raises(UserError, match=f"{name} trains on 129 tokens an epoch, the calibration text has 128"):
        made(step, tokens=129)
    with pytest.raises(UserError, match="a batch of 9 sequences from"):
        made(step, batch=9)
    with pytest.raises(UserError, match=name):
        made(step, ids=None)
    lm = LowBitModel(tiny.model("llama"))
    lm.model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj: .*NaN or Inf"):
        step.apply(lm, IDS, step.Config(**SHARED | SMALL[step]))
    with pytest.raises(NotMeasurable, match=f"{name}: .* not finite .*; lower its learning rate") as raised:
        made(step, lr=1e37)
    assert raised.value.status == "diverged"
    if step is not paretoq:
        with pytest.raises(UserError, match=r"layers\.0\.self_attn\.q_proj: .* groups of 48"):
            made(step, group=48)


@STEPS
def test_rates_fall_to_0_in_a_cosine_or_are_constant(monkeypatch, step):
    """No warm-up and no weight decay anywhere; the rate in the middle of training is half, or all of it."""
    seen, true_train = [], step.train
    monkeypatch.setattr(step, "train", lambda *args: seen.append(args[3]) or true_train(*args))
    made(step, epochs=1, max_norm=0.7, seed=3)
    used, lr = seen[0], 3e-4 if step is bitdistiller else 3e-3
    assert (used.warmup, used.weight_decay, used.clip, used.seed, used.together) == (0, 0, 0.7, 3, 2**26 // (16 * 96))
    want = [lr, lr, lr] if step is bitdistiller else [lr, lr / 2, 0]
    assert [used.rate(at, 8) for at in (0, 4, 8)] == pytest.approx(want)


BAD = {
    "paretoq-w5": "paretoq: bits is 5; it must be 2",
    "paretoq-a9": "paretoq: act_bits is 9",
    "paretoq(a=2, act_group=0)": "with a group above 0",
    "paretoq-batch=0": "paretoq: batch is 0; it must be 1 or more",
    "paretoq-lr=-1.0": "paretoq: lr is -1.0; it must be 0 or more",
    "paretoq-lr=.nan": "lr",
    "bitdistiller-sym": "takes neither sym nor clip",
    "bitdistiller-clip=mse": "takes neither sym nor clip",
    "bitdistiller-pc-a2": "with a group above 0",
    "bitdistiller-every=0": "bitdistiller: every is 0; it must be 1 or more",
    "bitdistiller-length=0": "bitdistiller: length is 0; it must be 1 or more",
    "bitdistiller-held_out=1.0": "held_out 0 or more and below 1",
    "bitdistiller-temperature=0.0": "temperature above 0",
    "bitdistiller(clip_tokens=-1)": "clip_tokens 0 or more",
    "bitdistiller-data=alpaca": "data",
    "matquant(g=-2)": "matquant: group is -2",
    "matquant(lambdas={9: 1.0})": "lambdas has 9, a width that a master of 8 bits cannot have",
    "matquant(lambdas={4: -1.0})": "lambdas are 0 or more",
    "matquant(lambdas={})": "one is above 0",
    "matquant-max_norm=-1.0": "matquant: max_norm is -1.0",
    "matquant-tokens=0": "matquant: tokens is 0",
}


@pytest.mark.parametrize("text", BAD)
def test_options_that_mean_nothing_are_refused(text):
    assert BAD[text] in refusal(recipe.parse, text)


# --- ParetoQ ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "error", "slope"),
    [(2, 2.1195563e-04, 0.0130372), (3, 9.0484274e-05, 0.0102514), (4, 1.6709334e-05, 0.00302333)],
)
def test_paretoq_known_answers(bits, error, slope):
    """Error of the start, and d/dα of mean((Q(W) Xᵀ - W Xᵀ)²), summed, from the authors' quantizers."""
    config = paretoq.Config(bits=bits, scale_dtype="float32")
    a = paretoq.first_scale(W, bits).requires_grad_()
    made = paretoq.fake_quantize(W, a, config)
    assert errors(made.detach())[0] == pytest.approx(error, rel=1e-5)
    (result,) = torch.autograd.grad(((made - W) @ X.T).square().mean(), a)
    assert result.sum().item() == pytest.approx(slope, rel=2e-5)


def test_seq_known_answer_in_groups_of_32():
    config = paretoq.Config(scale_dtype="float32")
    rows = W.reshape(-1, 32)
    made = paretoq.fake_quantize(rows, paretoq.first_scale(rows, 2), config).view_as(W)
    assert errors(made) == pytest.approx((2.0150055e-04, 0.0858985), rel=1e-5)


@FAST
@given(st.integers(0, 2**31), st.sampled_from([2, 3, 4]), st.sampled_from([0.3, 1.0]))
def test_gradients_are_those_of_the_authors(seed, bits, share):
    """Weights outside the range have none; α's is level - W/α inside and the last level outside, times a factor."""
    random = torch.Generator().manual_seed(seed)
    w, slope = torch.randn(3, 8, generator=random), torch.randn(3, 8, generator=random)
    a = share * paretoq.first_scale(w, bits)
    wg, ag = w.clone().requires_grad_(), a.clone().requires_grad_()
    got_w, got_a = torch.autograd.grad(
        (paretoq.fake_quantize(wg, ag, paretoq.Config(bits=bits, scale_dtype="float32")) * slope).sum(), (wg, ag)
    )
    top = 2 ** (bits - 1) - 1
    want_w, want_a = torch.zeros(3, 8), torch.zeros(3)
    for i in range(3):
        for j in range(8):
            v = (w[i, j] / a[i, 0]).item()
            low, high, first, last = (-0.99, 0.99, -0.75, 0.75) if bits == 2 else (-top - 1, top, -top - 1, top)
            inside = low <= v <= high
            level = (round(2 * v - 0.5) + 0.5) / 2 if bits == 2 else round(v)
            want_w[i, j] = slope[i, j] if inside else 0
            want_a[i] += slope[i, j] * (level - v if inside else first if v < low else last)
    torch.testing.assert_close(got_w, want_w, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_a[:, 0], want_a / math.sqrt(24 * top), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_stored_row_has_the_levels_of_the_paper(bits):
    weight = paretoq.pack(W, paretoq.first_scale(W, bits), paretoq.Config(bits=bits))
    a = paretoq.first_scale(W, bits).half().float()
    ratio = weight.dequantize() / a
    want = {-0.75, -0.25, 0.25, 0.75} if bits == 2 else set(range(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1)))
    assert set(ratio.unique().tolist()) == want
    assert weight.stored_bits() | {"indices": 0} == {
        "codes": bits * W.numel(), "scales": 16 * len(W), "zeros": 0, "indices": 0
    }  # fmt: skip
    codes = numbers(stream(weight.codes, bits), bits, weight.codes.shape)
    assert torch.equal(replace(weight, codes=codes).dequantize(), weight.dequantize())


@pytest.mark.parametrize("bits", [2, 4])
def test_paretoq_at_rate_0_is_its_starting_grid(bits):
    ids = torch.from_numpy(corpora.token_ids("tiny-held-out", models.tokenizer("pocket-3m"))[:256]).long()
    wins, result = ids.view(2, 128), []
    config = paretoq.Config(bits=bits, lr=0.0, tokens=256)
    lm = LowBitModel(models.load("pocket-3m"))
    paretoq.apply(lm, wins, config)

    def plain(_, w):
        a = w.abs().amax(1, keepdim=True) / (1 if bits == 2 else 2 ** (bits - 1) - 1)
        v, a = w / a.half().float(), a.half().float()
        return (((2 * v.clamp(-0.99, 0.99) - 0.5).round() + 0.5) / 2 if bits == 2 else v.clamp(-8, 7).round()) * a

    for model in (lm.model, rounded(models.load("pocket-3m"), plain)):
        result.append(perplexity.perplexity(perplexity.score(model, wins)))
    assert result[0] == result[1]
    full = models.load("pocket-3m").state_dict()
    assert all(torch.equal(value, full[name]) for name, value in lm.dense.items())


def test_paretoqs_loss_is_that_of_the_next_token():
    lm = made(paretoq, lr=0.0, epochs=1)
    rows = IDS[batch_rows(0, 8, paretoq.Config())]
    want = F.cross_entropy(tiny.logits(lm.model, rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
    assert lm.facts["training/loss"][0] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("layout", ["llama", "phi"])
def test_all_parameters_are_trained_or_the_linears_alone(layout):
    before = tiny.model(layout).state_dict()
    for trained, others in (("all", True), ("linears", False)):
        lm = made(paretoq, layout, epochs=1, trained=trained)
        linears = {f"{name}.weight" for name in lm.weights}
        changed = {name for name, value in lm.model.state_dict().items() if not torch.equal(value, before[name])}
        assert changed == (set(before) if others else linears)
        tied = {"lm_head.weight"} if layout == "llama" else set()
        assert set(lm.dense) == (set(before) - linears - tied if others else set())


@torch.no_grad()
def test_paretoqs_inputs_have_seq_levels_and_others_dynamic_ranges():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for levels in ("seq", "asymmetric"):
        lm = made(paretoq, epochs=1, act_bits=2, act_group=16, act_levels=levels)
        layer = lm.model.model.layers[0].self_attn.o_proj
        groups = x.view(5, 4, 16)
        if levels == "seq":
            top = groups.abs().amax(-1, keepdim=True)
            taken = ((2 * (groups / top).clamp(-0.99, 0.99) - 0.5).round() + 0.5) / 2 * top
        else:
            low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
            s = (high - low) / 3
            taken = (((groups / s).round() + (-low / s).round()).clamp(0, 3) - (-low / s).round()) * s
        torch.testing.assert_close(layer(x), taken.flatten(1) @ layer.weight.T, rtol=1e-4, atol=1e-5)


# --- BitDistiller -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta", "want"), [(0.0, 8.0776655), (0.5, 7.9141395), (1.0, 7.7506136)])
def test_cakld_known_answers(beta, want):
    """The authors' loss masks the first token of all; where both are equal there is no divergence, either."""
    student, teacher = (torch.from_numpy(8 * uniform(6, 32, seed)).view(2, 3, 32) for seed in (7, 8))
    student[0, 0] = teacher[0, 0]
    assert bitdistiller.cakld(student, teacher, beta).item() == pytest.approx(want, rel=1e-6)


@FAST
@given(st.integers(0, 2**31), st.floats(0, 1), st.sampled_from([0.1, 3.0, 30.0]))
def test_cakld_and_its_gradient_agree_with_the_definition(seed, beta, size):
    random = torch.Generator().manual_seed(seed)
    s, t = (size * torch.randn(2, 4, 11, generator=random) for _ in range(2))
    s.requires_grad_()
    loss = bitdistiller.cakld(s, t, beta)
    slow = s.detach().double().requires_grad_()
    p, q = slow.softmax(-1), t.double().softmax(-1)
    want = (beta * (p * (p / q).log()).sum() + (1 - beta) * (q * (q / p).log()).sum()) / 2
    assert loss.item() == pytest.approx(want.item(), rel=1e-4, abs=1e-4)
    torch.testing.assert_close(
        torch.autograd.grad(loss, s)[0].double(), torch.autograd.grad(want, slow)[0], rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("kind", ["maximum", "label"])
def test_beta_is_the_teachers_mean_confidence(monkeypatch, kind):
    monkeypatch.setattr(end_to_end, "LOGITS", 3 * 16 * 96)  # three sequences in a pass
    p = tiny.logits(tiny.model("llama"), IDS).softmax(-1)
    taken = [
        p[i, t].max().item() if kind == "maximum" else p[i, t, IDS[i, t + 1]].item()
        for i, t in product(range(4), range(16 if kind == "maximum" else 15))
    ]  # fmt: skip
    lm = made(bitdistiller, epochs=1, confidence=kind, confidence_batches=2)
    assert lm.facts["training/beta"] == pytest.approx([sum(taken) / len(taken)], rel=1e-5)


def test_clipping_by_brute_force():
    """Each group takes the ends, of a hundred, whose rounded output differs least; and both ends are searched."""
    config = grid.Grid(bits=2, group=16, scale_dtype="float32")
    w, x = W[:6, :32], X[:40, :32]
    clipped, ends = asymmetric_clip.clip(w, x, config), set()
    for i in range(6):
        for g in (slice(0, 16), slice(16, 32)):
            best = math.inf
            for high in range(10):
                for low in range(10):
                    cut = w[i, g].clamp(w[i, g].min() * (1 - low / 20), w[i, g].max() * (1 - high / 20))
                    d = (grid.rtn(cut[None], replace(config, group=0)).dequantize()[0] - w[i, g]).double()
                    error = (x[:, g].double() @ d).square().mean().item()
                    if error < best * (1 - 1e-9):
                        best, want, pair = error, cut, (high, low)
            d = grid.rtn(clipped[i, g][None], replace(config, group=0)).dequantize()[0] - w[i, g]
            assert (x[:, g].double() @ d.double()).square().mean().item() == pytest.approx(best, rel=1e-4)
            ends.add(pair)
            assert clipped[i, g].max() <= w[i, g].max() and want.shape == (16,)
    assert any(high != low for high, low in ends) and len(ends) > 3


def test_query_and_key_are_not_clipped_and_the_search_sees_the_layers_inputs(monkeypatch):
    seen = []
    monkeypatch.setattr(asymmetric_clip, "clip", lambda w, x, config: seen.append(x) or 0.5 * w)
    model, weights = tiny.model("llama"), qat.start(tiny.model("llama"), 16)
    clipped = asymmetric_clip.clipped(model, weights, tiny.tokens(10, 16), 40, grid.Grid(bits=2, group=16))
    for name, w in clipped.items():
        assert torch.equal(w, weights[name] * (1 if name.endswith(("q_proj", "k_proj")) else 0.5))
    assert len(seen) == 10 and all(len(x) == 40 for x in seen)
    model.model.layers[0].self_attn.v_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(tiny.tokens(10, 16)[:1])
    torch.testing.assert_close(seen[0][:4], seen[-1][0, ::4])
    assert asymmetric_clip.clipped(model, weights, IDS, 0, grid.Grid()) is weights


@pytest.mark.parametrize(("name", "tokens"), [("pocket-3m", 0), ("tiny", 64)])
def test_bitdistiller_at_rate_0_is_rtn_of_the_weights_that_it_cuts(name, tokens):
    new, wins, result = lambda: tiny.model("llama"), tiny.tokens(4, 32), []
    if name == "pocket-3m":
        ids = corpora.token_ids("tiny-held-out", models.tokenizer(name))[:256]
        new, wins = lambda: models.load(name), torch.from_numpy(ids).long().view(4, 64)
    options, lm, model = {"bits": 2, "group": 64}, LowBitModel(new()), new()
    training = {"lr": 0.0, "tokens": wins.numel(), "batch": 2, "data": "text", "clip_tokens": tokens, "epochs": 1}
    config = bitdistiller.Config(**options, **training)
    bitdistiller.apply(lm, wins, config)
    cut = asymmetric_clip.clipped(model, qat.start(model, 64), wins, tokens, config)
    plain = LowBitModel(rounded(model, lambda name, _: cut[name]))
    rtn.apply(plain, None, rtn.Config(**options))
    for each in (lm, plain):
        result.append(perplexity.perplexity(perplexity.score(each.model, wins)))
    assert result[0] == result[1] and lm.facts["training/validation loss"]
    for name, weight in lm.weights.items():
        assert torch.equal(weight.codes, plain.weights[name].codes)
        assert torch.equal(weight.scales, plain.weights[name].scales)


def test_the_teacher_is_full_precision_and_the_gradient_that_of_rounded_weights(monkeypatch):
    """The first loss after another step, by hand; and every weight has a gradient, those at the ends of a group too."""
    calls, true_cakld = [], bitdistiller.cakld
    monkeypatch.setattr(bitdistiller, "cakld", lambda s, t, beta: calls.append((s, t, beta)) or true_cakld(s, t, beta))
    lm = LowBitModel(tiny.model("llama"))
    rtn.apply(lm, None, rtn.Config(bits=3, group=16))
    start = rounded(tiny.model("llama"), lambda name, _: lm.model.get_submodule(name).weight.data.clone())
    config = bitdistiller.Config(**SHARED | SMALL[bitdistiller] | {"clip_tokens": 0, "max_norm": 0.0, "held_out": 0.0})
    bitdistiller.apply(lm, IDS, config)
    rows = IDS[batch_rows(0, 8, config)]
    student, teacher, _ = calls[0]
    torch.testing.assert_close(teacher, tiny.logits(tiny.model("llama"), rows))
    coarse = rounded(start, lambda _, w: grid.rtn(w, config).dequantize())
    torch.testing.assert_close(student.detach(), tiny.logits(coarse, rows))
    assert lm.facts["training/loss"][0] == pytest.approx(true_cakld(*calls[0]).item(), rel=1e-5)


def test_bitdistillers_gradient_runs_through_the_ends_of_a_group_and_the_clamp():
    """Against Σ ∂ŵ_j/∂w_i g_j by hand: u_j - z - q_j on both ends over the levels, and 1 for codes inside the range."""
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(5, 32, generator=random)
    weight[0, :16] = torch.linspace(-1.5, 1.5, 16)  # both ends are ties, and the upper one gets a code of 4
    weight.requires_grad_()
    upstream = torch.randn(5, 32, generator=random)
    config = bitdistiller.Config(bits=2, group=16, scale_dtype="float32")
    made = bitdistiller.fake_quantize(weight, config)
    torch.testing.assert_close(made, asymmetric_clip.round_to_grid(weight.detach(), config), rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(made, weight, upstream)
    want, outside = torch.zeros(5, 2, 16), 0
    for row, g in itertools.product(range(5), range(2)):
        w, up = weight.detach()[row, 16 * g : 16 * g + 16], upstream[row, 16 * g : 16 * g + 16]
        low, high = w.min(), w.max()
        s = (high - low) / 3
        z = -torch.round(low / s)
        code = torch.round(w / s) + z
        inside = (code >= 0) & (code <= 3)
        outside += int((~inside).sum())
        by_scale = torch.where(inside, code - z - w / s, code.clamp(0, 3) - z)
        d = (up * by_scale).sum() / 3
        want[row, g] = up * inside
        want[row, g, w.argmax()] += d
        want[row, g, w.argmin()] -= d
    torch.testing.assert_close(gradient, want.flatten(1), rtol=1e-4, atol=1e-5)
    assert outside == 1
    assert (gradient - upstream).norm() > 0.1 * upstream.norm()


def test_sequences_are_sampled_or_the_text_and_cut():
    teacher = tiny.model("llama")
    of = lambda ids=IDS, **options: bitdistiller.sequences(teacher, ids, bitdistiller.Config(**options))  # noqa: E731
    assert torch.equal(of(data="text", tokens=128), IDS)
    assert torch.equal(of(data="text", tokens=96, length=6), IDS[:, :12].reshape(-1, 6))
    drawn = of(tokens=256, batch=8)
    assert drawn.shape == (16, 16) and (drawn[:, 0] == teacher.config.bos_token_id).all()
    assert torch.equal(drawn, of(tokens=256, batch=8)) and not torch.equal(drawn, of(tokens=256, batch=8, seed=1))
    assert of(tokens=256, batch=8, length=10).shape == (25, 10)
    with pytest.raises(UserError, match="a batch of 16 sequences from 15"):
        of(tokens=256, batch=16)
    with pytest.raises(UserError, match="tokens is 15; one sequence of the calibration text has 16"):
        of(tokens=15)


def test_bitdistiller_reads_the_first_sequences_of_the_text_alone(monkeypatch):
    """Those that clipping searches on, and those that it trains on where they are text."""
    monkeypatch.setattr(asymmetric_clip, "SEQUENCES", 4)
    for data in ("sampled", "text"):
        words = {"data": data, "tokens": 64, "epochs": 1, "held_out": 0.0, "clip_tokens": 64}
        some, more = made(bitdistiller, ids=IDS[:4], **words), made(bitdistiller, **words)
        assert torch.equal(tiny.logits(some.model, SCORED), tiny.logits(more.model, SCORED)), data


def test_held_out_sequences_are_not_trained_on_and_choose_the_step(monkeypatch):
    trained, true_train = [], bitdistiller.train

    def train(loss, tensors, ids, *rest):
        trained.append((ids, rest[-1]))
        return true_train(loss, tensors, ids, *rest)

    monkeypatch.setattr(bitdistiller, "train", train)
    lm = made(bitdistiller, held_out=0.3, every=2, epochs=3, lr=0.3)
    ids, validation = trained[0]
    assert torch.equal(ids, IDS[:5]) and torch.equal(validation.ids, IDS[5:])
    assert len(validation.losses) == 3 and lm.facts["training/validation loss"] == validation.losses
    made(bitdistiller, held_out=0.0)
    assert trained[1][1] is None and torch.equal(trained[1][0], IDS)


# --- MatQuant ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", range(2, 9))
def test_slices_of_all_codes_by_brute_force(width):
    codes, shift = torch.arange(256), 8 - width
    want = [min(math.floor(q / 2**shift + 0.5), 2**width - 1) for q in range(256)]
    for dtype in (torch.uint8, torch.int64, torch.float32):
        assert matquant.sliced(codes.to(dtype), shift).tolist() == want
    known = {2: [32, 64, 64, 96], 3: [16] + 6 * [32] + [48], 4: [8] + 14 * [16] + [24]}
    if width in known:
        assert torch.bincount(torch.tensor(want)).tolist() == known[width]


@FAST
@given(st.integers(0, 2**31), st.sampled_from(["e4m3", "float16", "float32"]), st.integers(2, 8))
def test_a_master_read_at_a_width_is_what_was_trained_there(seed, scale, width):
    w = 0.1 * torch.randn(5, 64, generator=torch.Generator().manual_seed(seed))
    config = matquant.Config(group=16, scale=scale)
    latent = w.clone().requires_grad_()
    made = matquant.fake_quantize(latent, config.grid(64), [width])[width]
    weight = matquant.RoundedWeight(**vars(pack(w, config.grid(64), "zero"))).at(width)
    assert torch.equal(weight.dequantize(), made.detach()) and weight.codes.max().item() < 2**width
    assert torch.equal(weight.rows(1, 3).dequantize(), made.detach()[1:3])
    (gradient,) = torch.autograd.grad((made * w).sum(), latent)
    assert torch.equal(gradient, w)


@torch.no_grad()
@pytest.mark.parametrize("width", [8, 6, 4, 3, 2])
def test_one_file_is_read_at_every_width(tmp_path, width):
    lm = made(matquant)
    lm.save(tmp_path / "master.safetensors", {"of": "a test"})
    again = LowBitModel(tiny.model("llama"))
    again.load(tmp_path / "master.safetensors")
    sliced.apply(again, None, sliced.Config(width))
    for name, weight in again.weights.items():
        master, shift = lm.weights[name], 8 - width
        assert (master.bits, weight.bits, weight.shift) == (8, width, shift)
        half = 2**shift // 2
        codes = ((master.codes.long() + half) // 2**shift).clamp(max=2**width - 1)
        s, z = (t.float().repeat_interleave(16, 1) for t in (master.scales, master.zeros))
        torch.testing.assert_close(weight.dequantize(), s * (codes.float() * 2**shift - z))
        count, groups = weight.codes.numel(), weight.scales.numel()
        assert weight.stored_bits() == {"codes": width * count, "scales": 16 * groups, "zeros": 8 * groups}
        parts = numbers(stream(weight.codes, width), width, weight.shape)
        assert torch.equal(replace(weight, codes=parts).dequantize(), weight.dequantize())


def test_matquant_at_rate_0_is_the_rounded_grid():
    ids = torch.from_numpy(corpora.token_ids("tiny-held-out", models.tokenizer("pocket-3m"))[:256]).long()
    wins = ids.view(2, 128)
    lm = LowBitModel(models.load("pocket-3m"))
    matquant.apply(lm, wins, matquant.Config(lr=0.0, tokens=256, epochs=1))
    for width in (8, 2):
        if width < 8:
            sliced.apply(lm, None, sliced.Config(width))

        def plain(_, w, shift=8 - width):
            groups = split(w, 32)
            scales, _, z = fit(groups, GroupGrid(8, 32, include_zero=True, scale="float16"))
            q = encode(groups, scales.float(), z, GroupGrid(8, 32, include_zero=True, scale="float16"))
            q = (q / 2**shift + (0.5 if shift else 0)).floor().clamp(max=2 ** (8 - shift) - 1)
            return (scales.float() * (q * 2**shift - z)).flatten(1)

        other = rounded(models.load("pocket-3m"), plain)
        result = [perplexity.perplexity(perplexity.score(model, wins)) for model in (lm.model, other)]
        assert result[0] == result[1]


def test_the_loss_is_the_sum_over_widths():
    rows = IDS[batch_rows(0, 8, matquant.Config())]
    want, config = 0.0, matquant.Config(group=16)
    for width, share in {8: 0.5, 4: 2.0, 2: 0.25}.items():
        model = tiny.model("llama")
        rounded(model, lambda _, w, r=width: matquant.fake_quantize(w, config.grid(w.shape[1]), [r])[r])
        want += share * F.cross_entropy(tiny.logits(model, rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
    lm = made(matquant, lambdas={8: 0.5, 4: 2.0, 2: 0.25, 3: 0.0}, epochs=1)
    assert lm.facts["training/loss"][0] == pytest.approx(want, rel=1e-5)


def test_one_scale_a_row():
    lm = made(matquant, group=0, epochs=1)
    assert all(weight.scales.shape == (weight.shape[0], 1) for weight in lm.weights.values())


def test_a_slice_is_not_sliced_again_and_an_old_reader_refuses_the_file(tmp_path, monkeypatch):
    lm = made(matquant, epochs=1)
    lm.save(tmp_path / "model.safetensors", {})
    with pytest.raises(UserError, match="q_proj: 8 of 8 bits are stored, which cannot be read at 1"):
        sliced.apply(lm, None, sliced.Config(1))
    sliced.apply(lm, None, sliced.Config(4))
    sliced.apply(lm, None, sliced.Config(4))
    with pytest.raises(UserError, match="q_proj: 4 of 8 bits are stored, which cannot be read at 2"):
        sliced.apply(lm, None, sliced.Config(2))
    assert isinstance(lm.weights["model.layers.0.mlp.up_proj"], GroupWeight)
    monkeypatch.delitem(FORMATS, matquant.RoundedWeight.FORMAT)
    with pytest.raises(UserError, match="not a compressed model that this version reads"):
        LowBitModel(tiny.model("llama")).load(tmp_path / "model.safetensors")
