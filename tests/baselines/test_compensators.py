"""Low-rank compensators: known answers of official code, what all must hold, what is stored, and bad input."""

import inspect
import itertools
import math
from dataclasses import dataclass

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known import W, X, errors
from safetensors import safe_open

from repro.baselines import BASELINES, aser, eora, grid, loftq, low_rank, lqer, rtn
from repro.core.errors import NotMeasurable, UserError
from repro.data import corpora
from repro.jobs import compress
from repro.methods.spear.calibration import kl, self_sampled
from repro.methods.spear.compensator import Compensator, pack
from repro.models import bits
from repro.models.activations import watching
from repro.models.lowbit import LowBitModel
from repro.recipes import recipe
from repro.store import observations
from repro.store.job import make

CLOSE = 1e-5
FAST = settings(max_examples=60, deadline=None, derandomize=True)
NAME = "model.layers.1.mlp.up_proj"
COMPENSATORS = sorted(name for name, module in BASELINES.items() if getattr(module, "KIND", "") == "compensator")
ONE_SHOT = [name for name in COMPENSATORS if name != "uniform"]
SHORT = {"uniform": {"samples": 8, "cka_samples": 4, "tokens": 16, "epochs": 1}}
IDS = tiny.tokens(8, 24)


def mxint(weight: torch.Tensor, width: int = 4, block: int = 32) -> torch.Tensor:
    """MXINT of a weight `[N, K]`: a shared exponent of each block's largest magnitude, sign and width - 1 bits."""
    parts = weight.double().unflatten(1, (-1, block))
    step = 2.0 ** (parts.abs().amax(-1, keepdim=True).log2().floor() - (width - 2))
    return (parts.sign() * (parts.abs() / step).round().clamp(max=2 ** (width - 1) - 1) * step).flatten(1)


NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334]
NF4 += [-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NF4 += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]  # arXiv 2305.14314, appendix E


def nf4(weight: torch.Tensor, block: int = 64) -> torch.Tensor:
    """NF4 of a weight `[N, K]` with the largest magnitude of each block as its scale."""
    parts, levels = weight.float().unflatten(1, (-1, block)), torch.tensor(NF4)
    scale = parts.abs().amax(-1, keepdim=True)
    return (levels[((parts / scale)[..., None] - levels).abs().argmin(-1)] * scale).flatten(1).double()


@dataclass
class Dense:
    """A weight that needs no decoding."""

    value: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        return self.value


def measured(weights=None):
    """Statistics of the known inputs as four sequences of 128."""
    layer = torch.nn.Linear(256, 64)
    with torch.no_grad(), watching({"x": layer}, 4, ["second_moment"], weights) as statistics:
        layer(X.view(4, 128, 256))
    return statistics["x"]


def corrected(S) -> torch.Tensor:
    A, B = low_rank.truncated(W.double() - mxint(W), 16, S)
    return mxint(W) + B @ A


# --- known answers ----------------------------------------------------------------------------------------------------


def test_the_quantizers_of_the_known_answers():
    assert errors(mxint(W)) == pytest.approx((2.0301739e-05, 0.0084079515), rel=CLOSE)
    assert errors(mxint(W, 3)) == pytest.approx((7.9037887e-05, 0.033916809), rel=CLOSE)
    assert errors(nf4(W)) == pytest.approx((1.8794114e-05, 0.0076946863), rel=CLOSE)


KNOWN = {
    "plain": (1.1640984e-05, 0.0046932332, lambda: None),
    "lqer": (1.2843161e-05, 0.0017945120, lambda: lqer.scale(measured().mean_abs, 1)),
    "qera approximate": (1.2835796e-05, 0.0017945905, lambda: measured().mean_square.mean(0).sqrt()),
    "qera exact": (1.3100557e-05, 0.0016810056, lambda: low_rank.symmetric_root(measured().second_moment)),
    "cholesky": (1.3100557e-05, 0.0016810056, lambda: low_rank.cholesky(measured().second_moment, 0.0)),
    "eora": (1.3097907e-05, 0.0016870834, lambda: low_rank.eigenspace(measured(eora.weights(4, True)).second_moment)),
}


