"""W2A2 on a CPU: format, quantizer of activations and products, against Bit-by-Bit's quantizer and integers.

The Triton kernels run in the interpreter in `test_kernels_triton.py`.
"""

import cuda_on_cpu
import pytest
import torch
from fake_device import Host
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from repro.bench import operators, timing  # noqa: E402
from repro.bench.kernel_list import load  # noqa: E402
from repro.kernels import nvrtc, quantize_2bit, w2a2_gemv  # noqa: E402
from repro.kernels import w2a2_format as form  # noqa: E402
from repro.models.groups import quantizer  # noqa: E402
from repro.models.groups import weight as group_weight  # noqa: E402

FAST = settings(max_examples=20, deadline=None, derandomize=True)
GRID = quantizer.GroupGrid(bits=2, group=32, include_zero=True)
NAMES = ("quantize_2bit", "w2a2_gemv", "w2a2_ready")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def op(name):
    return getattr(torch.ops.lowbit, name)


@FAST
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 99))
def test_planes_hold_any_codes(rows, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 4, (rows, 32 * groups), generator=generator, dtype=torch.uint8)
    words = form.planes(codes)
    assert words.shape == (rows, 2, groups) and torch.equal(form.codes_of(words), codes)
    assert (words[0, 1, 0] >> 31 & 1) == codes[0, 31] >> 1


def test_a_packed_weight_is_that_of_the_quantizer():
    """Scales in E4M3, the smallest of them below its normal numbers, and a number of groups that 4 does not divide."""
    weight = normal(9, 352)
    weight[:, :32] *= 1e-5
    groups = quantizer.split(weight, 32)
    grid = quantizer.GroupGrid(bits=2, group=32, include_zero=True, scale="e4m3")
    scales, factor, z = quantizer.fit(groups, grid)
    s = quantizer.restored(scales, factor)
    codes = quantizer.encode(groups, s, z, grid)
    wanted = quantizer.decode(codes, s, z).flatten(1)
    packed = form.pack(codes.flatten(1).to(torch.uint8), scales[..., 0], z[..., 0])
    assert int(packed[1].min()) < 8 and packed[2].shape == (9, 3)
    factors = factor.expand(9)
    torch.testing.assert_close(form.dequantize(*packed, factors), wanted, rtol=1e-6, atol=0)


@FAST
@given(st.sampled_from(["seq", "master", "beyond"]), st.integers(0, 99))
def test_a_packed_weight_has_any_zero_that_16_bits_hold(levels, seed):
    """SEQ's half steps, a centred 8-bit master read at 2 bits, and zeros that are no codes."""
    weight = normal(5, 96, seed=seed) + (3 if levels == "beyond" else 0)
    grid = quantizer.GroupGrid(
        bits=8 if levels == "master" else 2, levels="seq" if levels == "seq" else "asymmetric", scale="e4m3",
        include_zero=levels == "master",
    )  # fmt: skip
    stored = group_weight.pack(weight, grid)
    read = stored.at(2)
    packed, zeros = form.pack(read.codes, read.scales, effective(read)), effective(read)
    assert packed[2].dtype == torch.float16 and torch.equal(packed[2].double(), zeros.double())
    factors = (read.factor * 2**read.shift).expand(5)
    torch.testing.assert_close(form.dequantize(*packed, factors), read.dequantize(), rtol=1e-5, atol=1e-7)


def effective(weight):
    z = torch.full(weight.scales.shape, 1.5) if weight.zeros is None else weight.zeros.double()
    return (z - quantizer.offset(weight.shift, weight.delta)) / 2**weight.shift


@pytest.mark.parametrize(
    ("change", "said"),
    [({"zeros": torch.full((2, 1), 0.1)}, "a zero is 0.1; the kernel takes codes, or numbers that float16 holds"),
     ({"codes": torch.full((2, 32), 4, dtype=torch.uint8)}, "codes reach 4"),
     ({"codes": torch.zeros(2, 40, dtype=torch.uint8)}, "40 columns do not divide")],
)  # fmt: skip
def test_a_weight_that_does_not_fit_is_refused(change, said):
    whole = {"codes": torch.zeros(2, 32, dtype=torch.uint8), "zeros": torch.ones(2, 1)}
    with pytest.raises(ValueError, match=said):
        form.pack(**whole | change, scales=torch.ones(2, 1).to(torch.float8_e4m3fn))


