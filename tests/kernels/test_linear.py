"""The dispatcher: every way gives the same product, the crossover is data, and the way that is taken can be asked."""

from types import SimpleNamespace

import cuda_on_cpu
import pytest
import torch
from test_w4a16_gemm import error, random_weight, weight

from repro.bench import kernel_list
from repro.kernels import (
    dequantize,
    launches,
    linear,
    nvrtc,
    packing,
    w4a16_beside,
    w4a16_choice,
    w4a16_estimates,
    w4a16_gemm,
    w8a8,
    warm,
    wna16_gemv,
)
from repro.kernels.launch_config import configurations


def inputs(tokens, rows=48, columns=256, bits=4, dtype=torch.float16):
    packed = random_weight(rows, columns, bits, 64)
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1)).to(dtype), packed


@pytest.fixture
def recorded(monkeypatch):
    """Sets what the device's file says under "linear"."""
    table = {}
    monkeypatch.setattr(linear, "launch_config", lambda kernel, key, device: table.get(key))
    linear.known_path.cache_clear()
    yield table
    linear.known_path.cache_clear()


def test_a_choice_is_looked_up_once(recorded, monkeypatch):
    monkeypatch.setattr(linear, "path_of", lambda *arguments: calls.append(arguments) or "decode")
    calls = []
    for tokens in (1, 1, 2, 1):
        assert linear.known_path(tokens, 48, 256, 4, torch.device("cpu"), torch.float16) == "decode"
    assert [each[0] for each in calls] == [1, 2]


def test_path_follows_the_recorded_crossover(recorded):
    x, packed = inputs(40)
    recorded["default"] = {"decode": 4, "gemm": 16}
    ways = {m: linear.path(x[:m], packed) for m in (1, 4, 5, 16, 17)}
    assert ways == {1: "decode", 4: "decode", 5: "gemm", 16: "gemm", 17: "dequantize"}
    recorded["w4 48x256"] = {"decode": 0, "gemm": 32}
    assert linear.path(x[:1], packed) == linear.path(x[:32], packed) == "gemm"


def test_float16_may_have_a_crossover_of_its_own(recorded):
    """The decode kernel's products are in x's type, those of the tensor cores take as long in both."""
    recorded["default"] = {"decode": 1, "decode_fp16": 8, "gemm": 16}
    for dtype, last in ((torch.float16, 8), (torch.bfloat16, 1)):
        x, packed = inputs(9, dtype=dtype)
        ways = [linear.path(x[:m], packed) for m in range(1, 10)]
        assert ways == ["decode"] * last + ["gemm"] * (9 - last), dtype
    recorded["default"] = {"decode": 2, "gemm": 16}
    assert linear.path(inputs(2, dtype=torch.float16)[0], packed) == "decode"
    assert linear.path(inputs(3, dtype=torch.float16)[0], packed) == "gemm"


def test_recorded_crossover_never_exceeds_what_a_way_can_do(recorded):
    x, packed = inputs(17)
    recorded["default"] = {"decode": 1000, "gemm": 100000}
    assert linear.path(x[:16], packed) == "decode" and linear.path(x, packed) == "gemm"
    assert linear.path(torch.zeros(2049, 256), packed) == "dequantize"


def test_without_measurements_there_is_a_fallback(recorded):
    x, packed = inputs(1)
    assert linear.path(x, packed) == "decode"
    ways = [linear.path_of(m, packed.rows, packed.columns, packed.bits, "cpu", x.dtype) for m in (8, 9, 128, 129)]
    assert ways == ["decode", "gemm", "gemm", "dequantize"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    "way", [{"decode": 16, "gemm": 0}, {"decode": 0, "gemm": 2048}, {"decode": 0, "gemm": 0}], ids=str
)
def test_every_way_is_right(recorded, way, bits, dtype):
    recorded["default"] = way
    x, packed = inputs(6, bits=bits, dtype=dtype)
    y = linear.wna16(x.view(2, 3, 256), packed)
    assert y.shape == (2, 3, 48) and y.dtype == dtype
    want = x.float() @ packing.dequantize(packed).T
    assert error(y.view(6, 48), want) < (1e-3 if dtype == torch.float16 else 5e-3)


