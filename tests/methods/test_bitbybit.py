"""Bit-by-Bit: schedules, teachers, the blocks of a stage, quantized inputs, the master at any width, bad input."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import tiny
import torch
from bit_streams import numbers, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from known import W
from tiny_results import refusal

from repro import models
from repro.baselines import grid as rounding
from repro.baselines import rtn
from repro.core.errors import NotMeasurable, UserError
from repro.data import corpora
from repro.engine import weights
from repro.methods import bitbybit
from repro.methods.bitbybit import sliced
from repro.methods.bitbybit.config import Config
from repro.methods.bitbybit.precision_order import Precision, chosen, coverage, precisions
from repro.models import bits, perplexity
from repro.models.groups import inputs
from repro.models.groups.quantizer import GroupGrid, fake_quantize
from repro.models.groups.weight import nested, pack
from repro.models.lowbit import LowBitModel, block_inputs, block_linears
from repro.recipes import recipe
from repro.train import blocks as training

pytestmark = pytest.mark.usefixtures("own_build_folder")  # where checkpoints lie
FAST = settings(max_examples=40, deadline=None, derandomize=True)
IDS, SCORED = tiny.tokens(6, 16), tiny.tokens(3, 20, seed=5)
PLAIN = {"compute": "float32", "streams": "float32", "split": "none"}  # splits: test_splitting.py
SMALL = PLAIN | {"tokens": 96, "epochs": 1, "group": 16}
W8, W4, W2 = (Precision(each) for each in (8, 4, 2))


def made(layout="llama", ids=IDS, dtype=torch.float32, **options) -> LowBitModel:
    lm = LowBitModel(tiny.model(layout).to(dtype))
    bitbybit.apply(lm, ids, Config(**SMALL | options))
    return lm


# --- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "end", "want"),
    [
        ("A", (2, 16), "w8a16 w4a16 w2a16"),
        ("A", (2, 2), "w8a16 w4a16 w2a16 w2a8 w2a4 w2a2"),
        ("A", (3, 4), "w8a16 w4a16 w3a16 w3a8 w3a4"),
        ("A", (8, 16), "w8a16"),
        ("B", (2, 2), "w16a8 w16a4 w16a2 w8a2 w4a2 w2a2"),
        ("B", (2, 16), "w8a16 w4a16 w2a16"),
        ("C", (2, 2), "w8a8 w4a8 w4a4 w2a4 w2a2"),
        ("C", (2, 4), "w8a8 w4a8 w4a4 w2a4"),
        ("C", (2, 16), "w8a16 w4a16 w2a16"),
        ("D", (2, 16), "w8a16 w4a16 w2a16 w4a16 w2a16"),
        ("D", (4, 2), "w8a16 w4a16 w8a16 w4a16 w4a8 w4a4 w4a2 w4a4 w4a2"),
    ],
)
def test_schedules_of_appendix_b(order, end, want):
    stages = precisions(order, Precision(*end))
    assert " ".join(map(str, stages)) == want
    assert Config(bits=end[0], act_bits=end[1], order=order).stages == stages
    written = Config(bits=end[0], act_bits=end[1], order=order, schedule=want.split())
    assert written.stages == stages


@FAST
@given(st.sampled_from("ABCD"), st.integers(2, 8), st.sampled_from([2, 3, 4, 8, 16]))
def test_every_schedule_ends_where_it_says_and_only_d_rises(order, weights, activations):
    stages, end = precisions(order, Precision(weights, activations)), Precision(weights, activations)
    assert stages[-1] == end and len(stages) == len([a for a, b in zip([None, *stages], stages) if a != b])
    rises = any(b.weights > a.weights or b.activations > a.activations for a, b in zip(stages, stages[1:]))
    assert rises == (order == "D" and (weights < 8 or activations < 8))
    assert all(0 < share <= 1 for share in coverage(stages, 0.5)) and coverage(stages, 0.5)[-1] == 1


def test_coverage_grows_to_all_before_the_other_kind_begins():
    of = lambda order, *end: coverage(precisions(order, Precision(*end)), 0.5)  # noqa: E731
    assert of("A", 2, 16) == [0.5, 0.75, 1] and of("A", 2, 2) == [0.5, 0.75, 1] * 2
    assert of("C", 2, 2) == [1] * 5 and of("A", 8, 16) == [1]
    assert of("D", 2, 16) == [0.5, 0.625, 0.75, 0.875, 1]


@FAST
@given(st.floats(0.05, 1), st.integers(1, 12), st.floats(0, 4), st.integers(0, 5), st.integers(0, 5))
def test_blocks_of_a_stage(share, count, alpha, seed, stage):
    result = chosen(share, count, alpha, "biased", seed, stage)
    assert len(result) == math.ceil(round(share * count, 9)) and result <= set(range(count))
    assert result == chosen(share, count, alpha, "biased", seed, stage)
    assert chosen(share, count, alpha, "first", seed, stage) == set(range(len(result)))


def test_the_first_block_drawn_has_the_probabilities_of_the_appendix():
    """p_l = (L - l + 1)^α / Σ over L = 4: 16, 9, 4, 1 of 30 at α = 2."""
    drawn = [next(iter(chosen(0.25, 4, 2.0, "biased", seed, 0))) for seed in range(3000)]
    counts = torch.bincount(torch.tensor(drawn), minlength=4) / 3000
    assert counts.tolist() == pytest.approx([16 / 30, 9 / 30, 4 / 30, 1 / 30], abs=0.03)


# --- training ---------------------------------------------------------------------------------------------------------


def without_ties(model, plain, grid):
    """The model with its weights moved off bfloat16's values, and off ties: those go half up here, half to even in RTN.

    In bfloat16 the ends of many groups are opposite numbers, and whole groups are ties.
    """
    random = torch.Generator().manual_seed(2)
    for linear in block_linears(model).values():
        w = linear.weight.data
        w *= 1 + 1e-3 * torch.rand(w.shape, generator=random)
        for _ in range(3):
            w[pack(w, grid).codes != rounding.rtn(w, plain).codes] *= 1.01
    return model


def test_at_8_bits_and_rate_0_it_is_rtn():
    """Perplexity of a pocket model to 1e-6, codes, zero points and scales."""
    ids = torch.from_numpy(corpora.token_ids("tiny-held-out", models.tokenizer("pocket-3m"))[:256]).long()
    wins, result, plain = ids.view(2, 128), [], rtn.Config(bits=8, group=32, scale_dtype="float32")
    ours = Config(bits=8, lr=0.0, scale="float32", include_zero=True, tokens=256, epochs=1, split="none")
    for module, config, text in ((bitbybit, ours, wins), (rtn, plain, None)):
        lm = LowBitModel(without_ties(models.load("pocket-3m"), plain, ours.grid(8)))
        module.apply(lm, text, config)
        result.append((perplexity.score(lm.model, wins)["nll"].mean(), lm.weights))
    assert math.exp(result[0][0]) == pytest.approx(math.exp(result[1][0]), rel=1e-6)
    for a, b in zip(result[0][1].values(), result[1][1].values(), strict=True):
        assert torch.equal(a.codes, b.codes) and torch.equal(a.zeros.float(), b.zeros)
        assert torch.equal(a.scales, b.scales)


def slow_weight(values, bits, include_zero):
    """Section 3.1 in exact fractions: the levels of one group."""
    low, high = min(values), max(values)
    if include_zero:
        low, high = min(low, Fraction(0)), max(high, Fraction(0))
    s = (high - low) / (2**bits - 1)
    z = math.floor(-low / s + Fraction(1, 2))
    return [float(s * (min(max(math.floor(v / s + Fraction(1, 2)) + z, 0), 2**bits - 1) - z)) for v in values]


def test_gradient_of_the_block_loss_is_autograd_of_a_slow_reference(monkeypatch):
    """The first step of the second stage at rate 0: weights rounded in fractions, both terms, autograd in float64."""
    seen = []

    class Noted(torch.optim.SGD):
        def step(self, closure=None):
            seen.append([p.grad.clone() for p in self.param_groups[0]["params"]])

    monkeypatch.setattr(training.graphs, "adamw", lambda tensors, lr, **_: Noted(tensors, lr))
    made(schedule=["w4a16", "w2a16"], bits=2, lr=0.0, rho=1.0, scale="float32", batch=6)
    model = tiny.model("llama").double()
    hidden, kwargs = block_inputs(model, IDS)
    start = torch.cat(hidden)
    latent, rounded = {}, {4: {}, 2: {}}
    first, second = model.model.layers
    kw = [dict(options) for options in kwargs]
    for name, module in first.named_modules():
        if isinstance(module, torch.nn.Linear):
            w = module.weight.detach()
            latent[name] = w.clone().requires_grad_()
            for width in (4, 2):
                groups = []
                for group in w.view(-1, 16).tolist():
                    groups.append(slow_weight([Fraction(value) for value in group], width, False))
                by_hand = torch.tensor(groups, dtype=torch.float64).view_as(w)
                rounded[width][f"{name}.weight"] = latent[name] + (by_hand - w)
    run = lambda width, x: torch.func.functional_call(first, rounded[width], (x,), kw[0])  # noqa: E731
    # The first block's inputs are the embeddings in every stream: both terms have the full-precision target.
    loss = 2 * (run(2, start) - first(start, **kw[0]).detach()).square().mean()
    want = torch.autograd.grad(loss, list(latent.values()))
    of_stage = seen[2]  # stage w4: blocks 0 and 1, stage w2: block 0
    for gradient, by_autograd in zip(of_stage, want, strict=True):
        assert (gradient.double() - by_autograd).norm() <= 1e-5 * by_autograd.norm()


@torch.no_grad()
@pytest.mark.parametrize("teacher", ["full", "earlier"])
def test_both_teachers_of_the_second_block(monkeypatch, teacher):
    """In stage w2 the second block reads 2-bit inputs; it is taught on full-precision and on 4-bit ones."""
    calls = []

    def noted(task, loss, streams, *rest):
        calls.append([stream.hidden.clone() for stream in streams])
        for w in task.tensors.values():
            w.mul_(1.03)
        return [1.0]

    monkeypatch.setattr(training, "fit", noted)
    made(schedule=["w4a16", "w2a16"], rho=1.0, teacher=teacher)
    model, grid = tiny.model("llama"), Config(**SMALL).grid
    hidden, kwargs = block_inputs(model, IDS)
    start, (first, second) = torch.cat(hidden), model.model.layers

    def at(block, bits, factor, x, kw):
        names = [name for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)]
        weights = {f"{n}.weight": fake_quantize(factor * block.get_submodule(n).weight, grid(bits)) for n in names}
        return torch.func.functional_call(block, weights, (x,), kw)

    full = second(first(start, **kwargs[0]), **kwargs[1])
    earlier = at(first, 4, 1.03, start, kwargs[0])
    student = at(first, 2, 1.03**2, start, kwargs[0])
    taught = second(earlier, **kwargs[1]) if teacher == "full" else at(second, 4, 1.03, earlier, kwargs[1])
    assert [len(call) for call in calls] == [2, 2, 3, 3], "the first stage has no earlier model"
    for target, want in zip(calls[3], (student, full, taught), strict=True):
        torch.testing.assert_close(target, want, rtol=1e-3, atol=1e-4)


def test_loss_is_the_sum_of_both_terms_over_the_widths():
    y, full, other = (torch.full((2, 3), v) for v in (1.0, 3.0, 0.5))
    assert bitbybit.loss([1.0], 0.5, [y], full, [other]) == 6 * (4 + 0.5 * 0.25)
    loss = bitbybit.loss([2.0, 3.0], 1.0, [y, other], full, [None, y])
    assert loss == 6 * (2 * 4 + 3 * (6.25 + 0.25))


def test_training_beats_rounding_and_the_seed_decides_every_bit():
    """On the text that it trains on: on another one, how much is gained hangs on the last bits of a processor."""
    ids = tiny.tokens(32, 24)
    strong = {"tokens": 768, "lr": 1e-3, "epochs": 3, "scale": "e4m3"}
    errors = {}
    full = tiny.logits(tiny.model("llama"), ids)
    for name, options in {"trained": {}, "again": {}, "seed": {"seed": 1}, "rate 0": {"lr": 0.0}}.items():
        lm = made(ids=ids, **strong | options)
        errors[name] = (tiny.logits(lm.model, ids) - full).square().mean().item()
        assert lm.facts["training/tokens"] == [3 * 3 * 768]
    assert errors["trained"] == errors["again"] != errors["seed"]
    assert max(errors["trained"], errors["seed"]) < 0.7 * errors["rate 0"], errors  # 0.35 of it


def test_a_rate_that_is_too_high_ends_as_diverged():
    with pytest.raises(NotMeasurable, match="bitbybit: the loss is not finite at step .* in w8a16; lower") as raised:
        made(lr=1e30, epochs=8)
    assert raised.value.status == "diverged"


def test_a_stage_lowers_only_its_blocks(monkeypatch):
    """With ρ_0 = 1/2 and the first blocks first, the second block waits during stage w8, when nothing reads it."""
    seen = []
    true_at = bitbybit.TrainedBlock.at

    def noted(self, precision, kwargs):
        run = true_at(self, precision, kwargs)
        return lambda x: seen.append((str(precision), self)) or run(x)

    monkeypatch.setattr(bitbybit.TrainedBlock, "at", noted)
    lm = made(sampling="first", lr=0.0, rho=0.5)
    precisions_of = {}  # by block, in order and once each
    for precision, state in seen:
        precisions_of.setdefault(id(state), {})[precision] = True
    kept = [list(each) for each in precisions_of.values()]
    assert kept == [["w8a16", "w4a16", "w2a16"], ["w4a16", "w2a16"]]
    assert all(weight.bits == 2 for weight in lm.weights.values())
    whole = made(lr=0.0).facts["training/tokens"][0]
    assert lm.facts["training/tokens"] == [whole * (1 + 2 + 2) / 6], "five of six passes through a block train it"


@pytest.mark.parametrize("order", ["A", "B", "C", "D"])
def test_every_order_runs_its_stages_to_the_end(monkeypatch, order):
    names, true_run = [], training.BlockTrainer.run
    monkeypatch.setattr(
        training.BlockTrainer, "run", lambda self, name, *rest: names.append(name) or true_run(self, name, *rest)
    )
    lm = made(act_bits=2, order=order, lr=1e-4)
    assert names == [str(stage) for stage in precisions(order, Precision(2, 2))]
    assert lm.facts["training/tokens"] == [96 * len(names)]
    assert {weight.bits for weight in lm.weights.values()} == {2}
    assert {a.numbers["bits"] for (a,) in lm.attachments.values()} == {2}
    assert torch.isfinite(tiny.logits(lm.model, SCORED)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_and_streams_train_too(dtype):
    """Latent weights are float32, so that steps below the 16-bit resolution add up."""
    ids = tiny.tokens(16, 24)
    full = tiny.logits(tiny.model("llama"), ids)
    options, result = {"tokens": 384, "epochs": 6, "streams": "bfloat16", "schedule": ["w2a16"]}, []
    for rate in (1e-3, 0.0):
        lm = made(ids=ids, dtype=dtype, lr=rate, **options)
        result.append((tiny.logits(lm.model, ids).float() - full).square().mean().item())
    assert result[0] < 0.6 * result[1], result  # 0.24 of it


def test_streams_in_host_memory_change_nothing():
    first, second = made(lr=1e-3, place="device"), made(lr=1e-3, place="host")
    for name, weight in first.weights.items():
        assert torch.equal(weight.codes, second.weights[name].codes)


def test_seq_levels_are_trained_and_stored_without_zero_points(tmp_path):
    lm = made(levels="seq", lr=1e-3)
    lm.save(tmp_path / "model.safetensors", {"of": "a test"})
    again = LowBitModel(tiny.model("llama"))
    again.load(tmp_path / "model.safetensors")
    for name, weight in again.weights.items():
        s = (weight.scales.float() * weight.factor).repeat_interleave(16, 1)
        torch.testing.assert_close(weight.dequantize() / s, weight.codes - 1.5)
        assert weight.zeros is None and torch.equal(weight.dequantize(), lm.weights[name].dequantize())
    assert bits.report(again)["block"]["zeros"] == 0


def test_continues_from_a_step_that_came_before():
    lm = LowBitModel(tiny.model("llama"))
    bitbybit.apply(lm, IDS, Config(**SMALL, lr=1e-3))
    before = dict(lm.weights)
    more = Config(**SMALL, act_bits=2, schedule=["w2a8", "w2a2"], lr=0.0, include_zero=False, scale="float32")
    bitbybit.apply(lm, IDS, more)
    for name, weight in lm.weights.items():
        codes = before[name].codes.view(-1, 16)
        same = (codes.amin(1) == 0) & (codes.amax(1) == 3)  # a group without one of its end codes has another range now
        a, b = (w.dequantize().view(-1, 16)[same] for w in (weight, before[name]))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert same.float().mean() > 0.8
        assert lm.attachments[name][0].numbers["bits"] == 2


def test_blocks_compute_in_bfloat16_and_what_is_trained_is_float32(monkeypatch):
    """The paper's GPUs; every step's loss is that of float32 but for its rounding."""
    seen, true_fit = [], training.fit
    noted = lambda task, *rest: seen.append((task.students[0], rest[1][0])) or true_fit(task, *rest)  # noqa: E731
    monkeypatch.setattr(training, "fit", noted)
    runs = [made(compute=compute, lr=1e-3) for compute in ("bfloat16", "float32")]
    assert Config().compute == "bfloat16" and not runs[0].facts["training/loss"] == runs[1].facts["training/loss"]
    losses = [run.facts["training/loss"][-1] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=0.3)  # 0.03 to 0.12 apart, by processor
    dtypes = [student(stream.take(slice(0, 1))).dtype for student, stream in seen]
    assert dtypes == [torch.bfloat16] * (len(dtypes) // 2) + [torch.float32] * (len(dtypes) // 2)
    assert runs[0].model.dtype == torch.float32, "the model that is quantized stays in its own"


def test_a_copy_on_quantized_inputs_has_the_blocks_parameters():
    block = tiny.model("llama").model.layers[0].mlp
    widths = {"gate_proj": 4, "up_proj": 4, "down_proj": 16}
    copy = inputs.on_quantized_inputs(block, widths, GroupGrid(8, 16))
    assert all(a is b for a, b in zip(copy.parameters(), block.parameters(), strict=True))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    want = block(x), block(inputs.quantized(x, GroupGrid(4, 16)))
    assert torch.equal(block(x), want[0]) and torch.equal(copy(x), want[1]) and not torch.equal(*want)
    assert inputs.on_quantized_inputs(block, dict.fromkeys(widths, 16), GroupGrid(8, 16)) is block


# --- quantized inputs -------------------------------------------------------------------------------------------------


def test_kurtosis_is_that_of_all_inputs_of_a_layer():
    model, caught = tiny.model("llama"), {}
    for i, block in enumerate(model.model.layers):
        block.mlp.down_proj.register_forward_pre_hook(lambda _, a, i=i: caught.setdefault(i, []).append(a[0]))
    tiny.logits(model, IDS)
    want = []
    for i in range(2):
        x = torch.cat([part.flatten() for part in caught[i]]).double()
        want.append(((x - x.mean()) ** 4).mean().item() / x.var(correction=0).item() ** 2)
    kurtosis = bitbybit.input_kurtosis(tiny.model("llama"), IDS)
    assert list(kurtosis) == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert list(kurtosis.values()) == pytest.approx(want, rel=1e-4)


def test_outlier_sites_get_more_bits():
    low, high = sorted(bitbybit.input_kurtosis(tiny.model("llama"), IDS).items(), key=lambda item: item[1])
    lm = made(act_bits=2, kurtosis=(low[1] + high[1]) / 2, outlier_bits=4)
    bits_of = {name: present[0].numbers["bits"] for name, present in lm.attachments.items()}
    assert set(bits_of) == set(block_linears(tiny.model("llama")))
    assert {name for name, n in bits_of.items() if n == 4} == {high[0]} and set(bits_of.values()) == {2, 4}
    assert lm.facts["layers/kurtosis"] == pytest.approx([v for _, v in sorted([low, high])])
    assert all(weight.zeros.max() < 4 for weight in lm.weights.values()), "with low-bit activations zeros are codes"


@torch.no_grad()
@pytest.mark.parametrize("layout", ["llama", "qwen2", "mistral", "phi"])
def test_what_is_stored_is_what_was_trained(monkeypatch, layout, tmp_path):
    """The model that is left computes what the last stage computed, and so does the file."""
    last = {}
    true_at = bitbybit.TrainedBlock.at

    def noted(self, precision, kwargs):
        run = true_at(self, precision, kwargs)
        return lambda x: last.update({id(self): (x.detach().clone(), kwargs, run)}) or run(x)

    monkeypatch.setattr(bitbybit.TrainedBlock, "at", noted)
    lm = made(layout, act_bits=4, lr=1e-3)
    for block, (x, kwargs, run) in zip(lm.model.base_model.layers, last.values(), strict=True):
        torch.testing.assert_close(block(x, **kwargs), run(x), rtol=1e-5, atol=1e-5)
    lm.save(tmp_path / "model.safetensors", {"of": "a test"})
    again = LowBitModel(tiny.model(layout))
    again.load(tmp_path / "model.safetensors")
    assert torch.equal(tiny.logits(again.model, SCORED), tiny.logits(lm.model, SCORED))


def test_inputs_of_another_model_are_refused():
    linear = torch.nn.Linear(64, 8)
    attachment = inputs.attachment("bitbybit", 32, GroupGrid(2, 16))
    with pytest.raises(UserError, match="32 inputs, and this one has 64"):
        inputs.attached(linear, attachment.tensors, attachment.numbers)
    with pytest.raises(UserError, match="64 input channels do not divide into groups of 48"):
        inputs.attached(linear, {}, {"bits": 2, "group": 48, "include_zero": True, "columns": 64})


def test_the_engine_quantizes_inputs_as_the_layer_does():
    name, lm = "model.layers.0.self_attn.o_proj", LowBitModel(tiny.model("llama"))
    lm.attach(name, inputs.attachment("bitbybit", 64, GroupGrid(8, 16)))
    product = weights.product(lm, [name], torch.device("cpu"), torch.float32)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    layer = lm.model.get_submodule(name)
    torch.testing.assert_close(product(x), layer(x), rtol=1e-5, atol=1e-6)
    assert (product(x) - layer.linear(x)).abs().max() > 1e-3, "the layer without quantized inputs is another one"


# --- the master -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_one_file_is_read_at_8_4_and_2_bits(tmp_path):
    lm = made(any_precision=True, lr=1e-3, delta="centred")
    path = tmp_path / "master.safetensors"
    lm.save(path, {"of": "a test"})
    for width in (8, 4, 2):
        again = LowBitModel(tiny.model("llama"))
        again.load(path)
        sliced.apply(again, None, sliced.Config(width))
        for name, weight in again.weights.items():
            master = lm.weights[name]
            assert torch.equal(weight.codes, master.codes >> (8 - width)) and weight.codes.max().item() < 2**width
            delta = (2 ** (8 - width) - 1) / 2
            scale = (master.scales.float() * master.factor).repeat_interleave(16, 1)
            zeros = master.zeros.float().repeat_interleave(16, 1)
            want = scale * (weight.codes.float() * 2 ** (8 - width) + delta - zeros)
            torch.testing.assert_close(weight.dequantize(), want)
            count, groups = weight.codes.numel(), weight.scales.numel()
            assert weight.stored_bits() == {"codes": width * count, "scales": 8 * groups + 32, "zeros": 8 * groups}
        assert again.model.model.layers[0].mlp.up_proj.weight.equal(
            again.weights["model.layers.0.mlp.up_proj"].dequantize()
        )


def test_the_curriculum_grows_and_each_width_is_taught_by_the_next_wider_one(monkeypatch):
    calls = []

    def noted(task, loss, streams, *rest):
        calls.append((len(task.students), [s is not None for s in task.seconds], len(streams)))
        return [1.0]

    monkeypatch.setattr(training, "fit", noted)
    lm = made(any_precision=True, rho=1.0)
    assert calls == 2 * [(1, [False], 2)] + 2 * [(2, [False, True], 4)] + 2 * [(3, [False, True, True], 6)]
    assert all((weight.bits, weight.shift) == (8, 0) for weight in lm.weights.values())


@torch.no_grad()
@pytest.mark.parametrize("teacher", ["full", "earlier"])
def test_streams_of_a_master_are_those_of_its_widths(monkeypatch, teacher):
    """Each width reads what its own codes gave; its second target comes from the inputs of the next wider one."""
    calls = []
    monkeypatch.setattr(
        training, "fit", lambda task, loss, streams, *rest: calls.append([s.hidden.clone() for s in streams]) or [1.0]
    )
    made(any_precision=True, rho=1.0, teacher=teacher)
    model, grid = tiny.model("llama"), Config(**SMALL).grid(8)
    hidden, kwargs = block_inputs(model, IDS)
    start, (first, second) = torch.cat(hidden), model.model.layers

    def at(block, width, x, kw):
        names = [name for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)]
        weights = {f"{n}.weight": fake_quantize(block.get_submodule(n).weight, grid, 8 - width) for n in names}
        return torch.func.functional_call(block, weights, (x,), kw)

    inputs_of = {width: at(first, width, start, kwargs[0]) for width in (8, 4, 2)}
    full = second(first(start, **kwargs[0]), **kwargs[1])
    taught = [
        second(inputs_of[w], **kwargs[1]) if teacher == "full" else at(second, w, inputs_of[w], kwargs[1])
        for w in (8, 4)
    ]
    for target, want in zip(calls[-1], (*inputs_of.values(), full, *taught), strict=True):
        torch.testing.assert_close(target, want, rtol=1e-3, atol=1e-4)


def test_lambdas_weigh_the_widths(monkeypatch):
    seen = []
    monkeypatch.setattr(bitbybit, "loss", lambda lambdas, second, *rest: seen.append((lambdas, second)))
    monkeypatch.setattr(training, "fit", lambda task, loss, *rest: loss([], None, []) or [1.0])
    made(any_precision=True, lambdas={4: 0.5, 2: 2.0}, second=0.25)
    assert seen[-1] == ([1.0, 0.5, 2.0], 0.25) and seen[0] == ([1.0], 0.25)


@FAST
@given(st.integers(0, 2**31), st.sampled_from(["asymmetric", "seq"]), st.sampled_from(["e4m3", "float16", "float32"]))
def test_a_packed_weight_is_the_fake_quantized_one_at_every_width(seed, levels, scale):
    w = 0.1 * torch.randn(5, 64, generator=torch.Generator().manual_seed(seed))
    grid = GroupGrid(8, 16, levels, scale=scale)
    for delta in ("centred", "zero"):
        master = pack(w, grid, delta)
        for width in (8, 4, 2):
            assert torch.equal(master.at(width).dequantize(), fake_quantize(w, grid, 8 - width, delta))
            assert torch.equal(master.at(4).at(2).codes, master.at(2).codes)
            assert torch.equal(master.rows(1, 3).at(width).dequantize(), master.at(width).dequantize()[1:3])


@pytest.mark.parametrize("width", [8, 4, 2])
def test_one_layer_packed_has_the_bytes_that_are_counted_and_gives_the_same_weight(width):
    """Codes at their width, zero points at the master's, scales of a byte and one factor; nothing else is needed."""
    weight = pack(W, GroupGrid(8, 32, scale="e4m3")).at(width)
    parts = {
        "codes": stream(weight.codes, width),
        "scales": weight.scales.view(torch.uint8).numpy().tobytes() + weight.factor.numpy().tobytes(),
        "zeros": stream(weight.zeros, 8),
    }
    assert {kind: 8 * len(data) for kind, data in parts.items()} == weight.stored_bits()
    codes, z = numbers(parts["codes"], width, W.shape), numbers(parts["zeros"], 8, weight.zeros.shape)
    scales = torch.frombuffer(bytearray(parts["scales"][:-4]), dtype=torch.float8_e4m3fn).view_as(weight.scales)
    factor = torch.frombuffer(bytearray(parts["scales"][-4:]), dtype=torch.float32)
    read = replace(weight, codes=codes, zeros=z.to(torch.uint8), scales=scales, factor=factor)
    assert torch.equal(read.dequantize(), weight.dequantize())


