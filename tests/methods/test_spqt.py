"""SpQt's activation sparsity: known answers of TEAL's thresholds, slow references, the two protocols, bad input."""

import shutil

import numpy as np
import pytest
import spqt_reference as slow
import tiny
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from known import X

from repro.__main__ import main
from repro.baselines import qera, rtn
from repro.core.errors import UserError
from repro.jobs import compress
from repro.jobs.target import Target
from repro.methods.spqt import sparse_inputs as spqt
from repro.methods.spqt import teal
from repro.methods.spqt.sparse_inputs import Config
from repro.methods.spqt.teal import greedy, histogram, zeroed
from repro.metrics import sparsity as reached
from repro.models import perplexity
from repro.models.lowbit import LowBitModel, block_linears, blocks
from repro.recipes import recipe
from repro.specs import scale as scales
from repro.store import observations
from repro.store.observations import Observations, Series
from repro.workflow import runner

FAST = settings(max_examples=50, deadline=None, derandomize=True)
IDS, SCORED = tiny.tokens(8, 24), tiny.tokens(3, 20, seed=5)
SMALL = {"tokens": 192, "search": 96}
LAYERS = list(block_linears(tiny.model("llama")))


def sparse(name="llama", dtype=torch.float32, quantizer=None, **options) -> LowBitModel:
    """A tiny model with sparse layers, calibrated on IDS."""
    lm = LowBitModel(tiny.model(name).to(dtype))
    if quantizer:
        rtn.apply(lm, None, rtn.Config(bits=quantizer))
    spqt.apply(lm, IDS, Config(**SMALL | options))
    return lm


def stored(lm: LowBitModel) -> dict[str, float]:
    """The threshold of each layer."""
    return {name: attachment.tensors["threshold"].item() for name, (attachment,) in lm.attachments.items()}


# --- thresholds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("s", "threshold", "zeros"),
    [(0.25, 0.254819, 0.2446), (0.5, 0.524920, 0.4973), (0.65, 0.743491, 0.6477), (0.9, 1.398432, 0.8994)],
)
def test_known_answers_of_teal(s, threshold, zeros):
    result = histogram(X).threshold(s)
    assert result == pytest.approx(threshold, rel=1e-5)
    assert (zeroed(X, result) == 0).float().mean().item() == pytest.approx(zeros, abs=5e-5)
    assert result == pytest.approx(slow.quantile(X.double().numpy(), s), rel=1e-6)


@FAST
@given(st.integers(0, 2**31), st.integers(100, 3000), st.floats(-3, 3), st.sampled_from([torch.float32, torch.float64]))
def test_a_threshold_is_the_definition_and_grows_with_sparsity(seed, count, shift, dtype):
    x = shift + torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    counts = histogram(x.view(1, -1))
    result = [counts.threshold(s) for s in (0.0, 0.1, 0.3, 0.6, 0.95)]
    assert result[0] == 0 and result == sorted(result)
    for s, t in zip((0.3, 0.6, 0.95), result[2:]):
        size = float(x.max() - x.min())
        assert t == pytest.approx(max(slow.quantile(x.double().numpy(), s), 0), abs=1e-3 * size)


@pytest.mark.parametrize(
    "x", [torch.zeros(500), torch.full((500,), 2.0), torch.zeros(500).index_fill(0, torch.tensor(3), 9.0)]
)
def test_inputs_that_are_all_alike_have_a_threshold(x):
    result = [histogram(x).threshold(s) for s in (0.0, 0.5, 0.9)]
    assert np.isfinite(result).all() and result == sorted(result) and 0 <= result[-1] <= 9


@FAST
@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=30), st.floats(0, 10, width=32))
def test_an_input_is_kept_iff_it_is_above(values, t):
    kept = zeroed(torch.tensor(values), t).tolist()
    assert kept == [v if abs(v) > t else 0 for v in values]


def test_an_input_at_its_threshold_is_zero_and_nan_stays():
    kept = zeroed(torch.tensor([0.5, -0.5, 0.50001, torch.nan]), 0.5)
    assert kept[:3].tolist() == [0, 0, pytest.approx(0.50001)] and kept[3].isnan()


# --- the greedy search ------------------------------------------------------------------------------------------------