def test_one_token_none_and_misuse():
    x, packed = inputs(3)
    assert linear.w4a16(x[0], packed).shape == (48,)
    assert linear.w4a16(x[:0], packed).shape == (0, 48)
    with pytest.raises(ValueError, match=r"\[3, 128\] does not fit a weight of 48 x 256"):
        linear.path(x[:, :128], packed)


TWO_CASES = [  # tokens, of the first launch, rows, columns, bits, dtype
    (66, 64, 70, 256, 4, torch.bfloat16),
    (85, 64, 70, 256, 4, torch.float16),
    (110, 64, 130, 512, 8, torch.bfloat16),
]


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", [*TWO_CASES[:2], pytest.param(TWO_CASES[2], marks=pytest.mark.slow)], ids=str)
def test_two_launches_beside_each_other_on_the_cpu(case, monkeypatch, recorded):
    """Every token is written by one of them, by the decode kernel where few are left."""
    tokens, head, rows, columns, bits, dtype = case
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    monkeypatch.setattr(nvrtc, "encode", cuda_on_cpu.encode)
    monkeypatch.setattr(wna16_gemv, "unsupported", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(w4a16_beside, "tokens_of_head", lambda m, *_: head)
    recorded["default"] = {"decode": 8, "gemm": 512}
    x, packed = inputs(tokens, rows, columns, bits, dtype)
    launch = linear.prepare(x, *weight(packed))
    for other in (x, x.flip(0).contiguous()):  # in memory of its own
        y = launch(other, packed.codes, packed.scale_zero)
        assert error(y, w4a16_gemm.reference(other, packed)) < (1e-3 if dtype == torch.float16 else 4e-3)


def test_a_second_launch_has_the_configuration_that_is_given_for_it(monkeypatch):
    """As a sweep gives it; without one that which is chosen."""
    parts = {}

    class Kernel:
        def in_a_row(self, names, steps):
            return lambda x, codes, scale_zero, y: None

    def planned(x, count, bits, group, rows, columns, symmetric, config, part="", before=0):
        parts[part] = count, config, before
        return Kernel(), None

    monkeypatch.setattr(w4a16_gemm, "planned", planned)
    monkeypatch.setattr(linear, "configuration", lambda m, *_, beside=False: {"chosen": m})
    x, packed = inputs(300, 64, 256)
    for tail, want in (({"given": 1}, {"given": 1}), (None, {"chosen": 44})):
        assert linear.launch_two(x, packed, 256, tail).shape == (300, 64)
        assert parts == {"HEAD": (256, {"chosen": 256}, 0), "TAIL": (44, want, 256)}


@cuda_on_cpu.NEEDS_COMPILER
def test_a_dense_weight_is_that_of_its_call(monkeypatch, recorded):
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    recorded["default"] = {"decode": 0, "gemm": 0}
    x, packed = inputs(6)
    other = random_weight(48, 256, 4, 64, seed=5)
    launch = linear.prepare(x, *weight(packed))
    for called_with in (packed, other):
        y = launch(x, called_with.codes, called_with.scale_zero)
        assert error(y, w4a16_gemm.reference(x, called_with)) < 1e-3


def test_a_tensor_map_is_of_the_tokens_of_its_launch(monkeypatch):
    """Of all of x, or of what is behind a first launch's tokens."""
    encoded = []
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    monkeypatch.setattr(cuda_on_cpu, "_launcher", lambda *_: None)
    monkeypatch.setattr(nvrtc, "encode", lambda matrix, box: encoded.append((matrix.data_ptr(), *matrix.shape)))
    monkeypatch.setattr(launches.TensorMap, "__init__", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    x, packed = inputs(128)
    for before in (0, 96):
        form = (*weight(packed)[2:], {"MB": 2, "STAGES": 6, "RING": 4, "SPLIT": 1, "PAIR": 1})
        _, (*_, parameters) = w4a16_gemm.planned(x, 128 - before, *form, before=before)
        tokens, codes, scale_zero, y, count, *_ = parameters
        assert (tokens.name, codes, scale_zero, count) == ("x", "codes", "scale_zero", 128 - before)
        assert y == (launches.Behind("y", 96 * 48 * 2) if before else "y")
        tokens.encode(x)
    assert encoded == [(x.data_ptr(), 128, 256), (x.data_ptr() + 96 * 256 * 2, 32, 256)]


def test_a_second_launch_takes_the_tokens_that_would_be_a_wave_of_their_own(monkeypatch):
    """By the estimates for an H200: 353 tokens of a tile for 352, which 112 of its 132 SMs compute."""
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda *_: None)
    w4a16_beside.tokens_of_head.cache_clear()
    device = torch.device("cpu")
    counts = (1, 64, 256, 320, 321, 352, 353, 368, 512)
    heads = {m: w4a16_beside.tokens_of_head(m, 14336, 4096, 4, device) for m in counts}
    assert heads == dict.fromkeys((1, 64, 256, 320, 321, 352, 512), 0) | {353: 352, 368: 352}
    used = w4a16_beside.waves_of(w4a16_choice.cheapest(352, 14336, 4096), 352, 14336, 4096, 132)
    assert used.count == 1 and used.free == pytest.approx(20 / 132)
    assert w4a16_beside.longer_by_decoding(50.0, 0.5, 10.0) == 0 < w4a16_beside.longer_by_decoding(50.0, 0.1, 10.0)
    x = torch.zeros(353, 4096, dtype=torch.float16)
    assert linear.tokens_of_head(x, 14336, 4096, 4) == 352
    assert linear.tokens_of_head(torch.zeros(353, 4097).half(), 14336, 4097, 4) == 0  # rows that are not aligned
    w4a16_beside.tokens_of_head.cache_clear()


def test_the_first_of_two_launches_has_whole_tiles():
    """Of 64 tokens, or the largest there is; 1 to 64 tokens are left for the second."""
    heads = {m: w4a16_beside.heads_of(m) for m in (256, 257, 320, 321, 352, 353, 384, 416, 417)}
    assert heads == {
        256: [], 257: [256], 320: [256], 321: [320], 352: [320], 353: [320, 352], 384: [320, 352], 416: [352, 384],
        417: [384],
    }  # fmt: skip


def test_up_to_256_tokens_are_one_launch(monkeypatch):
    """Though two are estimated to be faster: 192 of 209 tokens of 3072 x 8192."""
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda *_: None)
    shapes = ((3072, 8192), (11008, 4096), (6144, 4096), (14336, 4096))
    for least, found in ((256, set()), (64, {192})):
        monkeypatch.setattr(w4a16_beside, "LEAST_HEAD", least)
        w4a16_beside.tokens_of_head.cache_clear()
        heads = {w4a16_beside.tokens_of_head(209, *shape, 4, torch.device("cpu")) for shape in shapes}
        assert heads - {0} == found
    w4a16_beside.tokens_of_head.cache_clear()