def test_bits_of_zero_points():
    far = W[:4, :64] + 5
    assert pack(W, GroupGrid(2, 32)).stored_bits()["zeros"] == 2 * 512
    assert pack(far, GroupGrid(2, 32)).zeros.dtype == torch.int16
    assert pack(far, GroupGrid(2, 32)).stored_bits()["zeros"] == 16 * 8
    assert pack(far, GroupGrid(2, 32, include_zero=True)).stored_bits()["zeros"] == 2 * 8
    assert pack(W, GroupGrid(2, 32, "seq")).stored_bits() == {"codes": 2 * W.numel(), "scales": 32 * 512, "zeros": 0}
    one = pack(W, GroupGrid(2, 32, scale="e4m3"))
    assert sum(one.stored_bits().values()) == 2.3125 * W.numel() + 32


def test_bits_of_a_model_are_those_of_the_paper():
    lm = made()
    counted = bits.report(lm)
    layers = len(lm.weights)
    assert counted["block"]["codes"] == 2 * counted["block_weights"]
    assert counted["bpw"] == pytest.approx(2 + 10 / 16 + 32 * layers / counted["block_weights"])


def test_widths_nested_in_a_master_are_its_halves_down_to_2():
    assert nested(8) == [8, 4, 2] and nested(4) == [4, 2] and nested(6) == [6, 3, 2]


