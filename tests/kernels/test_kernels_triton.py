"""Triton kernels without a GPU: each runs in Triton's interpreter against its reference, and compiles for three GPUs.

The interpreter is chosen when triton is imported, so it runs in a process of its own: this file as a script, which
prints the error of every case. bf16 is silently wrong there, but where it is only read; those cases belong to the GPU.
"""

import json
import os
import subprocess
import sys
from functools import cache
from itertools import product

import pytest
import torch
from relative_error import relative_error

from repro.core.files import ROOT

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from repro.kernels import noise  # noqa: E402

GEMM = {"m": 128, "n": 128, "k": 128, "split": 1, "swap": False, "warps": 8, "stages": 4}
NO_NUMBERS = float("nan"), float("inf"), -float("inf")
NARROW = {"m": 16, "n": 64, "k": 256, "split": 4, "swap": True, "warps": 4, "stages": 4}


def interpret_read_floor(case: dict) -> float:
    from repro.kernels import read_floor

    x, out = read_floor.make_inputs(case)
    errors = []
    for block, warps in ((512, 1), (1024, 4)):
        read_floor.launch(x, out.zero_(), {"block": block, "warps": warps})
        errors.append(float(read_floor.reference(out) != read_floor.reference(x)))
    return max(errors)


def interpret_quantize_activation(case: dict) -> float:
    from repro.kernels import quantize_activation as kernel

    x = kernel.make_inputs(case)
    x[-1] = 0
    q, s = kernel.launch(x)
    want_q, want_s = kernel.reference(x)
    assert not q[-1].any() and s[-1] == 0
    for bad in NO_NUMBERS:
        broken = x.clone()
        broken[0, -1] = bad
        _, scales = kernel.launch(broken)
        assert scales[0].isnan() and torch.equal(scales[1:], s[1:]), bad
    return max(relative_error(q, want_q), relative_error(s, want_s))


def interpret_w8a8_gemm(case: dict) -> float:
    from repro.kernels import w8a8_gemm as kernel

    inputs = kernel.make_inputs(case)
    outputs = [kernel.launch(*inputs, config, torch.float16) for config in (GEMM, GEMM | {"split": 2}, NARROW)]
    assert torch.equal(outputs[0], outputs[1])
    return max(relative_error(y, kernel.reference(*inputs)) for y in outputs)


def interpret_joined(case: dict) -> float:
    """Quantizer and product with one piece of memory between them, against operators of their own: equal."""
    from repro.kernels import quantize_activation, w8a8, w8a8_gemm

    x, (_, _, w_q, s_w) = quantize_activation.make_inputs(case), w8a8_gemm.make_inputs(case)
    for config in (NARROW | {"split": 1}, NARROW | {"k": 128, "split": 2}, GEMM | {"m": 16, "n": 16, "split": 2}):
        want = w8a8_gemm.launch(*quantize_activation.launch(x), w_q, s_w, config, x.dtype)
        for joined in (True, False):
            launch = w8a8_gemm.behind_quantizer(x, w_q, config, joined)
            assert torch.equal(launch(x, w_q, s_w), want)
            broken = x.clone()
            broken[1, -1] = NO_NUMBERS[0]
            y = launch(broken, w_q, s_w)
            assert y[1].isnan().all() and torch.equal(y[2:], want[2:])
    return relative_error(want, w8a8.on_cpu(x, w_q, s_w))