def test_two_launches_are_taken_where_they_were_faster_on_an_h200(monkeypatch):
    """Tokens of the first; 0 where one launch took as long or less: a second one by `mma`, or very small layers."""
    recorded = configurations("nvidia-h200")
    monkeypatch.setattr(w4a16_choice, "launch_config", lambda kernel, key, device: recorded[kernel].get(key))
    faster = {(8192, 8192, 384): 320, (6144, 4096, 560): 512, (14336, 4096, 544): 512}
    slower = [(6144, 4096, 288), (6144, 4096, 400), (3072, 8192, 288), (2048, 2048, 265), (2048, 2048, 288)]
    w4a16_beside.tokens_of_head.cache_clear()
    for (rows, columns, tokens), head in (faster | dict.fromkeys(slower, 0)).items():
        assert w4a16_beside.tokens_of_head(tokens, rows, columns, 4, torch.device("cpu")) == head
    assert w4a16_choice.serving_record(265, 2048, 8192, 4, "cuda")  # for one launch, though two have a lower estimate
    assert not w4a16_beside.tokens_of_head(265, 2048, 8192, 4, torch.device("cpu"))
    for name, value, wrong in (("SLOWER_MMA", w4a16_beside.SLOWER, slower[1]), ("GAIN", 0.0, (2048, 2048, 337))):
        with monkeypatch.context() as patch:
            patch.setattr(w4a16_beside, name, value)
            w4a16_beside.tokens_of_head.cache_clear()
            assert w4a16_beside.tokens_of_head(wrong[2], *wrong[:2], 4, torch.device("cpu"))
    w4a16_beside.tokens_of_head.cache_clear()


