"""SPEAR's fused decode kernel: its sources on a CPU, its layout, what it refuses, its sources for a GPU."""

import cuda_on_cpu
import nvcc
import pytest
import torch
from relative_error import ROUNDING, relative_error

from repro.kernels import compensated_gemv as kernel
from repro.kernels import nvrtc, wna16_gemv
from repro.methods.spear.compensator import Compensator, unpack

GPU = torch.device("cuda")
SMALL = kernel.CASES[:3]
CONFIGS = [
    {"warps": 4, "tiles": 1, "chunk": 128, "stages": 2, "splits": 1, "blocks": 1},
    {"warps": 2, "tiles": 2, "chunk": 128, "stages": 1, "splits": 2, "blocks": 1},
    {"warps": 2, "tiles": 1, "chunk": 256, "stages": 1, "splits": 1, "blocks": 1},
]


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case, config", zip(SMALL, CONFIGS), ids=["one", "three", "no gate"])
def test_sources_on_the_cpu(case, config, monkeypatch):
    """Both launches: columns and outputs that nothing divides, padded ranks, layers without a compensator, clusters."""
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    monkeypatch.setattr(kernel, "unsupported", lambda device: None)
    kernel._plan.cache_clear()
    inputs = kernel.make_inputs(case)
    y = kernel.launch(**inputs, config=config)
    kernel._plan.cache_clear()
    assert relative_error(y, kernel.reference(**inputs)) < ROUNDING[case["dtype"]]


@pytest.mark.parametrize("hidden", [0, 4])
def test_it_computes_what_the_method_does(hidden):
    """Equation 3 as `methods/spear` has it, through the kernel's layout: alpha, scales, gate, padded channels."""
    rng = torch.Generator().manual_seed(0)
    stored = [kernel.random_compensator(r, 24, 100, hidden, rng) for r in (5, 18)]
    alphas, weight = (0.5, 2.0), {"rows": 80, "columns": 100, "bits": 4, "group": 0, "symmetric": False, "m": 1}
    x, packed = wna16_gemv.make_inputs(weight | {"seed": 0})
    made = kernel.pack([8, 40], stored, alphas, hidden)
    assert made.down.shape == (2, 32, 112) and made.spans == (8, 32, 40, 64, 0, 0)
    y = kernel.compensated_gemv(
        x, packed.codes, packed.scale_zero, made.down, made.scales, made.up, 4, 0, 80, 100, False, *made.spans,
        made.gates,
    )  # fmt: skip
    want = wna16_gemv.reference(x, packed)
    for start, tensors, alpha in zip((8, 40), stored, alphas):
        want[:, start : start + 24] += Compensator(unpack(tensors), alpha)(x.float())
    assert relative_error(y, want) < 1e-3
    assert relative_error(wna16_gemv.reference(x, packed), want) > 0.01


BAD = [
    ({"x": torch.zeros(2, 416, dtype=torch.float16)}, "x must be a contiguous .* tensor .1, K."),
    ({"x": torch.zeros(1, 400, dtype=torch.float16)}, "x is .1, 400., expected .1, 416."),
    ({"down": torch.zeros(1, 16, 400, dtype=torch.int8)}, "down is .1, 16, 400., expected"),
    ({"down": torch.zeros(1, 24, 416, dtype=torch.int8)}, "scales must be .*R = 24"),
    ({"up": torch.zeros(40, 16, dtype=torch.uint8)}, "up must be a contiguous int8"),
    ({"gates": torch.zeros(1, 2143, dtype=torch.float16)}, "gates are .1, 2143."),
    ({"end": 41}, "outputs .* are not those of 1 compensators"),
    ({"first": 8}, "outputs .* are not those of 1 compensators"),
    ({"first2": 3, "end2": 4}, "outputs .* are not those of 1 compensators"),
    ({"rows": 70}, "rows|codes"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[message[:30] for _, message in BAD])
def test_what_does_not_fit_is_refused(change, message):
    inputs = kernel.make_inputs(SMALL[0])
    with pytest.raises(ValueError, match=f"compensated_gemv: .*({message})"):
        kernel.compensated_gemv(**inputs | change)


def test_a_rank_that_the_kernel_does_not_take_is_refused():
    stored = kernel.random_compensator(113, 8, 200, 4, None)
    with pytest.raises(ValueError, match="1 compensators of rank 113; the kernel takes 3 of up to 112"):
        kernel.pack([0], [stored], [1.0], 4)
    assert kernel.latent_shared(kernel.MOST_RANK, 4) <= kernel.MOST_SHARED


@nvcc.NEEDS_NVCC
@pytest.mark.parametrize("hidden", [4, pytest.param(0, marks=pytest.mark.slow)])
def test_sources_compile_for_a_gpu(hidden):
    own = {"K": 11008, "RANK": 32, "HIDDEN": hidden, "BF16": 1, "SPLITS": kernel.SPLITS}
    config = kernel.CHECKED[0]
    macros = wna16_gemv.defines(4, 0, 11008, False, torch.bfloat16, 1, config) | {"RANK": 32}
    nvcc.compile_cubin(kernel.SOURCE, own)
    nvcc.compile_cubin(wna16_gemv.SOURCE, macros)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_on_a_gpu(case):
    """With the product's own configuration and with others, several times, since two launches run side by side."""
    inputs = kernel.make_inputs(case, GPU)
    want = kernel.reference(**inputs)
    most = ROUNDING[case["dtype"]]
    for config in (None, *kernel.CHECKED):
        for _ in range(3):
            y = kernel.launch(**inputs, config=config) if config else kernel.compensated_gemv(**inputs)
            assert relative_error(y, want) < most, config


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_is_replayed_on_a_gpu():
    """The two launches stay side by side in a graph: replays with other inputs give what the reference gives."""
    inputs = kernel.make_inputs(kernel.CASES[4], GPU)
    kernel.compensated_gemv(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [kernel.compensated_gemv(**inputs) for _ in range(20)]
    for seed in range(3):
        inputs["x"].copy_(torch.randn(inputs["x"].shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        want = kernel.reference(**inputs)
        assert max(relative_error(y, want) for y in outputs) < 4e-3