@FAST
@given(st.integers(1, 4), st.integers(1, 9), st.floats(-3, 3), st.integers(0, 99))
def test_activations_are_those_of_bit_by_bit(tokens, groups, mean, seed):
    """Also groups that lie on one side of 0, and one of zeros."""
    x = normal(tokens, 32 * groups, seed=seed) + mean
    x[0, :32] = 0
    codes, scales, zeros = op("quantize_2bit")(x)
    q = form.codes_of(codes).view(tokens, groups, 32)
    decoded = scales[..., None] * (q.float() - zeros[..., None])
    wanted = quantizer.fake_quantize(x, GRID)
    torch.testing.assert_close(decoded.flatten(1), wanted, rtol=1e-6, atol=1e-7)
    assert ((zeros >= 0) & (zeros <= 3)).all() and scales[0, 0] == 1


@FAST
@given(st.integers(1, 4), st.integers(1, 20), st.integers(1, 9), st.integers(0, 99))
def test_products_are_integer_sums_of_groups(tokens, rows, groups, seed):
    case = {"M": tokens, "N": rows, "K": 32 * groups, "dtype": "float32", "seed": seed}
    weight, x = form.make_weight(case | {"real": bool(seed % 2)}), normal(tokens, 32 * groups, seed=seed)
    x_codes, x_scales, x_zeros = quantize_2bit.reference(x)
    qx = form.codes_of(x_codes).view(tokens, groups, 32).long() - x_zeros.long()[..., None]
    z = weight["zeros"].double()
    if not seed % 2:
        z = torch.stack([weight["zeros"] >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)[:, :groups]
    qw = form.codes_of(weight["codes"]).view(rows, groups, 32) - z.double()[..., None]
    whole = torch.einsum("mgk,ngk->mng", qx.double(), qw)
    s_w = weight["scales"].view(torch.float8_e4m3fn).double() * weight["factors"][:, None]
    wanted = (whole * x_scales.double()[:, None] * s_w[None]).sum(-1)
    for y in (op("w2a2_gemv")(x, **weight), op("w2a2_ready")(x_codes, x_scales, x_zeros, **weight)):
        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_operators_are_traceable(name):
    module = load(name)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(op(name).default, (), module.make_inputs(module.CASES[0]), test_utils=checks)


BYTES = {  # of the first cases, by hand: 11 groups
    "quantize_2bit": 4 * 3 * 352 + 3 * 11 * 16,
    "w2a2_gemv": 19 * (11 * 9 + 3 + 4) + 4 * (3 * 352 + 3 * 19),
    "w2a2_ready": 19 * (11 * 9 + 3 + 4) + 3 * 11 * 16 + 4 * 3 * 19,
}


@pytest.mark.parametrize("name", NAMES)
def test_tasks_are_sound_and_count_what_is_read(name):
    task = operators.task(name, load(name).CASES[0], name, "cpu")
    (timed,) = timing.measure([task], Host(), timing.WARM, rounds=3)
    assert timed.nbytes == BYTES[name]


def test_a_wider_weight_of_split_channels_reads_its_inputs_by_their_index():
    """K = 4096 with a tenth of the channels split becomes 141 groups, an odd number."""
    case = {"M": 1, "N": 2, "K": 4512, "split": 416, "dtype": "float32", "seed": 0}
    inputs = w2a2_gemv.make_inputs(case)
    assert inputs["zeros"].shape == (2, 36) and inputs["x"].shape == (1, 4096)
    index = inputs["index"].long()
    assert len(index) == 4512 and int(index.max()) == 4096 and (index.bincount() <= 2).all()
    gathered = torch.cat([inputs["x"], torch.zeros(1, 1)], 1)[:, index]
    plain = {name: value for name, value in inputs.items() if name != "index"} | {"x": gathered}
    assert torch.equal(op("w2a2_gemv")(**inputs), op("w2a2_gemv")(**plain))


SOURCE_CASES = [  # tokens, rows, columns, type of x; tiles, warps; changes of the case
    (1, 70, 1024, "float16", (1, 2), {}),
    (1, 33, 4096, "bfloat16", (2, 4), {}),  # two chunks a warp
    (3, 19, 352, "float32", (1, 2), {}),  # 11 groups: no vectors
    (2, 40, 640, "bfloat16", (2, 3), {"real": True}),  # a warp without columns, groups past the end
    (1, 7, 1056, "float16", (4, 3), {"real": True}),
    (2, 19, 1120, "bfloat16", (1, 3), {"split": 100}),
    (4, 16, 96, "float32", (1, 4), {"split": 30, "real": True}),
]


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", SOURCE_CASES, ids=str)
@pytest.mark.parametrize("name", ["w2a2_gemv", "w2a2_ready"])
def test_source_on_the_cpu(case, name, monkeypatch):
    """The .cu file itself: fragments, groups and rows past the last ones, every type."""
    m, n, k, dtype, (tiles, warps), changes = case
    if name == "w2a2_ready":
        changes = {key: value for key, value in changes.items() if key != "split"}
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    w2a2_gemv.source.cache_clear()
    module, case = load(name), {"M": m, "N": n, "K": k, "dtype": dtype, "seed": n} | changes
    inputs = module.make_inputs(case)
    got = module.launch(**inputs, config={"tiles": tiles, "warps": warps, "blocks": 1})
    w2a2_gemv.source.cache_clear()
    want = module.reference(**inputs)
    assert got.dtype == want.dtype
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error <= (1e-6 if want.dtype == torch.float32 else operators.tolerance(name, want.dtype) / 4)


@cuda_on_cpu.NEEDS_COMPILER
def test_the_source_s_codes_are_the_nearest_also_at_halves(monkeypatch):
    """Values on and beside the borders between codes, one group a border: 0 of 2,000 codes differ from division's."""
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    w2a2_gemv.source.cache_clear()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator)
    x[:, 0], x[:, 1] = -torch.rand(64, generator=generator), torch.rand(64, generator=generator) * 3 + 0.1
    low, high = x[:, :2].amin(1).clamp(max=0), x[:, :2].amax(1).clamp(min=0)
    step = (high - low) / 3
    for place in range(2, 32):
        border = (torch.arange(64) % 6 - 2.5) * step
        off = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])[place % 5] * 2.0**-23
        x[:, place] = (border * (1 + off)).clamp(min=low, max=high)
    codes, scales, zeros = quantize_2bit.reference(x)
    case = {"M": 1, "N": 32, "K": 2048, "dtype": "float32", "seed": 0}
    weight = form.make_weight(case)
    one_hot = torch.eye(32, dtype=torch.uint8).repeat(1, 64)  # row n picks column n of every group
    weight["codes"], weight["zeros"] = form.planes(one_hot), torch.zeros(32, 16, dtype=torch.uint8)
    weight["scales"] = torch.full((32, 64), 56, dtype=torch.uint8)  # 1
    weight["factors"] = torch.ones(32)
    for at in range(64):  # a group alone, the others being 0
        alone = torch.zeros(1, 2048)
        alone[0, 32 * at : 32 * at + 32] = x[at]
        got = w2a2_gemv.launch(alone, **weight, config={"tiles": 2, "warps": 4, "blocks": 1})[0]
        q = form.codes_of(codes)[at].float() - zeros[at].float()
        torch.testing.assert_close(got, q * scales[at], rtol=1e-6, atol=0)
    w2a2_gemv.source.cache_clear()