def in_turns(wave, free, together=1, clusters=128, tail=10.0, count=1):
    """Of a second launch whose thread blocks take `tail` / `count` beside the first."""
    room = w4a16_estimates.at_once(together, 132)
    waves = w4a16_beside.Waves(together, clusters, room, count, 0.0)
    alone = w4a16_estimates.START + tail / w4a16_beside.SLOWER
    return w4a16_beside.longer_in_turns(wave, free, alone, waves, 132, w4a16_beside.SLOWER)


def test_a_second_launch_takes_turns_on_the_free_sms_and_then_waves_of_its_own():
    """128 thread blocks, 10 us each, on 40 free SMs, 40 at a time; clusters of more than two have no room there."""
    free, own = 40 / 132, 10 / w4a16_beside.SLOWER
    assert in_turns(45.0, free) == 0  # 160 in four turns
    assert in_turns(35.0, free) == pytest.approx(5.0)  # 120 in three, the other 8 in one that has begun
    assert in_turns(25.0, free) == pytest.approx(own)  # 80 in two, 40 have begun, 8 have a wave of their own
    assert in_turns(9.0, 0.0) == pytest.approx(own)
    assert in_turns(25.0, free, clusters=256, tail=20.0, count=2) == pytest.approx(2 * own)  # 136 are left for two
    assert in_turns(45.0, free, together=2, clusters=64) == 0
    assert in_turns(45.0, free, together=4, clusters=22) == pytest.approx(own)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
@pytest.mark.parametrize("tokens, rows, columns", [(353, 28672, 8192), (362, 14336, 4096), (370, 28672, 4096)])
def test_two_launches_beside_each_other_on_a_gpu(tokens, rows, columns):
    """Again and again in a graph, and what comes behind them finds both done."""
    x, packed = inputs(tokens, rows, columns, dtype=torch.bfloat16)
    x, packed = x.cuda(), packed.to("cuda")
    head = linear.tokens_of_head(x, rows, columns, packed.bits)
    assert head == 352
    launch = linear.prepare_two(x, head, *weight(packed)[2:])
    want = launch(x, packed.codes, packed.scale_zero)
    assert error(want, w4a16_gemm.reference(x, packed)) < 4e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = launch(x, packed.codes, packed.scale_zero)
        copied = y.clone()
    for _ in range(50):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(copied, want)
        assert torch.equal(launch(x, packed.codes, packed.scale_zero).clone(), want)