@FAST
@given(st.integers(0, 2**31), st.integers(1, 7), st.sampled_from([0.05, 0.1, 0.2]), st.floats(0, 0.8))
@example(0, 5, 0.1, 0.5)  # ten steps of 0.1 add up to less than 1
def test_greedy_is_the_log_of_rows(seed, count, step, target):
    random = np.random.default_rng(seed)
    sizes = {f"l{i}": int(size) for i, size in enumerate(random.choice([32, 64, 192], count))}
    sizes["l0"] = 64
    weight = {name: random.uniform(0.1, 10) for name in sizes}

    def error(s):
        return sum(weight[name] * s[name] ** 3 for name in sizes) + 0.1 * max(s.values())

    result = greedy(error, sizes, target, step)
    want = slow.search(error, sizes, target, step)
    mean = []
    for sparsity in (result, want):
        mean.append(sum(sparsity[name] * size for name, size in sizes.items()) / sum(sizes.values()))
    assert mean[0] == pytest.approx(mean[1], abs=1e-9) or abs(mean[0] - target) == pytest.approx(abs(mean[1] - target))
    last = {name: step * 64 / size for name, size in sizes.items()}
    assert all(0 <= s < 1 + last[name] for name, s in result.items())
    assert abs(mean[0] - target) <= step * 64 / sum(sizes.values()) + 1e-9
    if mean[0] == pytest.approx(mean[1], abs=1e-9):
        assert result == pytest.approx(want)


def test_every_step_adds_as_many_parameters():
    """Known answer: k costs nothing, so that it takes all steps that it can, twice as large as q's."""
    sizes = {"q": 64, "k": 32}
    for target, k in ((0.29, 0.8), (0.31, 1.0)):  # the nearer of 0.2667 and 0.3333
        assert greedy(lambda s: s["q"], sizes, target, 0.1) == pytest.approx({"q": 0.0, "k": k}, abs=1e-9)
    assert greedy(lambda s: s["q"], sizes, 0.0, 0.1) == {"q": 0.0, "k": 0.0}


def test_a_share_reaches_1_and_its_layer_takes_no_further_step():
    """Known answers, as the authors' code gives them: k costs nothing and takes all steps until it is full, then q."""
    result = greedy(lambda s: s["q"], {"q": 64, "k": 32}, 0.9, 0.25)
    assert result == {"q": 0.75, "k": 1.0}
    assert greedy(lambda s: s["q"], {"q": 64, "k": 16}, 0.5, 0.1) == pytest.approx({"q": 0.3, "k": 1.2})
    tenth = greedy(lambda s: s["q"], {"q": 64, "k": 64}, 0.55, 0.1)
    assert tenth == pytest.approx({"q": 0.1, "k": 1.0}), "ten steps of 0.1 are 1"


def test_the_error_is_that_of_the_whole_block():
    """Attention that is kept, and an MLP on the last positions alone, against the block run whole with masks."""
    lm, model = LowBitModel(tiny.model("llama")), tiny.model("llama")
    made = list(teal.each_block(lm, IDS, 4))[1]
    first, block = blocks(model).values()
    with torch.no_grad():
        seen = {}
        hook = block.register_forward_pre_hook(
            lambda _, args, kwargs: seen.update(x=args[0], kw=kwargs), with_kwargs=True
        )
        model(IDS[:4], use_cache=False)
        hook.remove()
        dense = block(seen["x"], **seen["kw"])
        names = [name.removeprefix("model.layers.1.") for name in made.sizes]
        for step in range(4):
            s = {name: 0.2 * ((i + step) % 4) for i, name in enumerate(made.sizes)}
            at = {short: made.histograms[name].threshold(s[name]) for short, name in zip(names, s)}
            hooks = [
                block.get_submodule(short).register_forward_pre_hook(lambda _, args, t=t: args[0] * (args[0].abs() > t))
                for short, t in at.items()
            ]
            out = block(seen["x"], **seen["kw"])
            for hook in hooks:
                hook.remove()
            want = (out - dense)[:, 18:].square().sum(1).sqrt().mean().item()
            assert made.error(s) == pytest.approx(want, rel=1e-4) and want > 0
    assert made.error(dict.fromkeys(made.sizes, 0.0)) == 0 and not first._forward_pre_hooks


