"""W2A2 on a CPU: format, quantizer of activations and products, against Bit-by-Bit's quantizer and integers.

The Triton kernel of `quantize_2bit` runs in the interpreter in `test_kernels_triton.py`.
"""

import itertools
import math
import types

import cuda_on_cpu
import nvcc
import pytest
import torch
from fake_device import Host
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import every_case
from relative_error import relative_error

pytest.importorskip("triton")

from repro.bench import operator_tasks, timing, two_bit  # noqa: E402
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
    units = form.pack(codes.flatten(1).to(torch.uint8), scales[..., 0], z[..., 0])
    assert units.shape == (2, 1, 1184)
    assert int(form.unpack(units, 9, 11)[1].view(torch.uint8).min()) < 8
    torch.testing.assert_close(form.dequantize(units, factor.expand(9), 11), wanted, rtol=1e-6, atol=0)


@FAST
@given(st.integers(1, 20), st.integers(1, 35), st.booleans(), st.integers(0, 99))
def test_a_packed_weight_is_unpacked(rows, groups, real, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 4, (rows, 32 * groups), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(rows, groups, generator=generator) * 400 + 0.002).to(torch.float8_e4m3fn)
    zeros = torch.randint(0, 4, (rows, groups), generator=generator) - (0.5 if real else 0)
    unpacked = form.unpack(form.pack(codes, scales, zeros), rows, groups)
    codes_back, scales_back, zeros_back = unpacked
    assert torch.equal(codes_back, codes) and torch.equal(scales_back.float(), scales.float())
    assert torch.equal(zeros_back.float(), zeros.float())
    assert zeros_back.dtype == (torch.float16 if real else torch.uint8)


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
    units, zeros = form.pack(read.codes, read.scales, effective(read)), effective(read)
    stored = form.unpack(units, 5, 3)[2]
    assert stored.dtype == torch.float16 and torch.equal(stored.double(), zeros.double())
    factors = (read.factor * 2**read.shift).expand(5)
    torch.testing.assert_close(form.dequantize(units, factors, 3), read.dequantize(), rtol=1e-5, atol=1e-7)


def effective(weight):
    z = torch.full(weight.scales.shape, 1.5) if weight.zeros is None else weight.zeros.double()
    return (z - quantizer.offset(weight.shift, weight.delta)) / 2**weight.shift


@pytest.mark.parametrize(
    ("change", "message"),
    [({"zeros": torch.full((2, 1), 0.1)}, "a zero is 0.1; the kernel takes codes, or numbers that float16 holds"),
     ({"codes": torch.full((2, 32), 4, dtype=torch.uint8)}, "codes reach 4"),
     ({"codes": torch.zeros(2, 40, dtype=torch.uint8)}, "40 columns do not divide")],
)  # fmt: skip
def test_a_weight_that_does_not_fit_is_refused(change, message):
    whole = {"codes": torch.zeros(2, 32, dtype=torch.uint8), "zeros": torch.ones(2, 1)}
    with pytest.raises(ValueError, match=message):
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
    codes, scales, z = form.unpack(weight["units"], rows, groups)
    qw = codes.view(rows, groups, 32) - z.double()[..., None]
    whole = torch.einsum("mgk,ngk->mng", qx.double(), qw)
    s_w = scales.double() * weight["factors"][:, None]
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
    "w2a2_gemv": 3 * 1184 + 19 * 4 + 4 * (3 * 352 + 3 * 19),
    "w2a2_ready": 3 * 1184 + 19 * 4 + 3 * 11 * 16 + 4 * 3 * 19,
}


@pytest.mark.parametrize("name", NAMES)
def test_tasks_are_sound_and_count_what_is_read(name):
    task = operator_tasks.task(name, load(name).CASES[0], name, "cpu")
    (timed,) = timing.measure([task], Host(), timing.WARM, rounds=3)
    assert timed.nbytes == BYTES[name]


def test_a_wider_weight_of_split_channels_reads_its_inputs_by_their_index():
    """K = 4096 with a tenth of the channels split becomes 141 groups, an odd number."""
    case = {"M": 1, "N": 2, "K": 4512, "split": 416, "dtype": "float32", "seed": 0}
    inputs = w2a2_gemv.make_inputs(case)
    assert inputs["units"].shape == (1, 9, 1184) and inputs["x"].shape == (1, 4096)
    index = inputs["index"].long()
    assert len(index) == 4512 and int(index.max()) == 4096 and (index.bincount() <= 2).all()
    gathered = torch.cat([inputs["x"], torch.zeros(1, 1)], 1)[:, index]
    plain = {name: value for name, value in inputs.items() if name != "index"} | {"x": gathered}
    assert torch.equal(op("w2a2_gemv")(**inputs), op("w2a2_gemv")(**plain))