# --- recipes and bad input --------------------------------------------------------------------------------------------


BAD = {
    "bitbybit(any_precision, w=3)": "3 bits are not nested in a master of 8; choose from: 8, 4, 2",
    "bitbybit(schedule=[w2a16, w4a16, w2a16])": "rises from w2a16 to w4a16; only the cyclic one may, so give order=D",
    "bitbybit(schedule=[w8a16, w4a16])": "schedule ends at w4a16, bits and act_bits say w2a16",
    "bitbybit(schedule=[w8])": "schedule has 'w8'; a precision is w8a16",
    "bitbybit(schedule=[w9a16, w2a16])": "schedule has 'w9a16'",
    "bitbybit(any_precision, a=2)": "any_precision trains weights alone",
    "bitbybit(lambdas={3: 1.0})": "lambdas has 3, a width that no stage",
    "bitbybit-w1": "bits is 1",
    "bitbybit-a9": "bits is 9",
    "bitbybit-rho=0.0": "rho is a share above 0",
    "bitbybit-batch=0": "batch is 0",
    "bitbybit-lr=-1.0": "lr is -1.0",
    "bitbybit-g0": "group is 0",
}


@pytest.mark.parametrize("text", BAD)
def test_options_that_mean_nothing_are_refused(text):
    assert BAD[text] in refusal(recipe.parse, text)


