"""W2A2 on a CPU: format, quantizer of activations and products, against Bit-by-Bit's quantizer and integers.

The Triton kernel of `quantize_2bit` runs in the interpreter in `test_kernels_triton.py`.
"""

import itertools
import shutil
import subprocess
import types
from itertools import product

import cuda_on_cpu
import pytest
import torch
from fake_device import Host
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from repro.bench import operators, timing, two_bit  # noqa: E402
from repro.bench.kernel_list import load  # noqa: E402
from repro.kernels import nvrtc, quantize_2bit, w2a2_gemv, w2a2_ready  # noqa: E402
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


def test_every_shape_has_a_configuration():
    """Of Table 7 plain and widened, one token and four: the kernels that were fastest, in configurations of SPACE."""
    chosen = {}
    for (rows, columns), m in itertools.product([*two_bit.TABLE7, (4096, 4512), (14336, 4512)], (1, 4)):
        for ready in (False, True):
            config = w2a2_gemv.heuristic(ready, m, rows, columns)
            assert config in w2a2_gemv.SPACE or config["warps"] == -(-columns // 512)
            chosen[ready, m, rows, columns] = config.get("kernel", "direct")
    inside = {shape: chosen[False, 1, *shape] for shape in two_bit.TABLE7}
    assert {shape for shape, kernel in inside.items() if kernel == "direct"} == {
        (3072, 3072), (8192, 3072), (4096, 4096), (14336, 4096), (8192, 28672), (28672, 8192),
    }  # fmt: skip
    assert {chosen[True, m, *shape] for shape, m in product(two_bit.TABLE7, (1, 4))} == {"direct"}
    assert {chosen[False, 4, *shape] for shape in two_bit.TABLE7} == {"streamed"}
    assert {chosen[ready, 1, 14336, 4512] for ready in (False, True)} == {"streamed"}
    assert w2a2_gemv.heuristic(False, 1, 8192, 8192) == {"kernel": "streamed", "warps": 8, "tiles": 4}
    assert w2a2_gemv.heuristic(False, 1, 8192, 8192, streams=False) == {"tiles": 2, "warps": 8, "blocks": 2}
    assert w2a2_gemv.heuristic(False, 4, 8192, 81920) == {"tiles": 1, "warps": 16, "blocks": 1}  # x does not fit
    assert w2a2_gemv.heuristic(True, 1, 4096, 14336) == {"tiles": 1, "warps": 14, "blocks": 2}


def test_the_heuristic_knows_the_device_s_sms(monkeypatch):
    monkeypatch.setattr(w2a2_gemv, "streamed_unsupported", lambda device: None)
    monkeypatch.setattr(w2a2_gemv, "processors", lambda device: 56)
    found = w2a2_gemv.configuration("w2a2_gemv", 1, 1024, 4096, "cpu")
    assert (
        found == w2a2_gemv.heuristic(False, 1, 1024, 4096, processors=56) != w2a2_gemv.heuristic(False, 1, 1024, 4096)
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name, case", [(name, case) for name in NAMES for case in load(name).CASES], ids=str)
def test_kernels_on_a_gpu(name, case):
    """Against the reference, twice with the same bits; every source where there are some."""
    module = load(name)
    inputs = module.make_inputs(case, "cuda")
    want = operators.tensors(module.reference(**inputs))
    for config in (None, *getattr(module, "CHECKED", ())):
        given = inputs if config is None else inputs | {"config": config}
        got, again = (operators.tensors(module.launch(**given)) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
        for a, b in zip(got, want, strict=True):
            error = (a.double() - b.double()).norm() / b.double().norm()
            assert error <= operators.tolerance(name, getattr(torch, case["dtype"])) + 1e-3


H200 = {"processors": 132, "most": 232448 - 1024}
STREAMED_CASES = [  # tokens, rows, columns, type, what else; warps, tiles; SMs, bytes of shared memory of a block
    (3, 19, 352, "float32", {"ready": True}, (4, 2), 2, 40_000),
    (1, 70, 1024, "bfloat16", {"ready": True}, (4, 4), 2, 20_000),  # one stage, used again
    (4, 37, 544, "float16", {"real": True}, (2, 1), 1, 8_000),  # two stages, used three times
    (2, 21, 640, "bfloat16", {"split": 30}, (4, 1), 2, 40_000),
    pytest.param(1, 3, 32, "float32", {"real": True}, (2, 2), 2, 40_000, marks=pytest.mark.slow),
    pytest.param(2, 50, 1056, "float32", {"split": 30, "real": True}, (8, 2), 3, 60_000, marks=pytest.mark.slow),
]


def run_source(inputs, config, monkeypatch, processors, shared):
    device = types.SimpleNamespace(multi_processor_count=processors, shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    monkeypatch.setattr(w2a2_gemv, "streamed_unsupported", lambda device: None)
    module = w2a2_gemv if "x" in inputs else w2a2_ready
    return module.launch(**inputs, config={"kernel": "streamed", "warps": config[0], "tiles": config[1]})


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("m, n, k, dtype, more, config, processors, shared", STREAMED_CASES)
def test_streamed_source_on_the_cpu(m, n, k, dtype, more, config, processors, shared, monkeypatch):
    """The .cu file itself: codes of x, planes and their signs, copies and mbarriers, ragged ends, both forms."""
    inputs = w2a2_gemv.make_inputs({"M": m, "N": n, "K": k, "dtype": dtype, "seed": m} | more)
    inputs["x"][:, 96:] = (2 * inputs["x"][:, 96:]).round() / 2  # of which many lie halfway between codes
    x = inputs["x"]
    if "index" in inputs:
        x = torch.cat([x, x.new_zeros(m, 1)], 1)[:, inputs["index"].long()]
    weight = {name: inputs[name] for name in ("codes", "scales", "zeros", "factors")}
    quantized = quantize_2bit.reference(x)
    want = w2a2_gemv.product(*quantized, **weight)
    y = run_source(inputs, config, monkeypatch, processors, shared)
    assert y.dtype == x.dtype
    assert error(y, want) < {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4e-3}[dtype]
    if "ready" in more:
        ready = dict(zip(("x_codes", "x_scales", "x_zeros"), quantized)) | weight
        assert error(run_source(ready, config, monkeypatch, processors, shared), want) < 1e-6


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def streamed_plan(tokens, rows, columns, x=torch.bfloat16, real=False, gather=False):
    config = w2a2_gemv.streamed(tokens, rows, columns // 32)
    return w2a2_gemv.plan(
        tokens, rows, columns // 32, real, x, gather, config["warps"], config["tiles"], **H200
    )  # fmt: skip


def test_every_shape_of_the_targets_has_a_plan_whose_copies_are_long():
    shapes = [*two_bit.TABLE7, *((n, two_bit.wider(k)) for n, k in two_bit.MLP)]
    for (rows, columns), tokens in itertools.product(shapes, (1, 4)):
        how = streamed_plan(tokens, rows, columns)
        stages, tiles, shared = (how.macros[name] for name in ("STAGES", "TILES", "SHARED"))
        assert how.grid >= 128 and shared <= H200["most"] and how.macros["WARPS"] % tiles == 0
        needed = -(-rows // (8 * tiles * how.grid))
        assert stages == needed or shared * (stages + 1) / stages > H200["most"]
        assert rows < 8192 or tiles * 2 * columns >= 12_000  # bytes of codes in a copy
    with pytest.raises(ValueError, match="4 tokens of 2560 groups do not fit 231424 bytes"):
        streamed_plan(4, 8192, 81920)


def test_what_a_device_lacks_for_the_streamed_kernel_is_said():
    inputs = w2a2_gemv.make_inputs(w2a2_gemv.CASES[0])
    with pytest.raises(ValueError, match=r"w2a2_gemv \(streamed\) needs a CUDA device"):
        w2a2_gemv.launch(**inputs, config=w2a2_gemv.STREAMED[0])


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("kernel", ["direct", "streamed"])
def test_tensors_that_begin_anywhere_are_copied(kernel, monkeypatch):
    inputs = w2a2_gemv.make_inputs(w2a2_gemv.CASES[0])
    want = w2a2_gemv.reference(**inputs)
    for name in ("x", "codes", "zeros"):
        tensor = inputs[name]
        inputs[name] = tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
        assert inputs[name].data_ptr() % 16
    if kernel == "streamed":
        y = run_source(inputs, (4, 2), monkeypatch, 2, 40_000)
    else:
        monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
        w2a2_gemv.source.cache_clear()
        y = w2a2_gemv.launch(**inputs, config={"tiles": 1, "warps": 2, "blocks": 1})
        w2a2_gemv.source.cache_clear()
    assert error(y, want.double()) < 1e-6


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize(
    "given",
    [
        {"tokens": 1, "rows": 14336, "columns": 4096},
        {"tokens": 4, "rows": 4096, "columns": 14336},
        {"tokens": 4, "rows": 4096, "columns": 4096, "x": torch.float32},
        {"tokens": 1, "rows": 28672, "columns": 8192, "x": None},
        {"tokens": 4, "rows": 4096, "columns": 4512, "gather": True, "real": True},
    ],
    ids=str,
)
def test_streamed_source_compiles_without_spilling(given, tmp_path):
    """Shared memory is as much as the launcher says, too: the source asserts it."""
    words = [f"-D{name}={value}" for name, value in streamed_plan(**given).macros.items()]
    words += ["-std=c++17", "-Xptxas", "-v", "-o", str(tmp_path / "cubin"), str(w2a2_gemv.STREAMED_SOURCE)]
    done = subprocess.run(["nvcc", "-cubin", "-arch=sm_90a", *words], capture_output=True, text=True)
    assert done.returncode == 0 and "0 bytes spill stores" in done.stderr, done.stderr