def interpret_w8a8_gemv(case: dict) -> float:
    from repro.kernels import w8a8_gemv as kernel

    inputs = kernel.make_inputs(case)
    configs = ({"rows": 4, "chunk": 512, "warps": 4}, {"rows": 8, "chunk": 64, "warps": 4})
    x, *weight = inputs
    for bad, config in product(NO_NUMBERS, configs):
        broken = x.clone()
        broken[0, case["K"] // 2] = bad
        assert kernel.launch(broken, *weight, config).isnan().all(), bad
    return max(relative_error(kernel.launch(*inputs, config), kernel.reference(*inputs)) for config in configs)


def interpret_operator(case: dict) -> float:
    """In units of the dtype's rounding (2^-10 for fp16): the worst of all outputs and of all tensors written to."""
    from repro.bench import kernel_list
    from repro.bench.task import tensors

    kernel = kernel_list.load(case["name"])
    inputs = kernel.make_inputs(case)
    copies = {}
    for name, value in inputs.items():
        copies[name] = value.clone() if torch.is_tensor(value) else value
    outputs, references = tensors(kernel.launch(**inputs)), tensors(kernel.reference(**copies))
    pairs = [*zip(outputs, references), *zip(tensors(inputs), tensors(copies))]
    rounding = torch.finfo(getattr(torch, case["dtype"])).eps
    return max(relative_error(output, want) / rounding for output, want in pairs if want.any())


def interpret_attention(case: dict) -> float:
    """Every tiling of a prefill, a tree, or decode with padding, where slots that nobody may read hold NaN.

    In units of what is allowed: a rounding of the dtype and 5e-7.
    """
    from repro.kernels import attention as kernel

    inputs = kernel.make_inputs(case)
    if not case["tree"]:
        inputs["rows"][1], inputs["lengths"][2] = -1, 0
        inputs["rows"] = inputs["rows"][torch.randperm(len(inputs["rows"]), generator=torch.Generator().manual_seed(0))]
    y, errors = kernel.reference(**inputs), []
    for row in range(case["B"]):
        used = int(inputs["lengths"][inputs["rows"] == row].max())
        inputs["keys"][row, :, used:] = inputs["values"][row, :, used:] = float("nan")
    group = triton.next_power_of_2(case["Hq"] // case["Hk"])
    for tokens, split in ((1, 1), (2, 3), (8, 2)):
        output = kernel.launch(**inputs, tiling=(group, tokens, split))
        assert torch.equal(output == 0, y == 0)
        errors.append(relative_error(output, y) / (torch.finfo(y.dtype).eps + 5e-7))
    inputs["keys"][0, :, 0] = float("nan")
    broken = kernel.launch(**inputs, tiling=(group, 2, 2)).isnan()
    assert torch.equal(broken, ((inputs["rows"] == 0) & (inputs["lengths"] > 0))[:, None, None].expand_as(broken))
    return max(errors)


def interpret_sample(case: dict) -> float:
    """Wrong tokens: rows of different settings in one launch, and one of them alone in other slices.

    The first four have one winner, and k and p that just keep or just drop it.
    """
    from repro.kernels import sample as kernel

    inputs = kernel.make_inputs(case | {"T": 9, "temperature": 3, "top_k": 0, "top_p": 1})
    for name in ("logits", "seeds", "positions"):
        inputs[name][1:4] = inputs[name][:1]
    logits = inputs["logits"]
    logits[5] = 0.0
    logits[6, 2:9] = 50.0
    logits[7, case["V"] // 2] = float("nan")
    free = kernel.reference(**inputs)
    larger = logits[0] > logits[0, free[0]]
    w = (logits[0].double() / 3).softmax(0)
    rank, most = int(larger.sum()), case["V"] * 7 // 8
    share = float(w[larger].sum() / w[logits[0] >= logits[0].sort().values[-most]].sum())
    assert 0 < rank < most
    rules = [(3, rank + 1, 1), (3, rank, 1), (3, most, share + 1e-5), (3, most, share - 1e-5)]
    rules += [(0.7, 5, 0.9), (1.3, 2, 0.5), (0, 3, 0.1), (1, 0, 1), (0.5, 100_000, 0)]
    for i, name in enumerate(("temperature", "top_k", "top_p")):
        inputs[name] = torch.tensor([rule[i] for rule in rules]).to(inputs[name].dtype)
    logits[4, ::3] = logits[4].max()  # more equal ones than k
    logits[5, free[5]] = -0.0  # as large as the others
    want = kernel.reference(**inputs)
    assert want[0] == want[2] == free[0]
    assert want[5] == free[5]
    assert want[6] == 2
    assert want[7] == -1
    assert free[0] not in want[[1, 3]] and (want[[1, 3, 4, 8]] >= 0).all()
    wrong = int((kernel.launch(**inputs, size=1024) != want).sum())
    return wrong + int((kernel.launch(**{n: v[1:2] for n, v in inputs.items()}, size=2048) != want[1:2]).sum())


def interpret_argmax(case: dict) -> float:
    """Wrong tokens: equal largest logits in one block and in two, infinities, NaN before and after the largest."""
    from repro.kernels import argmax as kernel

    logits = kernel.make_inputs(case | {"T": 9})["logits"]
    last = case["V"] - 1
    logits[1, [3, 7, last]] = 50.0
    logits[2, last] = 50.0
    logits[3, 0] = float("nan")
    logits[4, last] = float("nan")
    logits[5, 2] = float("inf")
    logits[6] = float("-inf")
    logits[7, ::2] = float("-inf")
    logits[8] = -3.0
    want = kernel.reference(logits)
    assert want[[1, 2]].tolist() == [3, last]
    assert want[3:7].tolist() == [-1] * 4
    assert want[8] == 0
    assert want[7] % 2 == 1
    return int((kernel.launch(logits) != want).sum())


def interpret_pple(case: dict) -> float:
    """Largest relative error: certain, uniform, two alike, tokens that cannot be, NaN, infinity, rising logits."""
    from repro.kernels import pple as kernel

    logits = kernel.make_inputs(case | {"T": 10})["logits"]
    logits[7] = torch.linspace(-90, 90, case["V"])  # each block's largest is larger than all before it
    logits[8], logits[9, 1:] = logits[7].flip(0), float("-inf")
    logits[1] = 2.0
    logits[2] = float("-inf")
    logits[2, [3, case["V"] - 1]] = 4.0
    logits[3, 5] = 1e4
    logits[4, -1], logits[5, 0] = float("nan"), float("inf")
    (values, tokens), (want, greedy) = kernel.launch(logits), kernel.reference(logits)
    assert torch.equal(tokens, greedy) and greedy[[1, 2, 3]].tolist() == [0, 3, 5] and want[9] == 1
    known = torch.tensor([case["V"], 2.0, 1.0])
    assert want[4:6].isnan().all() and values[4:6].isnan().all() and torch.allclose(want[1:4], known, rtol=1e-4)
    finite = want.isfinite()
    return float(((values - want)[finite] / want[finite]).abs().max())


def interpret_active_inputs(case: dict) -> float:
    """Entries that differ, sorted after the order of arrival, twice; NaN is listed."""
    from repro.kernels import active_inputs as kernel

    inputs = kernel.make_inputs(case | {"ordered": False})
    inputs["x"][0, case["K"] // 2] = float("nan")
    want, wrong = kernel.reference(**inputs), 0
    for _ in range(2):
        wrong += int((kernel.in_order(kernel.launch(**inputs)) != want).sum())
    return wrong


def interpret_quantize_2bit(case: dict) -> float:
    """Codes, scales and zeros that differ by a bit."""
    from repro.kernels import quantize_2bit as kernel

    inputs = kernel.make_inputs(case)
    pairs = zip(kernel.launch(**inputs), kernel.reference(**inputs), strict=True)
    return sum(int((output.view(torch.int32) != want.view(torch.int32)).sum()) for output, want in pairs)


def interpret_dense_gemv(case: dict) -> float:
    """Columns that a load divides and others, the last rows of a program being nobody's."""
    from repro.kernels import dense_gemv as kernel

    inputs = kernel.make_inputs(case)
    want = kernel.reference(**inputs)
    configs = ({"rows": 1, "columns": 64, "warps": 1}, {"rows": 4, "columns": 128, "warps": 2})
    return max(relative_error(kernel.launch(**inputs, config=config), want) for config in configs)


def interpret_q4_k(case: dict) -> float:
    """Every configuration of a case, sums in both orders, twice: the scratch memory is as before after a launch."""
    from repro.bench import kernel_list

    case = dict(case)
    kernel, configs, errors = kernel_list.load(case.pop("name")), case.pop("configs"), []
    inputs = kernel.make_inputs(case)
    want = kernel.reference(**inputs)
    for config in configs:
        for ordered in (True, False) if "ordered" in inputs else (None,):
            arguments = inputs if ordered is None else inputs | {"ordered": ordered}
            outputs = [kernel.launch(**arguments, config=config) for _ in range(2)]
            assert torch.equal(*outputs)  # also without an order: programs of the interpreter run one after the other
            errors.append(relative_error(outputs[0], want))
    return max(errors)


def interpret_compensate(case: dict) -> float:
    """Latent vectors and sums of several tokens; outputs without a compensator stay as they are, to the bit.

    In units of what is allowed: 1e-5 of the latent vectors, a rounding of the outputs.
    """
    from repro.kernels import compensate as kernel

    inputs = kernel.make_inputs(case)
    x, y, made = inputs["x"], inputs["y"], inputs["made"]
    latent = kernel.latent_reference(x, made)
    y_added, y_reference = y.clone(), y.clone()
    kernel.launch_add(y_added, latent, made)
    kernel.add_reference(y_reference, latent, made)
    covered = torch.zeros(y.shape[1], dtype=torch.bool)
    for first, end in zip(made.spans[::2], made.spans[1::2]):
        covered[first:end] = True
    assert torch.equal(y_added[:, ~covered], y[:, ~covered]) and not torch.equal(y_added, y)
    error_of_latent = relative_error(kernel.launch_latent(x, made), latent)
    error_of_sum = relative_error(y_added, y_reference)
    error_of_both = relative_error(kernel.launch(**inputs), kernel.reference(**inputs))
    return max(error_of_latent / 1e-5, error_of_sum / 2**-10, error_of_both / 2**-10)


@triton.jit
def noise_kernel(x, out, seed, position, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    words = noise.words_block(seed, position, 0, BLOCK)
    tl.store(out + lane, words.to(tl.int32, bitcast=True))
    tl.store(out + BLOCK + lane, noise.exponential_block(words).to(tl.int32, bitcast=True))
    tl.store(out + 2 * BLOCK + lane, noise.weight_block(tl.load(x + lane)).to(tl.int32, bitcast=True))


def interpret_noise(case: dict) -> float:
    """Bits that differ between the torch and the Triton functions, over words, exponentials and weights."""
    count, seed, position = 1 << 14, torch.tensor([case["key"]]), torch.tensor([case["position"]])
    x, out = (
        -torch.rand(count, generator=torch.Generator().manual_seed(0)) * 85,
        torch.empty(3, count, dtype=torch.int32),
    )
    noise_kernel[(1,)](x, out, case["key"], case["position"], BLOCK=count)
    words = noise.words(seed, position, count)
    want = words[0].int(), noise.exponential(words)[0].view(torch.int32), noise.weight(x).view(torch.int32)
    return int((out != torch.stack(want)).sum())


def operators(name: str, *cases: dict) -> list[dict]:
    return [{"name": name, "seed": 1} | case | {"dtype": d} for case, d in product(cases, ("float16", "float32"))]


GATHERED = [{"rows": 4, "columns": 64, "warps": 2}]
Q4_K = [("q4_k_naive_sparse", {"N": 7, "K": 512, "dtype": "float32", "configs": GATHERED})]

INTERPRETED = {  # kernel: (how, cases, bound on the relative error)
    "read_floor": (interpret_read_floor, [{"bytes": 4 * 1025, "seed": 3}, {"bytes": 4, "seed": 4}], 0),
    "quantize_activation": (
        interpret_quantize_activation,
        [{"M": m, "K": k, "dtype": "float16", "seed": m} for m, k in ((3, 127), (5, 1029), (2, 4096), (2, 16400))],
        5e-4,  # fma rounds twice in the interpreter
    ),
    "w8a8_gemv": (
        interpret_w8a8_gemv,
        [{"M": 1, "N": n, "K": k, "dtype": "float16", "seed": n} for n, k in ((40, 2048), (33, 272), (3, 16))],
        5e-4,
    ),
    "w8a8_gemm": (
        interpret_w8a8_gemm,
        [
            {"M": m, "N": n, "K": k, "seed": m}
            for m, n, k in ((140, 130, 260), (17, 129, 127), (65, 127, 500), (1, 5, 3))
        ],
        5e-4,
    ),
    "w8a8 joined": (
        interpret_joined,
        [{"M": m, "N": n, "K": k, "seed": m, "dtype": "float16"} for m, n, k in ((20, 70, 272), (17, 20, 127))],
        5e-4,
    ),
    "rms_norm": (
        interpret_operator,
        operators("rms_norm", *({"T": t, "H": h, "residual": h != 64} for t, h in ((5, 3000), (1, 64), (64, 129)))),
        1,
    ),
    "silu_product": (
        interpret_operator,
        operators("silu_product", *({"T": t, "F": f} for t, f in ((5, 1000), (1, 4097), (64, 33)))),
        1,
    ),
    "rope_append": (
        interpret_operator,
        operators(
            "rope_append",
            {"T": 1, "Hq": 5, "Hk": 1, "D": 128, "B": 1, "L": 8, "padding": 0},
            {"T": 17, "Hq": 8, "Hk": 4, "D": 64, "B": 2, "L": 33, "padding": 3},
        ),
        0,  # bit for bit
    ),
    "attention": (
        interpret_attention,
        [
            *operators("attention", {"B": 1, "n": 5, "context": 80, "Hq": 8, "Hk": 1, "D": 128, "tree": True}),
            *operators("attention", {"B": 3, "n": 2, "context": 70, "Hq": 6, "Hk": 2, "D": 64, "tree": False})[:1],
            *operators("attention", {"B": 2, "n": 5, "context": 1, "Hq": 1, "Hk": 1, "D": 64, "tree": False})[1:],
        ],
        1,
    ),
    "sample": (
        interpret_sample,
        [{"V": v, "dtype": d, "seed": v} for v, d in ((1030, "bfloat16"), (254, "float32"))],
        0,
    ),
    "argmax": (
        interpret_argmax,
        [{"V": v, "dtype": d, "seed": v} for v, d in ((40_000, "bfloat16"), (1001, "float16"), (254, "float32"))],
        0,
    ),
    "pple": (
        interpret_pple,
        [{"V": v, "dtype": d, "seed": v} for v, d in ((20_000, "bfloat16"), (1001, "float16"), (254, "float32"))],
        1e-4,
    ),
    "active_inputs": (
        interpret_active_inputs,
        [{"K": k, "share": s, "dtype": "float16", "seed": k} for k, s in ((2311, 0.4), (1024, 0.5), (5, 0.5))],
        0,
    ),
    "quantize_2bit": (
        interpret_quantize_2bit,
        [{"M": m, "K": k, "dtype": d, "seed": k} for m, k, d in ((3, 352, "float32"), (1, 1056, "float16"))],
        0,
    ),
    "dense_gemv": (
        interpret_dense_gemv,
        [{"N": n, "K": k, "dtype": "float16", "seed": k} for n, k in ((19, 353), (7, 384))],
        1e-3,
    ),
    "q4_k": (
        interpret_q4_k,
        [{"name": name, "seed": 3, "share": 0.4, "ordered": True, **case} for name, case in Q4_K],
        5e-4,
    ),
    "compensate": (
        interpret_compensate,
        [
            {"tokens": t, "layers": n, "ranks": r, "columns": k, "hidden": h, "dtype": "float16", "seed": t}
            for t, n, r, k, h in (
                (5, [200], [5], 416, 4),
                (33, [17, 160, 24], [20, 0, 33], 203, 4),
                (70, [33, 30], [0, 7], 1056, 0),
            )
        ],
        1,
    ),
    "noise": (interpret_noise, [{"key": -3, "position": 5}, {"key": 1 << 40, "position": (1 << 33) + 1}], 0),
}


@cache
def interpreted() -> dict[str, list[float]]:
    searched = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": searched}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kernel", INTERPRETED)
def test_the_interpreter_agrees_with_the_reference(kernel):
    errors = interpreted()[kernel]
    assert len(errors) == len(INTERPRETED[kernel][1])
    assert max(errors) <= INTERPRETED[kernel][2]


def variants():
    """(name, function, types of arguments, constants, multiples of 16 among them, options, what PTX must hold)."""
    from repro.kernels import quantize_activation, read_floor, w8a8_gemm, w8a8_gemv

    nowhere, somewhere = {"SCALES_AT": 0, "COUNTERS_AT": 0}, {"SCALES_AT": 4096, "COUNTERS_AT": 4160}
    no_counters = {"COUNTERS": 0, "SHARE": 1}
    gemm = {"s_x": "*fp32", "s_w": "*fp32", "M": "i32", "N": "i32", "K": "i32"}
    yield (
        "read_floor", read_floor.read_floor_kernel, {"x": "*i32", "out": "*i32", "words": "i32"}, {"BLOCK": 4096},
        ("x", "out", "words"), {"num_warps": 4}, {90: "v4.b32"},
    )  # fmt: skip
    yield (
        "quantize_activation", quantize_activation.quantize_activation_kernel,
        {"x": "*bf16", "q": "*i8", "s": "*fp32", "K": "i32"}, {"BLOCK": 1024, "PIECES": 4, **nowhere, **no_counters},
        ("x", "q", "s", "K"), {"num_warps": 4}, {90: "v4.b32"},
    )  # fmt: skip
    yield (
        "quantize_activation in a workspace", quantize_activation.quantize_activation_kernel,
        {"x": "*bf16", "q": "*i8", "K": "i32"},
        {"BLOCK": 1024, "PIECES": 4, "s": None, **somewhere, "COUNTERS": 100, "SHARE": 8},
        ("x", "q", "K"), {"num_warps": 4}, {90: "v4.b32"},
    )  # fmt: skip
    for chunks, even in ((2, True), (3, False)):
        yield (
            f"w8a8_gemv {chunks} chunks", w8a8_gemv.w8a8_gemv_kernel,
            {"x": "*bf16", "w": "*i32", "s_w": "*fp32", "y": "*bf16", "N": "i32", "K16": "i32"},
            {"ROWS": 4, "CHUNK": 512, "CHUNKS": chunks, "EVEN": even, "PLAIN": False}, ("x", "w", "s_w", "y", "N"),
            {"num_warps": 4}, dict.fromkeys((80, 90, 100), "dp4a"),
        )  # fmt: skip
    for name, config in (("wide", GEMM), ("narrow", NARROW), ("joined", NARROW), ("split", NARROW)):
        options = {"num_warps": config["warps"], "num_stages": config["stages"]}
        partial = {"partial": "*i32"} if name == "narrow" else {}
        behind = name in ("joined", "split")  # a quantizer
        where = {**somewhere, "SUMS_AT": 8192} if behind else {**nowhere, "SUMS_AT": 0}
        constants = {
            "BM": config["m"], "BN": config["n"], "BK": config["k"], "SPLIT": config["split"], "SWAP": config["swap"],
            **where, "JOINED": name == "joined", **({} if partial else {"partial": None}),
        }  # fmt: skip
        gemm["s_x"] = "*i8" if behind else "*fp32"
        tiles = {
            "x_q": f"tensordesc<i8[{config['m']},{config['k']}]>",
            "w_q": f"tensordesc<i8[{config['n']},{config['k']}]>",
        }
        yield (
            f"w8a8_gemm {name}", w8a8_gemm.w8a8_gemm_kernel, {**tiles, **gemm, **partial, "y": "*bf16"},
            constants | {"DESCRIPTOR": True}, ("s_x", "s_w", "y", "N", "K"), options,
            {80: "mma.sync", 90: "wgmma.mma_async", 100: "mma"},
        )  # fmt: skip
        yield (
            f"w8a8_gemm {name} ragged", w8a8_gemm.w8a8_gemm_kernel,
            {"x_q": "*i8", "w_q": "*i8", **gemm, **partial, "y": "*fp16"}, constants | {"DESCRIPTOR": False},
            (), options, {},
        )  # fmt: skip
    sums = {"s_x": "*fp32", "s_w": "*fp32", "y": "*fp16", "M": "i32", "N": "i32"}
    yield (
        "w8a8_gemm partial sums", w8a8_gemm.add_partial_sums_kernel, {"partial": "*i32", **sums},
        {"SPLIT": 4, "BLOCK": 1024, "SCALES_AT": 0, "SUMS_AT": 0}, ("partial", "y", "N"), {"num_warps": 4}, {},
    )  # fmt: skip
    yield (
        "w8a8_gemm partial sums in a workspace", w8a8_gemm.add_partial_sums_kernel, {**sums, "s_x": "*i8"},
        {"SPLIT": 4, "BLOCK": 1024, "SCALES_AT": 4096, "SUMS_AT": 8192, "partial": None}, ("s_x", "y", "N"),
        {"num_warps": 4}, {},
    )  # fmt: skip
    yield from decode_variants()


def decode_variants():
    """The kernels of a decode step; where fusion is off no multiply-add may be, and float32 is never TF32."""
    from repro.kernels import argmax, attention, pple, rms_norm, rope_append, sample, silu_product

    exact, wide, indices = {"num_warps": 4, "enable_fp_fusion": False}, dict.fromkeys((80, 90, 100), "v4.b32"), "*i32"
    yield (
        "rms_norm", rms_norm.rms_norm_kernel,
        dict.fromkeys(("x", "residual", "weight", "y", "total"), "*bf16") | {"eps": "fp32", "H": "i32"},
        {"BLOCK": 4096}, ("x", "residual", "weight", "y", "total", "H"), {"num_warps": 8}, wide,
    )  # fmt: skip
    yield (
        "silu_product", silu_product.silu_product_kernel, {"x": "*bf16", "y": "*bf16", "F": "i32"}, {"BLOCK": 1024},
        ("x", "y", "F"), {"num_warps": 4}, wide,
    )  # fmt: skip
    yield (
        "rope_append", rope_append.rope_append_kernel,
        dict.fromkeys(("qkv", "keys", "values", "q"), "*bf16") | {"cos": "*fp32", "sin": "*fp32", "L": "i32"}
        | dict.fromkeys(("positions", "rows", "slots"), indices), {"HQ": 32, "HK": 8, "D": 128, "HEADS": 4},
        ("qkv", "cos", "sin", "keys", "values", "q", "L"), exact | {"num_warps": 2}, {},
    )  # fmt: skip
    for name, dtype, rows, tree in (
        ("decode", "*bf16", 16, False),
        ("tree", "*fp16", 64, True),
        ("exact", "*fp32", 32, False),
    ):
        constants = {"HQ": 8, "HK": 2, "D": 64, "GROUP": 4, "TOKENS": rows // 4, "M": rows, "BLOCK": 32, "SPLIT": 2}
        yield (
            f"attention {name}", attention.attention_kernel,
            dict.fromkeys(("q", "keys", "values", "y"), dtype) | dict.fromkeys(("rows", "lengths", "start"), indices)
            | dict.fromkeys(("acc_part", "top_part", "sum_part"), "*fp32") | {"mask": "*u8", "scale": "fp32"}
            | dict.fromkeys(("T", "L", "COLUMNS"), "i32"), constants | ({} if tree else {"mask": None, "start": None}),
            ("q", "keys", "values", "y", "L", "acc_part"), {"num_warps": 4, "num_stages": 2},
            {80: "mma.sync", 90: "mma", 100: "mma"} if dtype != "*fp32" else {},
        )  # fmt: skip
    yield (
        "attention joined splits", attention.join_splits_kernel,
        dict.fromkeys(("acc_part", "top_part", "sum_part"), "*fp32") | {"y": "*bf16", "COUNT": "i32"},
        {"D": 128, "SPLIT": 3, "PAD": 4}, ("acc_part", "y"), {"num_warps": 4}, {},
    )  # fmt: skip
    yield (
        "argmax", argmax.argmax_kernel, {"logits": "*bf16", "tokens": "*i64", "V": "i32"},
        {"BLOCK": argmax.BLOCK, "UNROLLED": argmax.UNROLLED}, ("logits", "V"), {"num_warps": 32}, wide,
    )  # fmt: skip
    yield (
        "pple", pple.pple_kernel, {"logits": "*bf16", "pple": "*fp32", "tokens": "*i64", "V": "i32"},
        {"BLOCK": pple.BLOCK}, ("logits", "V"), {"num_warps": pple.WARPS}, wide,
    )  # fmt: skip
    yield from compensate_variants()
    yield from q4_k_variants()
    yield from two_bit_variants()
    yield from dense_variants()
    types = dict.fromkeys(("seeds", "positions", "sums", "tokens"), "*i64") | {"top_k": indices, "V": "i32"}
    types |= {"temperature": "*fp32", "top_p": "*fp32", "begin": "i32", "end": "i32"}
    for dtype, rounds in (("bf16", 4), ("fp32", 8)):
        yield (
            f"sample {dtype}", sample.sample_kernel, types | {"logits": f"*{dtype}"},
            {"SLICE": 512, "PAD": 256, "ROUNDS": rounds}, ("logits", "V", "sums"),
            exact | {"launch_cooperative_grid": True}, dict.fromkeys((80, 90, 100), "acquire"),
        )  # fmt: skip


def compensate_variants():
    """Compensators of several tokens."""
    from repro.kernels import compensate

    numbers = dict.fromkeys(("T", "K", "WIDTH", "SPLIT"), "i32")
    yield (
        "compensate down", compensate.down_kernel, {"x": "*bf16", "down": "*i8", "part": "*fp32", **numbers},
        {"R": 32, "PAD": 32, "TOKENS": 64, "BLOCK": compensate.COLUMNS}, ("x", "down", "part", "K", "WIDTH"),
        {"num_warps": 4, "num_stages": 3}, {80: "mma.sync", 90: "mma", 100: "mma"},
    )  # fmt: skip
    for hidden in (128, 0):
        yield (
            f"compensate gate {hidden}", compensate.gate_kernel,
            dict.fromkeys(("part", "scales", "latent"), "*fp32") | {"gates": "*fp16", "T": "i32", "SPLIT": "i32"},
            {"R": 32, "PAD": 32, "H": hidden, "WIDE": max(hidden, 16), "TOKENS": compensate.GATED},
            ("part", "scales", "gates", "latent"), {"num_warps": 4}, {},
        )  # fmt: skip
    spans = dict.fromkeys(("first", "end", "first2", "end2", "first3", "end3"), "i32")
    yield (
        "compensate up", compensate.up_kernel,
        {"y": "*bf16", "latent": "*fp32", "up": "*i8", "T": "i32", "N": "i32"} | spans,
        {"R": 32, "PAD": 32, "TOKENS": 64, "BLOCK": compensate.OUTPUTS}, ("y", "latent", "up", "N"),
        {"num_warps": 4}, {80: "mma.sync", 90: "mma", 100: "mma"},
    )  # fmt: skip


def two_bit_variants():
    """The quantizer of activations in 2 bits."""
    from repro.kernels import quantize_2bit

    yield (
        "quantize_2bit", quantize_2bit.quantize_2bit_kernel,
        {"x": "*bf16", "codes": "*i32", "scales": "*fp32", "zeros": "*i32", "G": "i32"},
        {"GROUPS": quantize_2bit.GROUPS}, ("x", "codes", "scales", "zeros"), {"num_warps": 4}, {},
    )  # fmt: skip


def dense_variants():
    """A 16-bit product of one token, whose weights are loads of 16 bytes where the columns allow it."""
    from repro.kernels import dense_gemv

    for columns in (4096, 4000):
        constants = {"K": columns, **{name.upper(): dense_gemv.LARGE[name] for name in ("rows", "columns")}}
        yield (
            f"dense {columns}", dense_gemv.dense_gemv_kernel, dict.fromkeys(("x", "w", "y"), "*bf16") | {"N": "i32"},
            constants, ("x", "w", "y"), {"num_warps": 4}, dict.fromkeys((80, 90, 100), "v4.b32"),
        )  # fmt: skip


def q4_k_variants():
    """A product with Q4_K, and the list of inputs in any order."""
    from repro.kernels import active_inputs, q4_k_naive_sparse

    yield (
        "active_inputs", active_inputs.active_inputs_kernel,
        {"x": "*bf16", "active": "*i32", "state": "*i32", "K": "i32", "threshold": "fp32", "SEGMENTS": "i32"},
        {"SEGMENT": active_inputs.SEGMENT}, ("x", "active", "state"), {"num_warps": 8},
        dict.fromkeys((80, 90, 100), "atom"),
    )  # fmt: skip
    weight = {"x": "*bf16", "words": "*i32", "headers": "*i32", "y": "*bf16", "N": "i32"}
    yield (
        "q4_k_naive_sparse", q4_k_naive_sparse.q4_k_naive_sparse_kernel,
        weight | {"codes": "*u8", "active": "*i32", "SUPERS": "i32"}, {"ROWS": 4, "COLUMNS": 128},
        ("x", "codes", "headers", "y"), {"num_warps": 4}, {},
    )  # fmt: skip


@pytest.mark.parametrize("capability", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 100))])
@pytest.mark.parametrize("variant", variants(), ids=lambda variant: variant[0])
def test_it_compiles_ahead_of_time(variant, capability, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _, function, types, constants, divisible, options, needed = variant
    names = function.arg_names
    source = ASTSource(
        fn=function,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]
    assert needed.get(capability, "") in compiled.asm["ptx"]
    assert ".tf32" not in compiled.asm["ptx"] and "::tf32" not in compiled.asm["ptx"]
    assert options.get("enable_fp_fusion", True) or "fma.rn.f32" not in compiled.asm["ptx"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    errors_of = {}
    for name, (run, cases, _) in INTERPRETED.items():
        errors_of[name] = [run(case) for case in cases]
    print(json.dumps(errors_of))
