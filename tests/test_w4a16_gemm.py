"""W4A16 GEMM: the kernel's index arithmetic lane by lane, the operator on a CPU, misuse, and that it compiles."""

import shutil
import subprocess

import pytest
import torch

from repro.kernels import packing, w4a16_gemm
from repro.kernels.launch_config import configurations

BITS_GROUPS = [(bits, group) for bits in (2, 4, 8) for group in (0, 32, 128)]


def random_weight(rows, columns, bits, group, symmetric=False, seed=0):
    case = {"N": rows, "K": columns, "bits": bits, "group": group, "symmetric": symmetric, "seed": seed}
    return w4a16_gemm.random_weight(case)


def weight(packed):
    names = ("codes", "scale_zero", "bits", "group", "rows", "columns", "symmetric")
    return [getattr(packed, name) for name in names]


def error(got, want):
    return float((got.float() - want.float()).norm() / want.float().norm())


def emulate(x, packed, kw, ks, wk):
    """What the warps of one program do for the first row tile and eight tokens, register by register: [8, 16].

    Names and formulas are those of w4a16_gemm.cu: the staged copy with its swizzle, the lanes' 16-byte reads, the
    masked fields as subnormals times their lift, the fragments of mma.m16n8k16, the fold per group of columns.
    """
    bits, group, columns = packed.bits, packed.group, packed.columns
    kb, per_word, fold = 256 // bits, 16 // bits, group if group and group < kw else kw
    lane = torch.arange(32)
    g, t = lane // 4, lane % 4
    words = packed.codes[0].long() & 0xFFFFFFFF  # [blocks, 32, 4]
    scale_zero = packed.scale_zero[0].double()
    total = torch.zeros(8, 16, dtype=torch.float64)
    for slab in range(-(-columns // ks)):
        shared = torch.zeros(8 * ks, dtype=torch.float64)
        for token in range(8):
            for chunk in range(ks // 8):
                column = slab * ks + chunk * 8
                if column < columns:
                    at = token * ks + (chunk ^ (token & 1) * 4) * 8
                    shared[at : at + 8] = x[token, column : column + 8].double()
        for my_column in range(0, wk * kw, kw):
            start = g * ks * 2 + my_column * 2 + ((t * 16) ^ (g & 1) * 64)
            for column in range(0, kw, 32):
                d, step, f = column // kb, column % kb // 16, column // fold
                block = (slab * ks + my_column) // kb + d
                if block >= words.shape[0]:
                    continue
                where = min((slab * ks + my_column + f * fold) // group if group else 0, packed.groups - 1)
                b = ((start ^ (column % 64 * 2)) + column // 64 * 128) // 2
                b = shared[b[:, None] + torch.arange(8)]  # [32, 8]: b0 b1 of two steps
                for half in range(2):
                    part = torch.zeros(8, 16, dtype=torch.float64)
                    left, right = (torch.zeros(16, 16, dtype=torch.float64), torch.zeros(16, 8, dtype=torch.float64))
                    for i in range(4):  # a0 .. a3
                        r = 4 * (step + half) + i
                        shift = bits * (r % per_word)
                        fine = shift & 7
                        field = (words[block, :, r // per_word] >> (shift - fine)) & (
                            ((1 << bits) - 1) << fine
                        ) * 0x10001
                        row = g + 8 * (i % 2)
                        zero = float(1 << (bits - 1)) if packed.symmetric else scale_zero[where, g, i % 2, 1]
                        for e, code in enumerate((field & 0xFFFF, field >> 16)):
                            value = code.double() * 2.0**-24 * 2.0 ** (15 - fine) - zero * 2.0**-9
                            left[row, 2 * t + e + 8 * (i // 2)] = value
                    for e in range(4):
                        right[2 * t + e % 2 + 8 * (e // 2), g] = b[:, 4 * half + e]
                    part = (left @ right).T
                    scales = scale_zero[where] if packed.symmetric else scale_zero[where, :, :, 0]  # [g, row >= 8]
                    total += part * scales.T.reshape(16) * 512
    return total


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits, group", BITS_GROUPS)
def test_lanes(bits, group, symmetric):
    """The lane arithmetic of the kernel gives the product: staged copy, swizzle, fragments, lifts, folds."""
    columns = 384 if group else 296
    packed = random_weight(13, columns, bits, group, symmetric)
    x = torch.randn(8, columns, generator=torch.Generator().manual_seed(1))
    want = x.double() @ packing.dequantize(packed).double().T
    for kw, wk in ((128, 1), (128, 2)):
        assert error(emulate(x, packed, kw, kw * wk, wk)[:, :13], want) < 1e-6


SMALL = [case for case in w4a16_gemm.CASES if case["N"] < 1000]
BOUND = {"float16": 1e-3, "bfloat16": 4e-3}


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_operator_on_a_cpu(case):
    x, packed = w4a16_gemm.make_inputs(case)
    y = torch.ops.lowbit.w4a16_gemm(x, *weight(packed))
    assert y.shape == (case["M"], case["N"]) and y.dtype == x.dtype
    assert error(y, w4a16_gemm.reference(x, packed)) < BOUND[case["dtype"]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", w4a16_gemm.CASES, ids=str)
def test_operator_on_a_gpu(case):
    x, packed = w4a16_gemm.make_inputs(case, "cuda")
    y = torch.ops.lowbit.w4a16_gemm(x, *weight(packed))
    assert error(y, w4a16_gemm.reference(x, packed)) < BOUND[case["dtype"]]
    assert torch.equal(y, torch.ops.lowbit.w4a16_gemm(x, *weight(packed)))


def test_operator_is_traceable():
    x, packed = w4a16_gemm.make_inputs(SMALL[0])
    torch.library.opcheck(torch.ops.lowbit.w4a16_gemm.default, (x, *weight(packed)))


def test_misuse():
    packed = random_weight(32, 128, 4, 32)
    for x, words in (
        (torch.zeros(4, 64), "float32"),
        (torch.zeros(4, 64, dtype=torch.float16), r"\[4, 64\] .* 32 x 128"),
        (torch.zeros(128, dtype=torch.float16), r"\[128\] .* 32 x 128"),
    ):
        with pytest.raises(ValueError, match=words):
            torch.ops.lowbit.w4a16_gemm(x, *weight(packed))
    with pytest.raises(ValueError, match="codes is"):
        torch.ops.lowbit.w4a16_gemm(torch.zeros(4, 64, dtype=torch.float16), *weight(packed)[:5], 64, False)


def test_recorded_number_of_tokens(monkeypatch):
    """The configuration of the next recorded number of tokens, above the last one that of the last."""
    monkeypatch.setattr(w4a16_gemm, "launch_config", lambda kernel, key, device: key)
    found = {m: w4a16_gemm.configuration(m, 8, 64, "cpu") for m in (1, 16, 17, 65, 256, 2048)}
    assert list(found.values()) == [f"8x64 m{t}" for t in (16, 16, 32, 128, 256, 256)]


@pytest.mark.parametrize("m, n, k", [(1, 512, 2048), (16, 4096, 4096), (64, 28672, 8192), (2048, 127, 96)])
def test_every_configuration_divides(m, n, k):
    recorded = configurations("nvidia-h200").get("w4a16_gemm", {}).values()
    for config in [w4a16_gemm.heuristic(m, n, k), *w4a16_gemm.SPACE, *recorded]:
        assert set(config) == set(w4a16_gemm.CONSTANTS)
        for bits in packing.BITS:
            fitted = w4a16_gemm.fitted(config, bits)
            columns = fitted["KS"] // fitted["WK"]
            assert columns % packing.block_columns(bits) == 0 and columns % 64 == 0
            assert columns in (64, 128) or columns % 128 == 0  # of one group, or whole groups
            assert 32 * fitted["WR"] % (columns // 8) == 0  # the warps that share a stage copy whole rows of it
            assert w4a16_gemm.shared_bytes(fitted) <= 232448 and 1 <= config["SPLIT"] <= 8


def defines(**constants):
    return [f"-D{name}={value}" for name, value in constants.items()]


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("bits, group, symmetric, bf16", [(4, 128, 0, 0), (4, 0, 1, 1), (2, 64, 0, 1), (8, 32, 1, 0)])
def test_compiles(tmp_path, arch, bits, group, symmetric, bf16):
    """Ahead of time for three architectures, both kernels of the source, without spilling at the tile for 16 tokens."""
    if not (nvcc := shutil.which("nvcc")):
        pytest.skip("nvcc is not installed")
    tile = w4a16_gemm.fitted(w4a16_gemm.heuristic(16, 4096, 4096), bits) | {"SPLIT": 1 if arch == 80 else 2}
    for constants in ({}, tile):
        words = defines(BITS=bits, GROUP=group, SYMMETRIC=symmetric, BF16=bf16, **constants)
        source = w4a16_gemm.SOURCE
        command = [nvcc, "-cubin", f"-arch=sm_{arch}", "-std=c++17", "-Xptxas", "-v", *words]
        done = subprocess.run([*command, "-o", str(tmp_path / "k"), str(source)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "0 bytes spill stores" in done.stderr
