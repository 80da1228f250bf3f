"""The operators of a decode step on a CPU: against Transformers, torch and plain loops; the kernels are in
`test_kernels_triton.py`."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from fake_device import Host
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import every_case
from relative_error import relative_error
from transformers import LlamaConfig
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.models.llama import modeling_llama as llama

pytest.importorskip("triton")

from repro.bench import operator_tasks, timing  # noqa: E402
from repro.kernels import argmax, attention, noise, pple, rms_norm, rope_append, sample, silu_product  # noqa: E402
from repro.kernels.operators import Argument, checker  # noqa: E402

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
PAGES = {
    m.__name__.rpartition(".")[2]: m for m in (rms_norm, rope_append, attention, silu_product, sample, argmax, pple)
}


def small(name, **changes):
    module = PAGES[name]
    return module.make_inputs(module.CASES[0] | changes)


def typed(dtype):
    return str(dtype).removeprefix("torch.")


# --- Transformers' Llama, bit for bit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=typed)
def test_rms_norm_and_silu_product_round_like_llama(dtype):
    inputs = small("rms_norm", dtype=typed(dtype))
    norm = llama.LlamaRMSNorm(257, eps=1e-5).to(dtype)
    norm.weight.data = inputs["weight"]
    y, total = rms_norm.rms_norm(**inputs)
    assert torch.equal(total, inputs["x"] + inputs["residual"]) and torch.equal(y, norm(total))
    alone, same = rms_norm.rms_norm(inputs["x"], inputs["weight"], 1e-5)
    assert torch.equal(alone, norm(inputs["x"])) and torch.equal(same, inputs["x"])

    x = small("silu_product", dtype=typed(dtype))["x"]
    assert torch.equal(silu_product.silu_product(x), F.silu(x[:, :129]) * x[:, 129:])


@pytest.mark.parametrize("dtype", FLOATS, ids=typed)
def test_rope_append_rotates_like_llama_and_writes_to_its_slots(dtype):
    config = LlamaConfig(hidden_size=192, num_attention_heads=3, num_key_value_heads=1, head_dim=64)
    inputs = small("rope_append", T=7, padding=2, dtype=typed(dtype))
    angles = llama.LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(16)[None])
    inputs["cos"], inputs["sin"] = (table[0] for table in angles)
    rows, slots, positions = (inputs[n].tolist() for n in ("rows", "slots", "positions"))
    keys, values = inputs["keys"].clone(), inputs["values"].clone()
    q = rope_append.rope_append(**inputs)

    heads = inputs["qkv"].view(1, 7, 5, 64).transpose(1, 2)
    cos, sin = (table[None, positions].to(dtype) for table in (inputs["cos"], inputs["sin"]))
    want_q, want_k = llama.apply_rotary_pos_emb(heads[:, :3], heads[:, 3:4], cos, sin)
    assert torch.equal(q[:5], want_q[0].transpose(0, 1)[:5]) and not q[5:].any()
    for t in range(5):
        keys[rows[t], :, slots[t]], values[rows[t], :, slots[t]] = want_k[0, :, t], heads[0, 4:, t]
    assert torch.equal(inputs["keys"], keys) and torch.equal(inputs["values"], values)


# --- attention --------------------------------------------------------------------------------------------------------


def by_loops(q, keys, values, rows, lengths, scale, mask=None, start=None):
    """float64, one token, head and slot after the other."""
    y = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(len(q)):
        for head in range(q.shape[1]):
            weight, key_head = {}, head * keys.shape[1] // q.shape[1]
            for slot in range(int(lengths[t]) if rows[t] >= 0 else 0):
                branch = slot - int(start[t]) if mask is not None else -1
                if branch < 0 or (branch < mask.shape[1] and mask[t, branch]):
                    score = q[t, head].double() @ keys[rows[t], key_head, slot].double() * scale
                    weight[slot] = math.exp(score)
            for slot, w in weight.items():
                y[t, head] += w / sum(weight.values()) * values[rows[t], key_head, slot].double()
    return y


@pytest.mark.parametrize("heads, groups", [(1, 1), (3, 1), (8, 1), (4, 2)])
def test_attention_is_what_loops_compute(heads, groups):
    inputs = small("attention", Hq=heads, Hk=groups, B=3, context=5, n=2, tree=False)
    inputs["rows"][1], inputs["lengths"][2] = -1, 0
    y = attention.attention(**inputs)
    assert not y[1:3].any() and y[[0, 3, 4, 5]].any(2).all()
    torch.testing.assert_close(y.double(), by_loops(**inputs), rtol=1e-5, atol=1e-6)


def test_a_tree_sees_its_branches_and_nothing_unwritten():
    inputs = small("attention", context=4, n=5)
    inputs["mask"] = inputs["mask"][:, :4].contiguous()  # the last sibling is beyond the mask's columns
    want = by_loops(**inputs)
    hidden = torch.ones(2, 9, dtype=torch.bool)
    for t in range(10):
        row, first = t // 5, int(inputs["start"][t])
        hidden[row, :first] = False
        hidden[row, first : first + 4] &= ~inputs["mask"][t]
    for cache in (inputs["keys"], inputs["values"]):
        cache.masked_fill_(hidden[:, None, :, None], math.nan)
    torch.testing.assert_close(attention.attention(**inputs).double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tree", [False, True])
def test_tokens_of_a_row_need_not_be_neighbours(tree):
    inputs = small("attention", B=2, context=5, n=3, tree=tree)
    want, order = attention.attention(**inputs), torch.tensor([0, 3, 1, 4, 5, 2])
    mixed = {
        n: t[order].contiguous() if n in ("q", "rows", "lengths", "mask", "start") else t for n, t in inputs.items()
    }
    torch.testing.assert_close(attention.attention(**mixed), want[order], rtol=1e-5, atol=1e-6)


def test_padding_alone_writes_nothing_and_sees_nothing():
    inputs = small("rope_append", T=3, padding=3)
    before = inputs["keys"].clone(), inputs["values"].clone()
    assert not rope_append.rope_append(**inputs).any()
    assert torch.equal(inputs["keys"], before[0]) and torch.equal(inputs["values"], before[1])
    inputs = small("attention", B=2, n=1, tree=False)
    assert not attention.attention(**inputs | {"rows": torch.full((2,), -1, dtype=torch.int32)}).any()


def test_decoding_token_by_token_is_the_prefill():
    inputs = small("attention", context=6, n=6, tree=False, Hq=4)
    inputs["q"][:, 1] = 0
    together = attention.attention(**inputs)
    full = F.scaled_dot_product_attention(
        *(x.repeat_interleave(4, 1) for x in (inputs["q"].view(2, 6, 4, 64).transpose(1, 2)[:, :1],)),
        *(inputs[n][:, :, :12].repeat_interleave(4, 1) for n in ("keys", "values")),
        attn_mask=(torch.arange(12) < inputs["lengths"].view(2, 6, 1))[:, None],
    )
    torch.testing.assert_close(together.view(2, 6, 4, 64)[:, :, 0], full[:, 0], rtol=1e-5, atol=1e-6)
    for t in range(12):
        one = inputs | {n: inputs[n][t : t + 1] for n in ("q", "rows", "lengths")}
        torch.testing.assert_close(attention.attention(**one)[0], together[t], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "count, shape, heads, wide, tree, want",
    [
        (1, (1, 8, 8192, 128), 32, False, False, (4, 1, 32)),  # decode: up to three programs for each of 132 SMs
        (1, (1, 8, 300, 128), 24, False, False, (4, 1, 4)),  # a short cache: a program for 64 slots
        (64, (64, 8, 2048, 64), 64, False, False, (8, 1, 1)),  # a large batch fills the device
        (256, (1, 8, 2048, 128), 32, False, False, (4, 16, 4)),  # prefill: tiles of 64 rows
        (256, (1, 8, 2048, 128), 32, True, False, (4, 8, 2)),  # of 32 for float32
        (256, (1, 8, 2048, 128), 32, False, True, (4, 8, 2)),  # and for trees
        (9, (2, 1, 64, 64), 32, True, False, (32, 1, 1)),
    ],
)
def test_tiles_and_splits_follow_the_shape(count, shape, heads, wide, tree, want):
    assert attention.plan(count, shape, heads, wide, tree, 132) == want


# --- sample -----------------------------------------------------------------------------------------------------------


def draws(logits, count, temperature=1.0, top_k=0, top_p=1.0):
    """So many tokens of one row of logits."""
    return sample.sample(
        torch.tensor(logits).repeat(count, 1),
        torch.full((count,), 7),
        torch.arange(count),
        torch.full((count,), temperature),
        torch.full((count,), top_k, dtype=torch.int32),
        torch.full((count,), top_p),
    )


def test_philox_gives_the_published_words():
    """The known answers of the authors' library Random123, for philox4x32-10."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for key, counter, want in (
        (0, (0,) * 4, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, (ones,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (0x299F31D0A4093822, pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        words = noise.philox(torch.tensor(key), tuple(torch.tensor(c) for c in counter))
        assert tuple(int(word) for word in words) == want


def test_noise_is_a_function_of_seed_position_and_token():
    seeds, positions = torch.tensor([5, 5, 6, 5 + (1 << 32)]), torch.tensor([9, 9 + (1 << 32), 9, 9])
    words = noise.words(seeds, positions, 1002)
    assert len(words.unique()) > 4000  # of 4008: rows differ
    assert torch.equal(words[:1, :77], noise.words(seeds[:1], positions[:1], 77))
    four = noise.philox(seeds[:1], (torch.tensor([250]), *(torch.tensor([c]) for c in (0, 9, 0))))
    assert words[0, 1000:].tolist() == [int(word) for word in four[:2]]


def test_weights_and_exponentials_are_accurate_and_normal_numbers():
    x = -torch.rand(100_000, generator=torch.Generator().manual_seed(0)).double() * 79
    assert (noise.weight(x.float()).double() / x.float().double().exp() - 1).abs().max() < 2**-23
    assert noise.weight(torch.tensor([0.0, -1e9, -math.inf])).tolist() == [1, *[pytest.approx(math.exp(-80))] * 2]
    bits = torch.randint(1 << 32, (100_000,), generator=torch.Generator().manual_seed(0))
    bits[:4] = torch.tensor([0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
    n, far = (bits & 0x7FFFFFFF).double() + 0.5, bits >> 31 == 1
    want = torch.where(far, -torch.log(n / 2**32), -torch.log1p(-n / 2**32))
    assert (noise.exponential(bits).double() / want - 1).abs().max() < 2**-21


def test_tokens_are_drawn_with_their_probability():
    """Chi-square of 40,000 draws, at fixed seeds, against Transformers' processors."""
    logits, count = [1.0, -2.0, 0.5, 3.0, 2.5, -1.0, 2.5, 0.0], 40_000
    for temperature, top_k, top_p in ((1.0, 0, 1.0), (1.5, 5, 1.0), (2.0, 6, 0.9)):
        scores = TemperatureLogitsWarper(temperature)(None, torch.tensor([logits]))
        scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
        p = TopPLogitsWarper(top_p)(None, scores).softmax(1)[0].double()
        seen = torch.bincount(draws(logits, count, temperature, top_k, top_p), minlength=8)
        assert not seen[p == 0].any()
        square = ((seen - count * p) ** 2 / (count * p))[p > 0].sum()
        assert square < 24.3  # of 7 degrees of freedom, exceeded with probability 0.001


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(-8, 8), min_size=1, max_size=12),
    st.integers(-1, 14),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0, 2.0]),
)
def test_kept_tokens_are_those_of_the_definition(values, k, p):
    logits = torch.tensor([values]) / 2.0
    w = noise.weight(logits - logits.amax())
    kept = sample.kept(logits, w, torch.tensor([k], dtype=torch.int32), torch.tensor([p]))[0].tolist()
    mass = [int(x) for x in w[0].double() * 2**43]
    by_k = []
    for value in values:
        larger = sum(other > value for other in values)
        by_k.append(k <= 0 or larger < k)
    total = sum(m for m, stays in zip(mass, by_k) if stays)
    want = []
    for value, stays in zip(values, by_k):
        above = sum(m for other, m, in_k in zip(values, mass, by_k) if in_k and other > value)
        want.append(stays and (p >= 1 or value == max(values) or above < float(torch.tensor(p)) * total))
    assert kept == want
    if len(set(values)) == len(values) and 0 < p < 1 and k > 0:  # Transformers separates equal logits
        scores = TopPLogitsWarper(p)(None, TopKLogitsWarper(k)(None, logits))
        assert kept == scores.isfinite()[0].tolist()


def test_greedy_takes_the_first_of_the_largest_and_what_is_no_number_gives_none():
    assert draws([1.0, 3.0, 3.0, -9.0], 3, temperature=0.0).tolist() == [1, 1, 1]
    assert draws([1.0, 3.0, 3.0, -9.0], 3, temperature=-1.0, top_k=4).tolist() == [1, 1, 1]
    for temperature in (0.0, 1.0):
        for wrong in ([math.nan, 1.0], [1.0, math.inf], [-math.inf, -math.inf]):
            assert draws(wrong, 2, temperature, 1, 0.5).tolist() == [-1, -1]
        assert set(draws([-math.inf, 1.0, -math.inf], 50, temperature).tolist()) == {1}
    assert draws([1.0, 2.0], 1, temperature=1e-39).tolist() == [-1]  # 1 / temperature is infinite
    assert draws([0.0, -0.0, 1.0], 40, temperature=1e6, top_k=2).unique().tolist() == [0, 1, 2]  # equal: k keeps both


@pytest.mark.parametrize("name, kernels", [("sample", ("sample_kernel",)), ("rope_append", ("rope_append_kernel",))])
def test_kernels_that_round_like_torch_are_launched_without_fused_multiply_adds(name, kernels, monkeypatch):
    class Launched(dict):
        arg_names = ()

        def __missing__(self, grid):
            return lambda *arguments, **options: launches.append(options["enable_fp_fusion"])

    class Ignored(dict):
        arg_names = ()

        def __missing__(self, grid):
            return lambda *arguments, **options: None

    launches = []
    for kernel in [n for n in vars(PAGES[name]) if n.endswith("_kernel")]:
        monkeypatch.setattr(PAGES[name], kernel, Launched() if kernel in kernels else Ignored())
    PAGES[name].launch(**small(name))
    assert set(launches) == {False} and len(launches) >= len(kernels)


# --- argmax -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=typed)
def test_the_greedy_choice_is_the_first_of_the_largest_and_none_where_it_is_not_finite(dtype):
    inf = math.inf
    rows = [[1, 5, 5, 2], [5, 1, 2, 5], [-inf, -4, -3, -inf], [1, inf, 2, 3], [-inf] * 4, [math.nan, 1, 2, 3]]
    assert argmax.argmax(torch.tensor(rows, dtype=dtype)).tolist() == [1, 0, 2, -1, -1, -1]


# --- what all of them share -------------------------------------------------------------------------------------------

WRONG = [
    ("rms_norm", "weight", lambda x: x[:-1], r"weight must be a contiguous float32 tensor \[H = 257\] on cpu, not a"),
    ("rms_norm", "residual", lambda x: x.half(), "residual must be a contiguous float32 .* not a float16"),
    ("rms_norm", "x", lambda x: x.long(), "x must be a contiguous float16 or bfloat16 or float32"),
    ("rms_norm", "x", lambda x: x.T.contiguous().T, "x must be a contiguous .* not a strided float32"),
    ("rms_norm", "x", lambda x: x[:0], r"x of shape \[0, 257\] is empty"),
    ("silu_product", "x", lambda x: x[:, 1:].contiguous(), "x has an odd number of columns, 257"),
    ("rope_append", "positions", lambda x: x.long(), "positions must be a contiguous int32"),
    ("rope_append", "sin", lambda x: x[1:], "sin must be"),
    ("rope_append", "cos", lambda x: x.half(), "cos must be a contiguous float32"),
    ("rope_append", "values", lambda x: x[:1], "values must be"),
    ("rope_append", "qkv", lambda x: x[:, :128].contiguous(), "qkv of 128 columns must be"),
    ("attention", "start", lambda x: None, "give both or neither"),
    ("attention", "mask", lambda x: x.to(torch.uint8), "mask must be a contiguous bool"),
    ("attention", "lengths", lambda x: x[:-1], "lengths must be"),
    ("attention", "q", lambda x: x.repeat(1, 11, 1), "Hq = 33 a multiple of Hk = 1, at most 32 Hk"),
    ("argmax", "logits", lambda x: x.double(), "logits must be a contiguous float16"),
    ("pple", "logits", lambda x: x.double(), "logits must be a contiguous float16"),
    ("sample", "seeds", lambda x: x.int(), "seeds must be a contiguous int64"),
    ("sample", "top_p", lambda x: x.double(), "top_p must be a contiguous float32"),
    ("sample", "logits", lambda x: torch.zeros(3, (1 << 19) + 1), "logits of 524289 tokens"),
]


@pytest.mark.parametrize(
    "name, argument, change, message", WRONG, ids=[f"{w[0]}-{w[1]}-{i}" for i, w in enumerate(WRONG)]
)
def test_wrong_arguments_are_refused_by_name(name, argument, change, message):
    inputs = small(name)
    inputs[argument] = change(inputs[argument])
    with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
        getattr(PAGES[name], name)(**inputs)


def test_tensors_on_two_devices_are_refused():
    def signature(x, weight): ...

    declared = {"x": Argument((torch.float32,), "T H"), "weight": Argument("x", "H")}
    check = checker("it", inspect.signature(signature), declared, None)
    message = r"^it: weight must be .* \[H = 3\] on cpu, not a float32 tensor \[3\] on meta"
    with pytest.raises(ValueError, match=message):
        check((torch.ones(2, 3), torch.ones(3, device="meta")))


def test_head_sizes_that_no_kernel_has_are_refused():
    with pytest.raises(ValueError, match="D 64 or 128, not 32"):
        rope_append.rope_append(**small("rope_append", D=32))
    with pytest.raises(ValueError, match="D must be 64 or 128, not 96"):
        attention.attention(**small("attention", D=96))
    with pytest.raises(ValueError, match="65537 columns"):
        rms_norm.rms_norm(**small("rms_norm", T=1, H=65537))


@pytest.mark.parametrize("name", PAGES)
def test_operators_are_traceable(name):
    checks = ("test_schema", "test_faketensor")
    inputs = small(name)
    operator = getattr(torch.ops.lowbit, name).default
    torch.library.opcheck(operator, (), inputs, test_utils=checks)


BYTES = {  # of the first cases, by hand from the formulas of the files
    "rms_norm": 4 * (4 * 3 * 257 + 257),
    "rope_append": 2 * 4 * 3 * 5 * 64 + 8 * 3 * 64,
    "attention": 2 * 4 * 64 * (40 + 22) + 2 * 4 * 6 * 3 * 64,  # rows of 37 + 3 and 19 + 3 slots
    "silu_product": 4 * 3 * 129 * 3,
    "sample": 4 * 3 * 1001 + 8 * 3,
    "argmax": 4 * 3 * 1001 + 8 * 3,
    "pple": 4 * 3 * 1001 + (4 + 8) * 3,
}


@pytest.mark.parametrize("name", PAGES)
def test_tasks_of_ours_and_of_eager_peers_are_sound(name):
    """What `pytest kernels --benchmark-only` launches on a GPU, on the smallest case of a CPU."""
    case = PAGES[name].CASES[0] | ({"padding": 0} if name == "rope_append" else {})
    for provider in (name, *(peer for peer in operator_tasks.OPERATORS[name] if peer != "torch.compile")):
        task = operator_tasks.task(name, case, provider, "cpu")
        (result,) = timing.measure([task], Host(), timing.WARM, rounds=3)
        assert result.nbytes == BYTES[name] and result.facts["provider"] == provider


def test_a_peer_without_padding_says_so():
    with pytest.raises(ValueError, match="torch has no padding"):
        operator_tasks.task("rope_append", rope_append.CASES[0], "torch", "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name, case", every_case(PAGES), ids=str)
def test_kernels_on_a_gpu(name, case):
    """Against the reference on the CPU; twice, with the same bits, and sampled tokens are equal."""
    module = PAGES[name]
    for dtype in FLOATS if name != "attention" or case["context"] < 100 else [getattr(torch, case["dtype"])]:
        inputs = module.make_inputs(case | {"dtype": typed(dtype)})
        first, again = (results_on_gpu(module, inputs) for _ in range(2))
        assert all(torch.equal(*pair) for pair in zip(first, again))
        want = [*operator_tasks.tensors(module.reference(**inputs)), *written(inputs)]
        for result, reference in zip(first, want):
            assert relative_error(result.cpu(), reference) <= operator_tasks.tolerance(name, dtype)


def results_on_gpu(module, inputs):
    """What a launch returns and what it writes to."""
    copies = {}
    for name, value in inputs.items():
        copies[name] = value.cuda() if isinstance(value, torch.Tensor) else value
    return [*operator_tasks.tensors(module.launch(**copies)), *written(copies)]


def written(inputs):
    return [inputs[n] for n in ("keys", "values") if n in inputs]