@pytest.mark.parametrize("case", [c for c in dequantize.CASES if c["N"] < 1000], ids=str)
def test_dequantize_on_a_cpu(case):
    packed, dtype = dequantize.make_inputs(case), getattr(torch, case["dtype"])
    w = torch.ops.lowbit.dequantize(*weight(packed), dtype)
    assert torch.equal(w, dequantize.reference(packed).to(dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", dequantize.CASES, ids=str)
def test_dequantize_on_a_gpu(case):
    packed, dtype = dequantize.make_inputs(case, "cuda"), getattr(torch, case["dtype"])
    w = torch.ops.lowbit.dequantize(*weight(packed), dtype)
    assert torch.equal(w, dequantize.reference(packed).to(dtype))


def test_dequantize_is_traceable_and_refuses_other_types():
    packed = dequantize.make_inputs(dequantize.CASES[2])
    torch.library.opcheck(torch.ops.lowbit.dequantize.default, (*weight(packed), torch.float16))
    with pytest.raises(ValueError, match="float32 for a weight of 130 x 672"):
        torch.ops.lowbit.dequantize(*weight(packed), torch.float32)


NEED_8_0 = (
    *("wna16_gemv", "w4a16_gemm", "dequantize", "w8a8_gemv", "w8a8_gemm"),
    *("rms_norm", "rope_append", "attention", "silu_product", "sample", "argmax", "pple"),
    *("rms_norm_active", "silu_product_active", "quantize_2bit", "w2a2_gemv", "w2a2_ready", "dense_gemv"),
    *("active_inputs", "q4_k_gemv", "q4_k_naive_sparse", "zigzag_gemv", "zigzag_sparse", "zigzag_masked"),
)


@pytest.mark.parametrize("name", [*NEED_8_0, "quantize_activation", "read_floor"])
def test_a_device_that_a_kernel_does_not_support(name, monkeypatch):
    pytest.importorskip("triton")
    module = kernel_list.load(name)
    assert module.unsupported("cpu") == f"{name} needs a CUDA device."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    sentence = f"{name} needs compute capability 8.0, NVIDIA T4 has less."
    assert module.unsupported("cuda") == (sentence if name in NEED_8_0 else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "no compiler")
    compiled = ("wna16_gemv", "w4a16_gemm", "dequantize", "w8a8_gemv", "w2a2_gemv", "w2a2_ready", "q4_k_gemv")
    compiled += ("zigzag_gemv", "zigzag_sparse", "zigzag_masked")
    compiled += ("active_inputs", "rms_norm_active", "silu_product_active")
    assert module.unsupported("cuda") == ("no compiler" if name in compiled else None)


def test_warming_launches_every_form_once_at_every_number_of_tokens(monkeypatch):
    called = []
    real = linear.wna16
    monkeypatch.setattr(linear, "wna16", lambda x, packed: called.append((x.shape[0], packed.rows)) or real(x, packed))
    one, other = (
        inputs(1)[1],
        w4a16_gemm.random_weight({"N": 32, "K": 256, "bits": 4, "group": 64, "symmetric": False, "seed": 0}),
    )
    warm.warm([one, inputs(1)[1], other], (1, 20))
    assert called == [(1, one.rows), (20, one.rows), (1, 32), (20, 32)]
    called.clear()
    warm.warm(one)
    assert [count for count, _ in called] == list(warm.COUNTS)
    with pytest.raises(ValueError, match="wna16: x must be a contiguous float16 or bfloat16"):
        warm.warm(one, dtype=torch.float32)


@pytest.fixture
def launched(monkeypatch):
    """What `warm` launches: rows, columns and bits of a weight, and the number of tokens."""
    called, products = [], (linear.wna16, w8a8.w8a8)

    def packed_product(x, packed):
        called.append((packed.rows, packed.columns, packed.bits, packed.group, packed.symmetric, len(x)))
        return products[0](x, packed)

    def int8_product(x, codes, scales):
        called.append((*codes.shape, "w8a8", len(x)))
        return products[1](x, codes, scales)

    monkeypatch.setattr(linear, "wna16", packed_product)
    monkeypatch.setattr(w8a8, "w8a8", int8_product)
    return called


def test_bare_shapes_are_warmed_in_the_form_that_is_named(launched):
    warm.warm([(48, 256), (48, 256), (32, 128)], (1, 20), device="cpu")
    form = (4, 128, False)
    assert launched == [(48, 256, *form, 1), (48, 256, *form, 20), (32, 128, *form, 1), (32, 128, *form, 20)]
    launched.clear()
    for form in ("w8a8", "w8-pc", "w2-g64-sym"):
        warm.warm([(48, 256)], (3,), form=form, device="cpu")
    assert launched == [(48, 256, "w8a8", 3), (48, 256, 8, 0, False, 3), (48, 256, 2, 64, True, 3)]
    for form, wrong in (("w3-g128", "unknown form 'w3-g128'"), ("w4-g128", "128")):
        with pytest.raises(ValueError, match=wrong):
            warm.warm([(48, 200)], form=form, device="cpu")


def test_one_product_needs_no_list(launched):
    for one in ((48, 256), [(48, 256)], ((48, 256),)):
        warm.warm(one, (3,), device="cpu")
        assert launched == [(48, 256, 4, 128, False, 3)]
        launched.clear()
    pair = w8a8.quantize_weight(torch.randn(32, 64))
    for one in (pair, [pair], (pair,)):
        warm.warm(one, (3,))
        assert launched == [(32, 64, "w8a8", 3)]
        launched.clear()


def test_weights_in_lists_and_dicts_of_a_module_are_found(launched):
    model = torch.nn.Module()
    model.experts, model.by_name = [inputs(1)[1]], {"up": random_weight(48, 512, 4, 64, seed=1)}
    warm.warm(model, (3,))
    assert [(columns, count) for _, columns, *_, count in launched] == [(256, 3), (512, 3)]


@pytest.mark.parametrize("nothing", [torch.nn.Linear(8, 8), [], ()], ids=["dense", "list", "tuple"])
def test_nothing_to_warm_is_said(nothing):
    with pytest.raises(
        ValueError, match="^warm: no packed weight and no int8 codes with scales; give weights, or shapes"
    ):
        warm.warm(nothing)


def test_an_engine_and_its_decoder_are_models(launched):
    """Neither is a module: products are in the decoder's blocks, and its head is one."""
    product, head = torch.nn.Module(), torch.nn.Module()
    product.packed, head.packed = inputs(1)[1], random_weight(48, 512, 4, 64, seed=1)
    decoder = SimpleNamespace(blocks=(SimpleNamespace(qkv=product, eps=1e-5),), head=head)
    for model in (decoder, SimpleNamespace(model=decoder)):
        warm.warm(model, (3,))
        assert [(columns, count) for _, columns, *_, count in launched] == [(256, 3), (512, 3)]
        launched.clear()


@pytest.mark.parametrize("wrong", ["pocket-10m", None, 7, (48, 256, 3), [(48.0, 256)], (-48, 256), ["48x256"]])
def test_what_is_no_product_is_refused_by_name(wrong, launched):
    with pytest.raises(ValueError, match="^warm: .* is no (product; give a model|shape; give rows and columns)"):
        warm.warm(wrong, device="cpu")
    assert not launched


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_shape_is_not_warmed_on_a_gpu_that_is_not_there():
    with pytest.raises(ValueError, match=r"^warm: this machine has no CUDA device, where \(48, 256\) is to be warmed"):
        warm.warm((48, 256))


@pytest.mark.parametrize("counts", [(), (0,), (1, -1), "8", 8, (1.5,)])
def test_numbers_of_tokens_are_at_least_one(counts, launched):
    with pytest.raises(ValueError, match="^warm: counts of tokens are "):
        warm.warm((48, 256), counts, device="cpu")
    assert not launched


def test_a_model_is_warmed_with_packed_and_int8_weights(launched):
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Module(), torch.nn.Module()])
    model[1].packed = inputs(1)[1]
    codes, scales = w8a8.quantize_weight(torch.randn(32, 64))
    model[2].register_buffer("codes", codes)
    model[2].register_buffer("scales", scales)
    warm.warm(model, (2,))
    assert launched == [(48, 256, 4, 64, False, 2), (32, 64, "w8a8", 2)]
    launched.clear()
    warm.warm([(codes, scales), (codes.clone(), scales), model[1].packed], (2,))
    assert launched == [(32, 64, "w8a8", 2), (48, 256, 4, 64, False, 2)]
