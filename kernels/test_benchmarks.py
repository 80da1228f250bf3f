"""Benchmarks: `pytest kernels --benchmark-only`. Every kernel and peer on a GPU; packing and references on a CPU."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from repro.baselines import grid
from repro.bench import timing
from repro.bench.kernel_list import KERNELS, OURS, load
from repro.bench.peers import PEERS
from repro.bench.stored_peers import shapes
from repro.bench.task import Layer

FEW = [(2048, 2048), (4096, 4096), (14336, 4096), (8192, 8192)]
COUNTS = (1, 8, 64)
WATCHED = (16, 128, 256)  # timed of this project's kernels and the library alone, where other kernels are chosen
UNTUNED = (3584, 3584)  # a layer for which no launch configuration is tuned, so that the heuristic chooses
LIBRARY = "bf16/bf16/torch.matmul"


@functools.lru_cache(maxsize=1)
def layer(rows: int, columns: int) -> Layer:
    """The layer that the benchmarks of a shape share."""
    return Layer(rows, columns)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize with shapes in the outer loop and providers in the inner one, so that each layer is made once."""
    if "provider" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-shape")
        cells = []
        for n, k in [*(shapes() if every else FEW), UNTUNED]:
            for m in sorted((*COUNTS, *WATCHED)):
                for provider in providers(m, (n, k) == UNTUNED):
                    cells.append(pytest.param(n, k, m, provider, id=f"{n}x{k}-M{m}-{provider.label}"))
        metafunc.parametrize("rows, columns, count, provider", cells)