def test_triton_is_the_default_while_the_source_has_not_run_on_a_gpu(monkeypatch):
    assert w2a2_gemv.configuration("w2a2_gemv", 1, 96, 352, "cpu") == w2a2_gemv.DEFAULT
    monkeypatch.setattr(w2a2_gemv, "BY_SOURCE", True)
    assert w2a2_gemv.configuration("w2a2_gemv", 1, 96, 352, "cpu") == w2a2_gemv.heuristic(1, 96, 352)


def test_every_shape_has_a_configuration_of_the_source():
    """Warps are as many as there are chunks of 16 groups, or share them evenly; blocks fit an SM's threads."""
    for m in (1, 4):
        for rows, columns in ((1024, 3072), (4096, 14336), (28672, 8192), (8192, 28672), (14336, 4512), (7, 32)):
            config = w2a2_gemv.heuristic(m, rows, columns)
            chunks = -(-columns // 512)
            turns = -(-chunks // config["warps"])
            assert config["warps"] <= 16 and turns * config["warps"] - chunks < turns + config["warps"]
            assert config["blocks"] * config["warps"] * 32 <= 2048 and config["blocks"] >= 1
    assert w2a2_gemv.heuristic(1, 4096, 14336) == {"tiles": 1, "warps": 14, "blocks": 2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("by_source", [False, True])
@pytest.mark.parametrize("name, case", [(name, case) for name in NAMES for case in load(name).CASES], ids=str)
def test_kernels_on_a_gpu(name, case, by_source, monkeypatch):
    """Against the reference, twice with the same bits."""
    monkeypatch.setattr(w2a2_gemv, "BY_SOURCE", by_source)
    module = load(name)
    inputs = module.make_inputs(case, "cuda")
    want, got = (operators.tensors(make(**inputs)) for make in (module.reference, module.launch))
    again = operators.tensors(module.launch(**inputs))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    for a, b in zip(got, want, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error <= operators.tolerance(name, getattr(torch, case["dtype"])) + 1e-3