@pytest.mark.parametrize("case", KNOWN)
def test_every_correction_has_its_known_errors(case):
    weight_error, output_error, S = KNOWN[case]
    assert errors(corrected(S())) == pytest.approx((weight_error, output_error), rel=CLOSE)


@pytest.mark.parametrize(
    "quantize, iterations, weight_error, output_error",
    [
        (nf4, 1, 1.0760305e-05, 0.0045402230),
        (nf4, 5, 7.9081625e-06, 0.0037050989),
        (mxint, 1, 1.1640984e-05, 0.0046932332),
        (mxint, 5, 9.4124611e-06, 0.0041521366),
    ],
)
def test_loftq_known_answers(quantize, iterations, weight_error, output_error):
    weight, A, B, by_iteration = loftq.alternate(W, 16, iterations, lambda rest: Dense(quantize(rest)))
    of_both = weight.value + B @ A
    assert errors(of_both) == pytest.approx((weight_error, output_error), rel=CLOSE)
    assert by_iteration[-1] == pytest.approx(math.sqrt(weight_error * W.numel()), rel=CLOSE)
    assert len(by_iteration) == iterations


@pytest.mark.parametrize("iterations", [1, 5])
def test_loftq_is_that_of_peft(iterations):
    """On its own NF4, where `pip install .[peers]` was done; it names its device `cuda`, whatever is there."""
    peft, bnb = pytest.importorskip("peft.utils.loftq_utils"), pytest.importorskip("bitsandbytes")
    theirs = vars(peft).copy()
    exec(inspect.getsource(peft.loftq_init).replace('"cuda"', '"cpu"'), theirs)
    weight, A, B = theirs["loftq_init"](W.float(), 4, 16, iterations)

    def rounded(rest: torch.Tensor) -> Dense:
        stored = bnb.nn.Params4bit(rest.float(), requires_grad=False, compress_statistics=False, quant_type="nf4")
        stored = stored.to("cpu")
        return Dense(bnb.functional.dequantize_4bit(stored.data, stored.quant_state))

    ours, a, b, _ = loftq.alternate(W, 16, iterations, rounded)
    torch.testing.assert_close(weight, ours.value, rtol=0, atol=1e-6)
    torch.testing.assert_close(B @ A, (b @ a).float(), rtol=0, atol=1e-5 * float((b @ a).abs().max()))


def test_eora_weights_of_256_sequences():
    result = eora.weights(256, True)
    assert result[-1] == 1
    assert result[0].item() == pytest.approx(0.37, abs=0.001)
    assert (eora.weights(9, False) == 1).all()


# --- what all must hold -----------------------------------------------------------------------------------------------