SMS, SHARED = 2, 40_000  # of the device that runs a source here, and bytes of its shared memory
SOURCE_CASES = [  # tokens, rows, columns, type of x, what else; warps, tiles, blocks, bulk; bytes of shared memory
    (3, 19, 352, "float32", {}, (2, 2, 1, True), SHARED),  # 11 groups, a warp without a unit
    (1, 70, 1024, "bfloat16", {}, (2, 1, 1, True), 6_000),  # one copy at a time
    (1, 70, 1024, "float16", {}, (1, 2, 2, False), SHARED),  # two units a warp, by loads
    (4, 61, 544, "float16", {"real": True}, (2, 1, 1, True), 8_300),  # two copies at a time, four in all
    (2, 21, 640, "bfloat16", {"split": 30}, (1, 3, 1, False), SHARED),
    (4, 19, 1120, "bfloat16", {"split": 100}, (1, 2, 1, True), SHARED),  # two tokens at a time
    (4, 19, 1632, "bfloat16", {}, (1, 1, 1, False), SHARED),  # x in shared memory
    (4, 43, 1120, "bfloat16", {}, (3, 2, 1, True, 2), SHARED),  # two blocks of a cluster, with two units and one
    (3, 43, 2592, "float32", {"split": 120}, (1, 1, 2, False, 3), SHARED),  # three of them, two clusters
    pytest.param(1, 3, 32, "float32", {"real": True}, (2, 2, 1, True), SHARED, marks=pytest.mark.slow),
    pytest.param(2, 50, 1056, "float32", {"split": 30, "real": True}, (3, 1, 1, False), SHARED, marks=pytest.mark.slow),
]


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs a module's launch on a CPU, as a device of so many SMs and so much shared memory a block."""

    def run(module, inputs, config, processors=SMS, shared=SHARED):
        facts = types.SimpleNamespace(multi_processor_count=processors, shared_memory_per_block_optin=shared)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
        monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
        monkeypatch.setattr(w2a2_gemv, "bulk_unsupported", lambda device: None)
        w2a2_gemv.prepared.cache_clear()
        return module.launch(**inputs, config=dict(zip(("warps", "tiles", "blocks", "bulk", "split"), config)))

    yield run
    w2a2_gemv.prepared.cache_clear()


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("m, n, k, dtype, more, config, shared", SOURCE_CASES)
def test_source_on_the_cpu(m, n, k, dtype, more, config, shared, on_cpu):
    """The .cu file itself: fragments, copies and mbarriers, rows and groups past the last ones, both forms."""
    inputs = w2a2_gemv.make_inputs({"M": m, "N": n, "K": k, "dtype": dtype, "seed": m} | more)
    inputs["x"][:, 96:] = (2 * inputs["x"][:, 96:]).round() / 2  # of which many lie halfway between codes
    x = inputs["x"]
    if "index" in inputs:
        x = torch.cat([x, x.new_zeros(m, 1)], 1)[:, inputs["index"].long()]
    weight = {name: inputs[name] for name in ("units", "factors")}
    quantized = quantize_2bit.reference(x)
    want = w2a2_gemv.product(*quantized, **weight)
    y = on_cpu(w2a2_gemv, inputs, config, shared=shared)
    assert y.dtype == x.dtype
    assert relative_error(y, want) < {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4e-3}[dtype]
    if "split" not in more and m > 1:
        ready = dict(zip(("x_codes", "x_scales", "x_zeros"), quantized)) | weight
        assert relative_error(on_cpu(w2a2_ready, ready, config, shared=shared), want) < 1e-6


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("config", [(2, 2, 1, True), (3, 1, 2, False)], ids=["bulk", "loads"])
def test_layers_with_columns_of_their_own_are_one_launch(config, on_cpu):
    """Three layers of 3, 1 and 2 tiles, whose columns are other ones, 35 groups in two units."""
    layers, x = (24, 8, 13), normal(2, 1000)
    parts = [form.make_weight({"N": n, "K": 1120, "seed": n}) for n in layers]
    indices = [(torch.arange(1120) * (1001 - n) // 1120 + (torch.arange(1120) >= 1110) * n).int() for n in layers]
    wanted = [w2a2_gemv.reference(x.double(), **part, index=index) for part, index in zip(parts, indices)]
    joined = {}
    for name in parts[0]:
        joined[name] = torch.cat([part[name] for part in parts])
    inputs = {"x": x, **joined, "index": torch.cat(indices), "layers": layers}
    assert relative_error(on_cpu(w2a2_gemv, inputs, config), torch.cat(wanted, 1)) < 1e-6


def test_blocks_are_shared_out_so_that_the_longest_is_short():
    assert w2a2_gemv.shared_out(132, [512, 128, 128]) == [88, 22, 22]
    assert w2a2_gemv.shared_out(5, [4, 1, 1]) == [3, 1, 1]
    assert w2a2_gemv.shared_out(2, [4, 1, 1]) == [1, 1, 1]


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_source_s_codes_are_the_nearest_also_at_halves(dtype, on_cpu):
    """Values on and beside the borders between codes, one group a border: 0 of 2,000 codes differ from division's."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator)
    x[:, 0], x[:, 1] = -torch.rand(64, generator=generator), torch.rand(64, generator=generator) * 3 + 0.1
    x = x.to(dtype)
    low, high = x[:, :2].amin(1).clamp(max=0), x[:, :2].amax(1).clamp(min=0)
    step = (high.float() - low.float()) / 3
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for column in range(2, 32):
        border = (torch.arange(64) % 6 - 2.5) * step
        beside = (border.to(dtype).view(bits) + column % 5 - 2).view(dtype)  # up to two numbers of the type away
        x[:, column] = beside.clamp(min=low, max=high)
    codes, scales, zeros = quantize_2bit.reference(x)
    one_hot = torch.eye(32, dtype=torch.uint8).repeat(1, 64)  # row n picks column n of every group
    ones = torch.ones(32, 64)
    weight = {"units": form.pack(one_hot, ones.to(torch.float8_e4m3fn), 0 * ones), "factors": torch.ones(32)}
    wanted = scales[..., None] * (form.codes_of(codes).view(64, 1, 32) - zeros[..., None])
    for first in range(0, 64, 4):  # each group alone in a token, the others being 0
        alone = torch.zeros(4, 2048, dtype=dtype)
        for token in range(4):
            at = first + token
            alone[token, 32 * at : 32 * at + 32] = x[at]
        y = on_cpu(w2a2_gemv, {"x": alone} | weight, (4, 2, 1, True))
        torch.testing.assert_close(y, wanted[first : first + 4, 0].to(dtype), rtol=1e-6, atol=0)


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("what", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_not_finite_gives_nan(dtype, what, on_cpu):
    """By the source and by the reference; the token beside it keeps its values."""
    inputs = w2a2_gemv.make_inputs({"M": 2, "N": 9, "K": 352, "dtype": dtype, "seed": 0})
    inputs["x"][1, 77] = what
    y, want = on_cpu(w2a2_gemv, inputs, (2, 1, 1, False)), w2a2_gemv.reference(**inputs)
    assert y[1].isnan().all() and want[1].isnan().all()
    assert relative_error(y[0], want[0].double()) < 4e-3


SHAPES = [*two_bit.TABLE7, *two_bit.STEP, *two_bit.SPLIT_LAYERS]


def test_every_shape_has_a_configuration():
    """Of Table 7, a step and widened layers, one token and four: one of SPACE, with bulk copies or without."""
    for (rows, columns), m, ready in itertools.product(SHAPES, (1, 4), (False, True)):
        for bulk in (False, True):
            config = w2a2_gemv.heuristic(ready, m, rows, columns, bulk)
            assert config in w2a2_gemv.SPACE and (bulk or not config["bulk"])


def test_the_heuristic_knows_the_device_s_sms(monkeypatch):
    monkeypatch.setattr(w2a2_gemv, "bulk_unsupported", lambda device: None)
    monkeypatch.setattr(w2a2_gemv, "processors", lambda device: 56)
    config = w2a2_gemv.configuration("w2a2_gemv", 1, 1024, 4096, "cpu")
    assert config == w2a2_gemv.heuristic(False, 1, 1024, 4096, processors=56)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_nan_is_a_nan_on_a_gpu(tokens, dtype):
    """Also through `quantize_2bit` and `w2a2_ready`."""
    inputs = w2a2_gemv.make_inputs({"M": tokens, "N": 64, "K": 1056, "dtype": "float32", "seed": 0}, "cuda")
    x = inputs.pop("x").to(dtype)
    x[-1, 100] = float("nan")
    ready = w2a2_ready.w2a2_ready(*quantize_2bit.quantize_2bit(x), **inputs)
    for y in (w2a2_gemv.w2a2_gemv(x, **inputs), ready):
        assert y[-1].isnan().all() and y[:-1].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name, case", every_case(NAMES), ids=str)
def test_kernels_on_a_gpu(name, case):
    """Against the reference, twice with the same bits; every source where there are some."""
    module = load(name)
    inputs = module.make_inputs(case, "cuda")
    want = operator_tasks.tensors(module.reference(**inputs))
    for config in (None, *getattr(module, "CHECKED", ())):
        arguments = inputs if config is None else inputs | {"config": config}
        outputs, again = (operator_tasks.tensors(module.launch(**arguments)) for _ in range(2))
        assert all(torch.equal(*pair) for pair in zip(outputs, again, strict=True))
        tolerance = operator_tasks.tolerance(name, getattr(torch, case["dtype"])) + 1e-3
        for output, reference in zip(outputs, want, strict=True):
            assert relative_error(output, reference) <= tolerance


def planned(tokens, rows, columns, x=torch.bfloat16, real=False, gather=False, **config):
    config = w2a2_gemv.heuristic(x is None, tokens, rows, columns) | config
    return w2a2_gemv.plan(tokens, (rows,), columns // 32, real, x, gather, processors=132, most=232448, **config)


def test_a_plan_covers_the_rows_and_fits_shared_memory():
    """Bulk copies of every shape: as many as a block needs, or as fit."""
    for (rows, columns), tokens in itertools.product(SHAPES, (1, 4)):
        how = planned(tokens, rows, columns, bulk=True)
        stages, tiles, longest, split = (how.macros[name] for name in ("STAGES", "TILES", "MOST", "SPLIT"))
        down, at_once = -(-rows // 8), {1: 132, 2: 66, 4: 30}[split] * how.macros["BLOCKS"]
        assert how.grid == split * min(down, at_once) and longest == -(-down // min(down, at_once))
        copy = tiles * math.ceil(math.ceil(columns / 512) / split) * 1184
        room = 232448 // how.macros["BLOCKS"] - 1024
        assert how.shared <= room
        assert stages == -(-longest // tiles) or how.shared + copy > room
    with pytest.raises(ValueError, match="4 tokens of 5120 groups do not fit 232448 bytes"):
        planned(4, 8192, 163840, bulk=True, split=1)
    with pytest.raises(ValueError, match="4 thread blocks of a cluster for 3 units of columns"):
        planned(4, 8192, 1536, split=4)


@pytest.mark.parametrize("tokens", (2, 4))
def test_a_warp_refills_stages_where_and_only_where_shared_memory_does_not_hold_all(tokens):
    bulk = [config for config in w2a2_gemv.SPACE if config["bulk"]]
    for (rows, columns), config in itertools.product(SHAPES, bulk):
        try:
            how = w2a2_gemv.plan(
                tokens, (rows,), columns // 32, False, torch.bfloat16, False, processors=132, most=232448, **config
            )
        except ValueError:  # it does not fit
            continue
        refills = how.macros["STAGES"] * how.macros["TILES"] < how.macros["MOST"]
        assert how.threads == 32 * (config["warps"] + refills)
        assert how.shared <= 232448 // config["blocks"] - 1024


def test_four_tokens_stay_in_registers_at_every_shape():
    for rows, columns in SHAPES:
        assert planned(4, rows, columns).macros["KEPT"] == 1


def test_what_a_device_lacks_for_bulk_copies_is_said():
    inputs = w2a2_gemv.make_inputs(w2a2_gemv.CASES[0])
    config = {"warps": 1, "tiles": 1, "blocks": 1, "bulk": True}
    with pytest.raises(ValueError, match=r"w2a2_gemv \(bulk copies\) needs a CUDA device"):
        w2a2_gemv.launch(**inputs, config=config)


@cuda_on_cpu.NEEDS_COMPILER
def test_an_x_that_begins_anywhere_is_copied(on_cpu):
    inputs = w2a2_gemv.make_inputs(w2a2_gemv.CASES[0])
    want, x = w2a2_gemv.reference(**inputs), inputs["x"]
    inputs["x"] = x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)
    assert inputs["x"].data_ptr() % 16
    assert relative_error(on_cpu(w2a2_gemv, inputs, (1, 2, 1, True)), want.double()) < 1e-6


@nvcc.NEEDS_NVCC
@pytest.mark.parametrize(
    "shape",
    [
        {"tokens": 1, "rows": 14336, "columns": 4096},
        {"tokens": 4, "rows": 4096, "columns": 14336},
        {"tokens": 4, "rows": 4096, "columns": 4096, "x": torch.float32},
        {"tokens": 1, "rows": 28672, "columns": 8192, "x": None},
        {"tokens": 4, "rows": 4096, "columns": 4512, "gather": True, "real": True},
        {"tokens": 1, "rows": 4096, "columns": 4096, "bulk": False, "tiles": 2},
    ],
    ids=str,
)
def test_the_source_compiles_without_spilling(shape):
    report = nvcc.ptxas_report(w2a2_gemv.SOURCE, planned(**shape).macros)
    assert "0 bytes spill stores" in report, report
