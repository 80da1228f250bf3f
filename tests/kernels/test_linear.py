"""The dispatcher: every way gives the same product, the crossover is data, and the way that is taken can be asked."""

import cuda_on_cpu
import pytest
import torch
from relative_error import relative_error
from w4a16 import NEEDS_WGMMA, inputs, random_weight, weight

from repro.bench import kernel_list
from repro.kernels import launches, linear, nvrtc, packing, w4a16_beside, w4a16_gemm, wna16_gemv


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
    assert relative_error(y.view(6, 48), want) < (1e-3 if dtype == torch.float16 else 5e-3)


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
        assert relative_error(y, w4a16_gemm.reference(other, packed)) < (1e-3 if dtype == torch.float16 else 4e-3)


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
        assert relative_error(y, w4a16_gemm.reference(x, called_with)) < 1e-3


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


@pytest.mark.gpu
@NEEDS_WGMMA
@pytest.mark.parametrize("tokens, rows, columns", [(353, 28672, 8192), (362, 14336, 4096), (370, 28672, 4096)])
def test_two_launches_beside_each_other_on_a_gpu(tokens, rows, columns):
    """Again and again in a graph, and what comes behind them finds both done."""
    x, packed = inputs(tokens, rows, columns, dtype=torch.bfloat16)
    x, packed = x.cuda(), packed.to("cuda")
    head = linear.tokens_of_head(x, rows, columns, packed.bits)
    assert head == 352
    launch = linear.prepare_two(x, head, *weight(packed)[2:])
    want = launch(x, packed.codes, packed.scale_zero)
    assert relative_error(want, w4a16_gemm.reference(x, packed)) < 4e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = launch(x, packed.codes, packed.scale_zero)
        copied = y.clone()
    for _ in range(50):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(copied, want)
        assert torch.equal(launch(x, packed.codes, packed.scale_zero).clone(), want)


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