def providers(count: int, untuned: bool) -> list[Any]:
    """Who is timed at a number of tokens: all, or this project's kernels and the library."""
    some = {**PEERS, **OURS} if count in COUNTS and not untuned else {LIBRARY: PEERS[LIBRARY], **OURS}
    return [provider for provider in some.values() if provider.takes(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["cold"])
def test_linear(gpu_benchmark, benchmark, rows, columns, count, provider, mode) -> None:  # noqa: ANN001
    """One layer times `count` rows of activations, by one provider."""
    if reason := provider.unavailable("cuda"):
        pytest.skip(reason)
    benchmark.extra_info["ours"] = provider.label in OURS
    try:
        task = provider.task(layer(rows, columns), count)
    except ValueError as error:
        if provider.label in OURS:
            raise
        pytest.skip(str(error))
    timed = gpu_benchmark(task, mode)
    assert timed.relerr <= provider.tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16/bf16/torch.matmul", "w4-g128/bf16/tinygemm"])
def test_this_suite_and_the_timer_agree(gpu_benchmark, backend, name) -> None:  # noqa: ANN001
    """Within 3 %: both are medians of the same launches."""
    task = dataclasses.replace(PEERS[name].task(layer(4096, 4096), 1), facts={})  # not a recorded cell
    alone = timing.measure([task], backend, floor=timing.read_floors)[0]
    timed = gpu_benchmark(task)
    assert timed.us == pytest.approx(alone.us, rel=0.03)


# ---- time of the host, and of a whole prefill, in turns with the library's


def products(count: int, rows: int, columns: int) -> dict[str, Callable[[], Any]]:
    """Calls of linear layers of one shape with `count` tokens."""
    from repro.kernels import linear, w8a8

    torch.manual_seed(0)
    weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(count, columns, device="cuda", dtype=torch.bfloat16)
    form = {"N": rows, "K": columns, "bits": 4, "group": 128, "symmetric": False, "seed": 0}
    packed, codes = load("w4a16_gemm").random_weight(form).to("cuda"), w8a8.quantize_weight(weight)
    return {
        "F.linear": lambda: torch.nn.functional.linear(x, weight),
        "wna16": lambda: linear.wna16(x, packed),
        "w8a8": lambda: w8a8.w8a8(x, *codes),
    }


def operator(name: str) -> Callable[[], Any]:
    """A call of an operator of the decode step on its smallest case."""
    module = load(name)
    inputs = module.make_inputs(small(module.CASES), "cuda")
    values = [inputs[argument] for argument in inspect.signature(module.reference).parameters if argument in inputs]
    return functools.partial(getattr(module, name), *values)


STEP = ("rms_norm", "silu_product", "rope_append", "argmax", "pple", "attention", "sample")


SMALL = 1024, 1024  # rows and columns of a layer whose kernels take less than the host
PRODUCTS = itertools.product(("F.linear", "wna16", "w8a8"), (1, 16, 64))
HOST_CALLS = [(name, count, *SMALL) for name, count in PRODUCTS]
HOST_CALLS += [(name, 1, *SMALL) for name in STEP]
HOST_CALLS += [("wna16", 321, 6144, 4096), ("w8a8", 512, 2048, 8192)]  # many tokens, three launches


@pytest.mark.gpu
@pytest.mark.parametrize("name, count, rows, columns", HOST_CALLS)
def test_host_time(host_benchmark, benchmark, name, count, rows, columns) -> None:  # noqa: ANN001
    """What a call costs the host; its floor is `F.linear` in turns with it."""
    calls = products(count, rows, columns)
    call = calls[name] if name in calls else operator(name)
    call()
    library = host_benchmark(call, calls["F.linear"])
    who = {"kernel": name, "dtype": "bf16", "provider": "call"}
    where = {"N": rows, "K": columns, "M": count, "mode": "host", "device": torch.cuda.get_device_name()}
    benchmark.extra_info |= who | where | {"ours": name != "F.linear", "floor_us": library}


@pytest.mark.gpu
def test_prefill(graph_benchmark, benchmark) -> None:  # noqa: ANN001
    """What a prompt of 2,048 tokens takes on the device at a 1B model's shapes, with 4-bit weights.

    Its floor is a bf16 product of the largest layer, as often as a prompt goes through one like it.
    """
    from repro.engine import prefill
    from repro.generation import Engine

    count, rows, columns = 2048, 8192, 2048
    engine = Engine.load("shape/Llama-3.2-1B", "rtn-w4-g128", context=count + 64, device="cuda")
    model, cache = engine.model, engine.cache
    prompt = list(range(count))
    tokens, groups = prefill.packed([prompt], 0, model.device), prefill.spans([count], 0)
    states = []

    def whole() -> None:
        states[:] = [prefill.forward(model, cache, tokens, groups)]

    weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    x, y = weight[:count].clone(), weight.new_empty(count, rows)
    products = 3 * model.config.num_hidden_layers
    library = graph_benchmark([whole], [lambda: torch.mm(x, weight.T, out=y)] * products)
    torch.testing.assert_close(states[0], prefill.together(model, cache, [prompt])[0], rtol=1e-2, atol=1e-2)
    who = {"kernel": "w4-g128", "dtype": "bf16", "provider": "prefill"}
    where = {"N": rows, "K": columns, "M": count, "mode": "whole", "device": torch.cuda.get_device_name()}
    benchmark.extra_info |= who | where | {"ours": True, "floor_us": library}


# ---- on a CPU, at small sizes


def small(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The case with the least work."""

    def work(case: dict[str, Any]) -> int:
        product = 1
        for name in ("M", "N", "K", "rows", "columns", "bytes"):
            product *= int(case.get(name, 1))
        return product

    return min((c if isinstance(c, dict) else vars(c) for c in cases), key=work)


def call(function: Callable[..., Any], inputs: Any) -> Any:  # noqa: ANN401
    """Call a kernel's reference with the result of `make_inputs`: keywords, a tuple (cut to fit) or a tensor."""
    count = len(inspect.signature(function).parameters)
    if isinstance(inputs, dict):
        return function(**inputs)
    return function(*inputs[:count]) if isinstance(inputs, tuple) else function(inputs)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("what", ["pack", "unpack", "dequantize"])
def test_packing(benchmark, what, bits) -> None:  # noqa: ANN001
    """The packed format at 512 x 1024 with groups of 128."""
    from repro.kernels import packing

    codes, scales, zeros = Layer(512, 1024, device="cpu").codes(bits, 128)
    packed = packing.pack(codes, scales, zeros, bits, 128)
    if what == "pack":
        got = benchmark(packing.pack, codes, scales, zeros, bits, 128)
        assert torch.equal(got.codes, packed.codes)
    else:
        got = benchmark(getattr(packing, what), packed)
        assert torch.equal(got[0], codes) if what == "unpack" else got.shape == codes.shape


@pytest.mark.parametrize("bits, group", [(4, 0), (4, 128), (2, 64)])
def test_round_to_nearest(benchmark, bits, group) -> None:  # noqa: ANN001
    """Round-to-nearest, the last step of every quantizer, at 512 x 1024."""
    weight = Layer(512, 1024, device="cpu").weight
    got = benchmark(grid.rtn, weight, grid.Grid(bits=bits, group=group))
    assert got.codes.shape == weight.shape


@pytest.mark.parametrize("name", KERNELS)
def test_reference(benchmark, name) -> None:  # noqa: ANN001
    """The float32 reference of a kernel on its smallest case."""
    try:
        module = load(name)
    except ImportError as error:
        pytest.skip(f"{name}: {error}")
    if not hasattr(module, "reference"):
        pytest.skip(f"{name} has no reference of its own")
    benchmark(call, module.reference, module.make_inputs(small(module.CASES), "cpu"))