def test_models_and_texts_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="layers.0.self_attn.q_proj: 64 input channels do not divide into groups of 48"):
        made(group=48)
    with pytest.raises(UserError, match="trains on 97 tokens an epoch, the calibration text has 96; .* tokens=96"):
        made(tokens=97)
    with pytest.raises(UserError, match="a batch of 7 sequences from 6"):
        made(batch=7)
    lm = LowBitModel(tiny.model("llama"))
    with pytest.raises(UserError, match="sliced reads a master"):
        sliced.apply(lm, None, sliced.Config())
    rtn.apply(lm, None, rtn.Config())
    with pytest.raises(UserError, match="sliced reads a master"):
        sliced.apply(lm, None, sliced.Config())
    lm = made(any_precision=True, epochs=0)
    with pytest.raises(UserError, match="layers.0.self_attn.q_proj: 3 bits are not nested in a master of 8"):
        sliced.apply(lm, None, sliced.Config(3))
    sliced.apply(lm, None, sliced.Config(2))
    with pytest.raises(UserError, match="codes of 2 bits cannot be read at 4; the low bits are not stored"):
        sliced.apply(lm, None, sliced.Config(4))
    broken = torch.full((2, 32), math.nan)
    with pytest.raises(UserError, match="a 2x32 weight holds NaN or Inf"):
        pack(broken, GroupGrid(2, 32))