# --- the step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["all", "second_half"])
@pytest.mark.parametrize("kind", ["unified", "teal"])
def test_perplexity_is_that_of_masks_in_a_slow_model(positions, kind):
    lm = sparse(dtype=torch.float64, sparsity=0.5, thresholds=kind, positions=positions, step=0.1)
    weights = {name: value.double().numpy() for name, value in tiny.model("llama").state_dict().items()}
    first = {"all": 0, "second_half": SCORED.shape[1] // 2}[positions]
    want = [slow.nll(weights, lm.model.config, ids, slow.masked(stored(lm), first)) for ids in SCORED.tolist()]
    fast = perplexity.perplexity(perplexity.score(lm.model, SCORED))
    assert fast == pytest.approx(np.exp(np.mean(want)), rel=1e-5)
    dense = perplexity.perplexity(perplexity.score(tiny.model("llama"), SCORED))
    assert abs(fast / dense - 1) > 1e-3


def test_sparsity_zero_is_dense():
    assert torch.equal(tiny.logits(sparse(sparsity=0.0).model, SCORED), tiny.logits(tiny.model("llama"), SCORED))


def test_the_first_half_is_dense_and_the_second_is_what_single_tokens_give():
    """Decoding: a dense prefill of the first half, then each token alone through sparse layers."""
    half, dense = sparse(positions="second_half").model, tiny.model("llama")
    whole, n = tiny.logits(half, SCORED), SCORED.shape[1] // 2
    assert torch.equal(whole[:, :n], tiny.logits(dense, SCORED)[:, :n])
    for positions in ("all", "second_half"):
        decoder = sparse(positions=positions).model
        with torch.no_grad():
            cache = dense(input_ids=SCORED[:, :n], use_cache=True).past_key_values
            for t in range(n, SCORED.shape[1]):
                one = decoder(input_ids=SCORED[:, t : t + 1], past_key_values=cache, use_cache=True)
                torch.testing.assert_close(one.logits[:, 0], whole[:, t], rtol=1e-4, atol=1e-5)
    everywhere = tiny.logits(sparse().model, SCORED)
    assert not torch.equal(everywhere[:, 0], whole[:, 0])


@pytest.mark.parametrize("options", [{}, {"thresholds": "teal", "step": 0.1}])
def test_layers_that_read_one_tensor_share_a_threshold_and_a_block_keeps_its_target(options):
    lm = sparse(sparsity=0.5, **options)
    result, sizes = stored(lm), {name: tiny.model("llama").get_submodule(name).weight.numel() for name in LAYERS}
    assert list(result) == LAYERS and list(lm.facts["layers/threshold"]) == list(result.values())
    targets = dict(zip(LAYERS, lm.facts["layers/sparsity"]))
    for b in range(2):
        of = {name.rpartition(".")[2]: name for name in LAYERS if f".{b}." in name}
        assert result[of["q_proj"]] == result[of["k_proj"]] == result[of["v_proj"]]
        assert result[of["gate_proj"]] == result[of["up_proj"]]
        mean = sum(targets[name] * sizes[name] for name in of.values()) / sum(sizes[name] for name in of.values())
        assert mean == pytest.approx(0.5, abs=0.1 * sizes[of["q_proj"]] / sum(sizes[name] for name in of.values()))
    assert (len(set(targets.values())) == 1) == (not options)


def test_teal_itself_gives_every_layer_its_own():
    alone, shared = (sparse(thresholds="teal", step=0.1, shared=shared) for shared in (False, True))
    apart = [dict(zip(LAYERS, lm.facts["layers/sparsity"])) for lm in (alone, shared)]
    different = []
    for b in range(2):
        group = [f"model.layers.{b}.self_attn.{n}_proj" for n in "qkv"]
        size = [tiny.model("llama").get_submodule(name).weight.numel() for name in group]
        mean = sum(apart[0][name] * n for name, n in zip(group, size)) / sum(size)
        assert [apart[1][name] for name in group] == pytest.approx([mean] * 3)
        for alone in (f"model.layers.{b}.self_attn.o_proj", f"model.layers.{b}.mlp.down_proj"):
            assert apart[0][alone] == apart[1][alone]
        different.append(len({apart[0][name] for name in group}) > 1)
    assert any(different)


def test_thresholds_come_from_the_full_precision_model_on_the_first_tokens():
    one, other = sparse(quantizer=2), sparse(quantizer=8)
    assert stored(one) == stored(other) == stored(sparse())
    assert not torch.equal(tiny.logits(one.model, SCORED), tiny.logits(other.model, SCORED))
    few = LowBitModel(tiny.model("llama"))
    spqt.apply(few, IDS, Config(tokens=48, search=48))
    same = LowBitModel(tiny.model("llama"))
    spqt.apply(same, IDS[:2], Config(tokens=48, search=48))
    assert stored(few) == stored(same) != stored(one)


@pytest.mark.parametrize("quantizer", [None, 4])
def test_thresholds_are_stored_and_counted_and_survive_the_disk(tmp_path, quantizer):
    lm, path = sparse(quantizer=quantizer, positions="second_half"), tmp_path / "model.safetensors"
    assert lm.extra_bits == {"spqt": 32 * len(LAYERS)}
    lm.save(path, {"model": "tiny"})
    back = LowBitModel(tiny.model("llama"))
    back.load(path)
    assert torch.equal(tiny.logits(back.model, SCORED), tiny.logits(lm.model, SCORED)) and stored(back) == stored(lm)
    assert not torch.equal(tiny.logits(lm.model, SCORED), tiny.logits(sparse(quantizer=quantizer).model, SCORED))


def test_a_compensator_reads_sparse_inputs_too():
    lm = LowBitModel(tiny.model("llama"))
    rtn.apply(lm, None, rtn.Config(bits=3))
    qera.apply(lm, IDS, qera.Config(rank=2))
    layer, x = lm.model.get_submodule(LAYERS[6]), torch.randn(1, 4, 128, generator=torch.Generator().manual_seed(0))
    spqt.apply(lm, IDS, Config(**SMALL))
    t = stored_last(lm, LAYERS[6])
    assert torch.equal(lm.model.get_submodule(LAYERS[6])(x), layer(x * (x.abs() > t)))
    assert [a.step for a in lm.attachments[LAYERS[6]]] == ["qera", "spqt"]


def stored_last(lm: LowBitModel, name: str) -> float:
    return lm.attachments[name][-1].tensors["threshold"].item()


@pytest.mark.parametrize("name", list(tiny.MODELS))
def test_unified_is_for_every_layout(name):
    lm = sparse(name)
    assert len(stored(lm)) == len(block_linears(tiny.model(name)))
    assert not torch.equal(tiny.logits(lm.model, SCORED), tiny.logits(tiny.model(name), SCORED))


# --- what was reached -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["all", "second_half"])
def test_zeros_are_counted_where_they_are_multiplied(positions):
    lm, result = sparse(quantizer=4, positions=positions, sparsity=0.4), {}
    first = {"all": 0, "second_half": 10}[positions]
    for name in LAYERS:
        real, t = lm.model.get_submodule(name), stored(lm)[name]
        seen = []
        hook = real.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        tiny.logits(lm.model, SCORED)
        hook.remove()
        result[name] = float(np.mean([abs(v) <= t for v in seen[0][:, first:].flatten().tolist()]))
    assert reached.zeros(lm, SCORED) == pytest.approx(result, abs=1e-6)
    assert 0.2 < min(result.values()) and max(result.values()) < 0.6
    assert not any(module._forward_pre_hooks for module in lm.model.modules())
    assert set(reached.zeros(LowBitModel(tiny.model("llama")), SCORED).values()) == {0.0}, "dense"
    assert list(reached.zeros(sparse(), SCORED)) == LAYERS, "each once, also where nothing is quantized"


def test_what_is_shown_is_weighted_by_parameters():
    values = {"q_proj": ([0.1, 0.3], [10, 10]), "down_proj": ([0.5, 0.5], [30, 30])}
    zeros = {}
    for kind, columns in values.items():
        for what, column in zip(("zeros", "parameters"), columns):
            zeros[f"{what}/{kind}"] = Series(np.asarray(column, dtype=float), "layers", "g")
    for of, wanted in {"": 42.5, "q_proj": 20.0, "down_proj": 50.0}.items():
        params = reached.Sparsity("wikitext2", of)
        series = params.series({"zeros": Observations(zeros, {})}, None)
        assert params.value({n: one.values.mean() for n, one in series.items()}) == pytest.approx(wanted)
    assert reached.Sparsity("wikitext2", "k_proj").series({"zeros": Observations(zeros, {})}, None) == {}


def test_a_scale_that_compares_nothing_counts_nothing():
    for keys in ({"perplexity": None}, {"perplexity": {"kl_windows": 0}}):
        assert reached.Sparsity("wikitext2").jobs(Target(scales.load(keys, "pocket"), "pocket-3m", "fp16")) is None


# --- bad input --------------------------------------------------------------------------------------------------------

REFUSED = {
    "spqt(sparsity=1)": "sparsity is 1.0; it must be a share of the inputs, 0 or more and below 1",
    "spqt(sparsity=-0.1)": "sparsity is -0.1; it must be a share",
    "spqt(step=0)": "step is 0.0; it must be above 0 and at most 0.5",
    "spqt(tokens=0)": "tokens is 0 and search 2048; they are 4 or more",
    "spqt(thresholds=best)": "thresholds",
    "spqt + spqt": "a second sparsity is refused",
    "spqt + rtn-w4-pc": "rtn after spqt is refused; spqt is a recipe's last step",
    "rtn-w4-pc + spqt + qera": "qera after spqt is refused",
}


@pytest.mark.parametrize("text", REFUSED)
def test_recipes_that_are_none(capsys, text):
    assert main(["compress", "pocket-3m", "--recipe", text]) == 2
    error = capsys.readouterr().err
    assert REFUSED[text] in error and error.count("\n") == 1


def test_too_few_tokens_are_a_sentence():
    for calibration, count in ((None, 0), (IDS[:2], 48)):
        with pytest.raises(UserError, match=f"from 49 calibration tokens and got {count}; raise the scale's calib"):
            spqt.apply(LowBitModel(tiny.model("llama")), calibration, Config(tokens=49))
    with pytest.raises(UserError, match=r"^99 inputs are too few for a histogram; calibrate on more tokens"):
        histogram(torch.randn(99))


def test_inputs_that_are_not_finite_are_named():
    lm = LowBitModel(tiny.model("llama"))
    lm.model.model.layers[1].post_attention_layernorm.weight.data[3] = torch.inf
    with pytest.raises(UserError, match=r"^model\.layers\.1\.mlp\.gate_proj: its inputs hold NaN or Inf"):
        spqt.apply(lm, IDS, Config(**SMALL))


def test_a_block_that_the_search_does_not_know_is_a_sentence():
    with pytest.raises(UserError, match="TEAL's search does not know this block .*; use thresholds=unified"):
        sparse("phi", thresholds="teal")


def test_thresholds_of_another_shape_are_refused(tmp_path):
    lm, path = sparse(), tmp_path / "model.safetensors"
    lm.save(path, {"model": "tiny"})
    wider = tiny.LlamaForCausalLM(tiny.LlamaConfig(**tiny.SHAPE | {"intermediate_size": 192}))
    message = "down_proj: its threshold is that of a layer with 128 inputs, and this one has 192: .* another model"
    with pytest.raises(UserError, match=message):
        LowBitModel(wider).load(path)


def test_thresholds_of_another_model_or_calibration_text_are_refused(tmp_path, monkeypatch):
    """Files of one job in the folder of another: what runs next says so."""
    monkeypatch.chdir(tmp_path)
    text = "spqt(tokens=64, search=64)"
    crops = {"sequences": 2, "length": 32, "corpus": "tiny-held-out"}
    at = scales.load({"calibration": crops, "device": "cpu"}, "pocket")
    jobs = {name: compress.job(Target(at, name, text)) for name in ("pocket-3m", "pocket-5m")}
    other = scales.load({"calibration": crops | {"corpus": "tiny-wikitext"}, "device": "cpu"}, "pocket")
    jobs["text"] = compress.job(Target(other, "pocket-3m", text))
    assert len({job.folder for job in jobs.values()}) == 3
    for job in jobs["pocket-3m"].every():
        runner.run(job)
    for name in ("pocket-5m", "text"):
        shutil.copytree(jobs["pocket-3m"].folder, jobs[name].folder)
        assert not runner.done(jobs[name])
        with pytest.raises(UserError, match="these are results of the job .*; delete the folder and build it again"):
            runner.origin(jobs[name])
    with pytest.raises(UserError, match="made from another model than today's pocket-5m"):
        compress.load(jobs["pocket-5m"].parsed_options(), jobs["pocket-3m"].folder)
    series = observations.once(jobs["pocket-3m"].folder / observations.FILE, 0).series
    assert len(series["layers/threshold"].values) == 14 and (series["layers/sparsity"].values == 0.5).all()


def test_the_step_is_calibrated_and_its_name_says_what_differs():
    result = recipe.parse("rtn-w4-g32 + spqt(sparsity=0.25, thresholds=teal, positions=second_half)")
    assert result.calibrated and result.seeded and result.before == "rtn-w4-g32"
    assert result.name == "rtn-w4-g32 + spqt-sparsity=0.25-thresholds=teal-positions=second_half"