def draw(seed: int, n: int, k: int, tokens: int, dead: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An error `[n, k]` and inputs `[tokens, k]` of very different channels, some of them dead; float64."""
    random = torch.Generator().manual_seed(seed)
    E, x = (torch.randn(rows, k, generator=random, dtype=torch.float64) for rows in (n, tokens))
    x = x * torch.logspace(-2, 2, k, dtype=torch.float64)[torch.randperm(k, generator=random)]
    x[:, :dead] = 0
    return E, x @ torch.randn(k, k, generator=random, dtype=torch.float64) if not dead else x


def roots(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """S of every method for inputs `[tokens, k]`."""
    G = x.T @ x / len(x)
    return {
        "lqer": lqer.scale(x.abs().mean(0, keepdim=True), 1),
        "qera approximate": x.square().mean(0).sqrt(),
        "qera exact": low_rank.symmetric_root(G),
        "eora": low_rank.eigenspace(G),
        "aser": low_rank.cholesky(G, 1e-6),
    }


@FAST
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(2, 9), st.integers(1, 30), st.integers(0, 1), st.data())
def test_no_method_leaves_more_than_plain_svd_in_its_own_norm(seed, n, k, tokens, dead, data):
    E, x = draw(seed, n, k, tokens, dead)
    rank = data.draw(st.integers(1, min(n, k)))
    plain_A, plain_B = low_rank.truncated(E, rank)
    for name, S in roots(x).items():
        A, B = low_rank.truncated(E, rank, S)
        assert A.shape == (rank, k) and B.shape == (n, rank)
        left, plain = (low_rank.weighted(E - b @ a, S).norm() for a, b in ((A, B), (plain_A, plain_B)))
        size = low_rank.weighted(E, S).norm()
        assert left <= plain + 1e-12 * size, name
        best = torch.linalg.svdvals(low_rank.weighted(E, S))[rank:].norm()
        assert abs(left - best) <= 1e-9 * size, name


@FAST
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(2, 9), st.data())
def test_loftq_of_one_iteration_is_plain_svd(seed, n, k, data):
    E, _ = draw(seed, n, k, 1, 0)
    rank = data.draw(st.integers(1, min(n, k)))
    A, B = low_rank.truncated(E - E.round(), rank)
    weight, a, b, left = loftq.alternate(E, rank, 1, lambda rest: Dense(rest.round()))
    assert torch.equal(weight.value, E.round()) and torch.equal(a, A) and torch.equal(b, B)
    assert left[0] <= (E - E.round()).norm() * (1 + 1e-12)


@FAST
@given(st.integers(0, 2**31), st.integers(2, 9), st.integers(2, 9), st.data())
def test_exact_whitened_and_eigenspace_products_are_one_and_the_papers(seed, n, k, data):
    E, x = draw(seed, n, k, 60, 0)
    rank = data.draw(st.integers(1, min(n, k)))
    G = x.T @ x / len(x)
    result = [low_rank.symmetric_root(G), low_rank.eigenspace(G), low_rank.cholesky(G, 0.0)]
    D = torch.linalg.svdvals(E @ result[0])
    if rank < len(D) and D[rank - 1] - D[rank] < 1e-3 * D[0]:  # a tie: any of its directions is the best
        return
    products = []
    for S in result:
        A, B = low_rank.truncated(E, rank, S)
        U, D, V = torch.linalg.svd(E @ S, full_matrices=False)
        inverse = torch.linalg.inv(S)
        as_printed = U[:, :rank] @ torch.diag(D[:rank]) @ V[:rank] @ inverse
        assert (B @ A - as_printed).norm() <= 1e-6 * as_printed.norm()
        products.append(B @ A)
    for other in products[1:]:
        assert (other - products[0]).norm() <= 1e-6 * products[0].norm()


def test_lqer_takes_the_largest_batch():
    means = torch.tensor([[1.0, 8.0], [3.0, 0.0], [2.0, 2.0], [4.0, 6.0]], dtype=torch.float64)
    for batch, want in ((1, [4.0, 8.0]), (2, [3.0, 4.0]), (4, [2.5, 4.0]), (9, [2.5, 4.0])):
        s = torch.tensor(want, dtype=torch.float64)
        torch.testing.assert_close(lqer.scale(means, batch), s / s.prod().sqrt())
    assert lqer.scale(torch.zeros(2, 3), 2).tolist() == [1.0, 1.0, 1.0]


def test_loftq_error_can_grow():
    """Rounding W - BA is not bound to be as good as rounding W: shown, not hidden."""
    w = torch.tensor([[0.5, -0.5, 1.5, 0.1], [0.4, 0.6, -1.4, 0.9], [1.6, 0.3, 0.2, -0.7]])
    grew = []
    for scale in (1.0, 1.1, 1.2, 1.3):
        *_, errors_by_step = loftq.alternate(w * scale, 1, 6, lambda rest: grid.rtn(rest, grid.Grid(bits=2)))
        grew.append(any(later > earlier for earlier, later in itertools.pairwise(errors_by_step)))
    assert any(grew)


# --- as steps ---------------------------------------------------------------------------------------------------------


def quantized(step: str = "rtn", **options) -> LowBitModel:
    lm, module = LowBitModel(tiny.model("llama")), BASELINES[step]
    module.apply(lm, IDS, module.Config(**{"bits": 3} | options))
    return lm


def compensated(step: str, lm: LowBitModel | None = None, **options) -> LowBitModel:
    lm = lm or quantized()
    module = BASELINES[step]
    module.apply(lm, IDS if module.CALIBRATED else None, module.Config(**{"rank": 2} | SHORT.get(step, {}) | options))
    return lm


@torch.no_grad()
def logits(lm: LowBitModel) -> torch.Tensor:
    return lm.model(IDS).logits


def output_error(lm: LowBitModel) -> float:
    full = LowBitModel(tiny.model("llama"))
    return float((logits(lm) - logits(full)).norm() / logits(full).norm())


@pytest.mark.parametrize("step", COMPENSATORS)
@pytest.mark.parametrize("factor_bits", [16, 8])
def test_saved_and_loaded_it_gives_the_same_logits_and_bytes_are_those_of_the_file(tmp_path, step, factor_bits):
    lm, path = compensated(step, factor_bits=factor_bits), tmp_path / "model.safetensors"
    lm.save(path, {})
    back = LowBitModel(tiny.model("llama"))
    back.load(path)
    assert torch.equal(logits(back), logits(lm)) and back.extra_bits == lm.extra_bits
    assert list(lm.attachments) == list(lm.weights) and set(lm.extra_bits) == {step}
    with safe_open(path, "pt") as file:
        stored = {key: file.get_tensor(key) for key in file.keys() if f"/{step}." in key}
    assert 8 * sum(tensor.nbytes for tensor in stored.values()) == lm.extra_bits[step] == bits.report(lm)["block"][step]
    of_layer = sum(tensor.nbytes for key, tensor in stored.items() if key.startswith(f"{NAME}/"))
    n, k = lm.weights[NAME].shape
    assert (
        of_layer
        == low_rank.stored_bytes(2, (n, k), factor_bits)
        == (2 * 2 * (n + k), 2 * (n + k) + 16)[factor_bits == 8]
    )
    assert lm.facts["layers/rank"] == [2] * len(lm.weights)


@pytest.mark.parametrize("step", ONE_SHOT)
def test_it_recovers_part_of_the_error_and_more_with_a_higher_rank(step):
    plain, low, high = output_error(quantized()), output_error(compensated(step)), compensated(step, rank=24)
    assert output_error(high) < 0.73 * low < 0.73 * plain
    assert all(0 < share < 0.9 for share in high.facts["layers/error"])


def test_uniform_is_trained_to_the_full_precision_models_distributions():
    full = tiny.model("llama")
    ids = self_sampled(full, 8, 16, 1.0, 0)  # what it is trained on
    models = [full] + [compensated("uniform", lr=1e-3, epochs=epochs).model for epochs in (0, 4)]
    with torch.no_grad():
        of_full, *of_others = (model(ids).logits for model in models)
    start, trained = (float(kl(of_full, each, 1.0)) for each in of_others)
    assert trained < 0.98 * start


@pytest.mark.parametrize("quantizer", ["gptq", "awq"])
@pytest.mark.parametrize("step", ["loftq", "lqer", "qera", "eora", "aser"])
def test_behind_other_quantizers_weights_stay_as_they_are(quantizer, step):
    before, options = quantized(quantizer, group=32), {"outlier_share": 0.0} if step == "aser" else {}
    codes = {name: weight.codes.clone() for name, weight in before.weights.items()}
    was, after = output_error(before), compensated(step, before, **options)
    assert all(torch.equal(codes[name], weight.codes) for name, weight in after.weights.items())
    assert output_error(after) < was


def test_eora_equals_qera_exact_on_the_same_inputs():
    one = compensated("eora", decay=False, sequential=False)
    other = compensated("qera")
    torch.testing.assert_close(logits(one), logits(other), rtol=0, atol=2e-3)
    apart = compensated("eora")
    assert (logits(apart) - logits(other)).abs().max() > 2e-3


def test_eora_sees_compensated_blocks_and_its_own_full_precision_weights():
    """The second block's inputs are made by the compensated first; in a block, o_proj's by original q, k, v."""
    lm, seen = quantized(), {}
    kept = low_rank.eigenspace

    def noted(G):
        seen[len(seen)] = G
        return kept(G)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_rank, "eigenspace", noted)
        compensated("eora", lm, decay=False)
    names, full = list(lm.weights), tiny.model("llama")

    def second_moment(model, name):
        layer = model.get_submodule(name)
        with torch.no_grad(), watching({name: layer}, len(IDS), ["second_moment"]) as statistics:
            model(IDS)
        return statistics[name].second_moment

    o_proj = "model.layers.0.self_attn.o_proj"
    torch.testing.assert_close(seen[names.index(o_proj)], second_moment(full, o_proj), rtol=1e-3, atol=1e-6)
    q_proj = "model.layers.1.self_attn.q_proj"
    moment = seen[names.index(q_proj)]
    torch.testing.assert_close(moment, second_moment(lm.model, q_proj), rtol=1e-3, atol=1e-6)
    assert (moment - second_moment(full, q_proj)).norm() > 1e-2 * moment.norm()


def test_aser_removes_the_outlier_channels_from_the_quantized_weight():
    lm = compensated("aser", rank=4, outlier_share=0.5)
    full = tiny.model("llama")
    with torch.no_grad(), watching({NAME: full.get_submodule(NAME)}, len(IDS)) as statistics:
        full(IDS)
    channels = aser.outliers(statistics[NAME].mean_abs.mean(0), lm.full[NAME], 2)
    score = statistics[NAME].mean_abs.mean(0) * lm.full[NAME].abs().mean(0)
    assert set(channels.tolist()) == set(score.argsort()[-2:].tolist())
    kept = lm.full[NAME].clone()
    kept[:, channels] = 0
    assert torch.equal(lm.weights[NAME].codes, grid.rtn(kept, grid.Grid(bits=3)).codes)
    assert not lm.model.get_submodule(NAME).weight[:, channels].any()
    alone = compensated("aser", rank=4, outlier_share=0.0)
    assert torch.equal(alone.weights[NAME].codes, quantized().weights[NAME].codes)
    torch.testing.assert_close(logits(alone), logits(compensated("qera", rank=4)), rtol=0, atol=2e-3)


@pytest.mark.parametrize("options", [{}, {"group": 32, "symmetric": True}, {"clip": "mse"}, {"scale_dtype": "float32"}])
def test_loftq_rounds_on_the_grid_of_the_step_before(options):
    lm = compensated("loftq", quantized(**options), iterations=3)
    config = rtn.Config(bits=3, **options)
    weight, A, B, left = loftq.alternate(lm.full[NAME], 2, 3, lambda rest: grid.rtn(rest, config))
    assert torch.equal(lm.weights[NAME].codes, weight.codes) and torch.equal(lm.weights[NAME].scales, weight.scales)
    stored = dict(zip("AB", low_rank.unpacked(lm.attachments[NAME][0].tensors)))
    torch.testing.assert_close(stored["B"] @ stored["A"], (B @ A).float(), rtol=0, atol=2e-3)
    number, was = list(lm.weights).index(NAME), (lm.full[NAME] - grid.rtn(lm.full[NAME], config).dequantize()).norm()
    recorded = [lm.facts[f"layers/loftq_error_{t}"][number] for t in (1, 2, 3)]
    assert recorded == pytest.approx([error / float(was) for error in left], rel=1e-4)
    assert "layers/loftq_error_4" not in lm.facts
    assert lm.facts["layers/error"][number] == pytest.approx(recorded[-1], rel=1e-2)


def test_int8_factors_are_stored_as_spear_stores_its_own():
    random = torch.Generator().manual_seed(0)
    A, B = (torch.rand(*shape, generator=random) - 0.5 for shape in ((3, 20), (10, 3)))
    A[:, 4], B[2] = 1.0, -1.0  # the same largest magnitude: nothing to balance
    ours, spears = low_rank.packed(A.double(), B.double(), 8), pack(Compensator({"A": A, "B": B}, 1.0))
    assert ours.keys() == spears.keys() and all(torch.equal(ours[key], spears[key]) for key in ours)


@pytest.mark.parametrize("factor_bits", [16, 8])
def test_storage_keeps_products_of_any_size(factor_bits):
    """Half precision holds 6e-8 to 65504: factors of 1e9 and 1e-9 are balanced before they are rounded."""
    random = torch.Generator().manual_seed(0)
    A, B = (torch.randn(*shape, generator=random, dtype=torch.float64) for shape in ((3, 20), (10, 3)))
    sizes = torch.tensor([1e9, 1.0, 1e-9], dtype=torch.float64)
    a, b = low_rank.unpacked(low_rank.packed(A * sizes[:, None], B / sizes, factor_bits))
    assert ((b @ a) - (B @ A)).norm() < 2e-2 * (B @ A).norm()
    a, b = low_rank.unpacked(low_rank.packed(0 * A, B, factor_bits))
    assert not (b @ a).any()


# --- ranks by budget --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor_bits", [16, 8])
@pytest.mark.parametrize("budget", [0.15, 0.2, 0.31])
def test_a_budget_is_spent_and_not_exceeded(factor_bits, budget):
    lm = quantized()
    allowed = int(budget * sum(weight.codes.numel() for weight in lm.weights.values()) / 2)
    for remainder in ("layers", "unspent"):
        config = low_rank.Config(budget=budget, factor_bits=factor_bits, remainder=remainder)
        result = low_rank.ranks(lm, config, "qera")
        spent = sum(low_rank.stored_bytes(r, tuple(lm.weights[n].shape), factor_bits) for n, r in result.items())
        low, high = min(result.values()), max(result.values())
        assert spent <= allowed and high - low <= (remainder == "layers")
        each = {name: low_rank.stored_bytes(1, tuple(w.shape), factor_bits) for name, w in lm.weights.items()}
        rest = [each[name] for name, r in result.items() if r == low]
        assert allowed - spent < (min(rest) if remainder == "layers" else sum(each.values()))
    lm = compensated("qera", lm, budget=budget, factor_bits=factor_bits)
    assert max(lm.facts["layers/rank"]) > min(lm.facts["layers/rank"])
    assert lm.extra_bits["qera"] <= 8 * allowed


# --- recipes through the compress path --------------------------------------------------------------------------------


@pytest.fixture
def built(tmp_path):
    """Run `compress` for a recipe on a saved tiny model, from the compressed model of its first step."""
    folder = tmp_path / "model"
    tiny.model("llama").save_pretrained(folder)
    (tmp_path / "tokens").mkdir()
    corpora.save_tokens(tmp_path / "tokens" / "data.safetensors", tiny.tokens(1, 4000)[0].numpy().astype("int32"), {})
    target = {"model": str(folder), "device": "cpu", "dtype": "float32", "hub": False, "threads": 1, "seed": 0}

    def run(text):
        result = {"calibration": tmp_path / "tokens"}
        for part in filter(None, (recipe.parse(text).before, text)):
            options = target | {"recipe": part, "calibration": {"sequences": 8, "length": 32, "seed": 0}}
            job = make("compress", "tiny", {"steps": recipe.parse(part).config}, options, {}, ())
            folder_of_part = tmp_path / recipe.parse(part).slug
            folder_of_part.mkdir(parents=True)
            compress.run(job, result, folder_of_part, {key: "" for key in observations.ORIGIN})
            result = result | {"start": folder_of_part}
        return compress.load(target, result["start"]), observations.load(result["start"] / observations.FILE)

    return run


@pytest.mark.parametrize("text", ["rtn-w4-pc + lqer(rank=2)", "gptq-w3-g32 + qera(rank=1)", "rtn-w3-pc + loftq-r2"])
def test_recipes_run_through_the_compress_path(built, text):
    lm, seen = built(text)
    parsed = recipe.parse(text)
    step, rank = parsed.steps[1].name, parsed.steps[1].config.rank
    assert parsed.before and seen.series[f"bits/{step}"].values == lm.extra_bits[step]
    assert set(seen.series["layers/rank"].values) == {rank} and 0 < seen.series["layers/error"].values.mean() < 1
    direct = LowBitModel(tiny.model("llama"))
    ids = corpora.calibration(tiny.tokens(1, 4000)[0].numpy().astype("int32"), 8, 32, 0)
    for each in parsed.steps:
        each.module.apply(direct, ids, each.config)
    assert torch.equal(logits(lm), logits(direct))


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", COMPENSATORS)
def test_bad_input_is_one_sentence(step):
    module = BASELINES[step]

    def refusal(kind, lm, **options) -> str:
        with pytest.raises(kind) as caught:
            module.apply(lm, IDS, module.Config(**options))
        assert type(caught.value) is kind and "\n" not in str(caught.value)
        return str(caught.value)

    bare = LowBitModel(tiny.model("llama"))
    assert f"put a quantizer before it: rtn-w4-pc + {step}" in refusal(UserError, bare)
    message = refusal(UserError, quantized(), rank=33)
    assert message.startswith("model.layers.0.self_attn.k_proj: ")
    assert "32x64 layer, whose rank is at most 32" in message
    lm = quantized()
    cost = sum(low_rank.stored_bytes(1, tuple(weight.shape), 16) for weight in lm.weights.values())
    message = refusal(NotMeasurable, lm, budget=0.01)
    assert f"rank 1 in 14 layers takes {cost} bytes, the budget is 368; raise {step}'s budget" in message
    assert not lm.attachments
    for options in ({"rank": 0}, {"budget": 1.5}):
        with pytest.raises(UserError, match=f"^{next(iter(options))} is "):
            module.Config(**options)


@pytest.mark.parametrize("step", [name for name in COMPENSATORS if BASELINES[name].CALIBRATED])
@pytest.mark.parametrize("calibration", [None, torch.empty(0, 8, dtype=torch.int64)])
def test_without_tokens_it_is_refused(step, calibration):
    with pytest.raises(UserError, match=f"{step} needs calibration tokens"):
        BASELINES[step].apply(quantized(), calibration, BASELINES[step].Config(rank=1))


@pytest.mark.parametrize("step, options", [("loftq", {"iterations": 2}), ("aser", {})])
def test_rounding_anew_behind_another_quantizer(step, options):
    with pytest.raises(
        NotMeasurable, match=rf"^model.layers.0.self_attn.\w+: {step} .*put rtn before it, or give "
    ) as caught:
        compensated(step, quantized("gptq"), **options)
    assert caught.value.status == "unsupported"


@pytest.mark.parametrize(
    "text, why",
    [
        ("rtn-w4-pc + lqer + qera", "a second compensator is refused"),
        ("rtn-w4-pc + spear + eora", "a second compensator is refused"),
        ("rtn-w3-pc + lqer + rtn-w4-pc", "rtn after lqer is refused; a compensator corrects what quantizers before"),
        ("rtn-w4-pc + spear + gptq-w3-pc", "gptq after spear is refused"),
        ("rtn-w4-pc + lqer(factor_bits=4)", "choose from: 16, 8|choose from: 8, 16"),
        ("rtn-w4-pc + loftq(iterations=0)", "iterations is 0"),
        ("rtn-w4-pc + aser(outlier_share=2)", "outlier_share is 2"),
        ("rtn-w4-pc + lqer(batch=0)", "batch is 0"),
    ],
)
def test_recipes_that_are_refused(text, why):
    with pytest.raises(UserError, match=why):
        recipe.parse(text)


def test_two_compensators_are_refused_by_the_model():
    lm = compensated("loftq")
    with pytest.raises(UserError, match="a second compensator is refused"):
        compensated("loftq", lm)


@pytest.mark.parametrize("step", ["loftq", "qera", "eora", "aser", "lqer"])
def test_what_is_not_finite_is_named(step):
    lm = quantized()
    lm.full[NAME] = lm.full[NAME] * float("inf")
    where = NAME if step == "loftq" else r"model\.layers\.1\.mlp\.\w+"
    with pytest.raises(UserError, match=f"^{where}: .*NaN or Inf"):
        compensated(step, lm)


def test_a_second_moment_without_a_cholesky_factor():
    singular = torch.ones(4, 4, dtype=torch.float64)
    with pytest.raises(UserError, match="not positive definite with damping 0"):
        low_rank.cholesky(singular, 0.0)
    assert low_rank.cholesky(singular, 1e-6).isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"factor_bits": 8}], ids=["fp16", "int8"])
@pytest.mark.parametrize("name", COMPENSATORS)
def test_a_compensator_on_a_gpu_continues_from_a_file(tmp_path, name, options):
    """What a file holds is read on the CPU; the full-precision weights and what is made of them are on the GPU."""
    tokens, module, made = tiny.tokens().cuda(), BASELINES[name], {}
    wanted = options | ({"effort": 0.01} if name == "uniform" else {"rank": 2})
    for start in ("quantized here", "read from a file"):
        lm = LowBitModel(tiny.model("llama").cuda())
        rtn.apply(lm, None, rtn.Config(bits=3))
        if start == "read from a file":
            lm.save(tmp_path / "model.safetensors", {})
            lm = LowBitModel(tiny.model("llama").cuda())
            lm.load(tmp_path / "model.safetensors", keep_full=True)
        module.apply(lm, tokens, module.Config(**wanted))
        made[start] = lm.model(tokens[:1]).logits
    assert torch.equal(*made.values()), name
