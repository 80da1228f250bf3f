"""A row-parallel product that gives its partial sums to every rank: its sources on a CPU, ranks one after the other."""

import struct

import cuda_on_cpu
import nvcc
import pytest
import torch
from relative_error import ROUNDING, relative_error

from repro.core.errors import UserError
from repro.kernels import compensated_gemv as ec
from repro.kernels import nvrtc, rms_norm, wna16_gemv
from repro.kernels import row_parallel as kernel
from repro.kernels.packing import PackedWeight, dequantize

GPU = torch.device("cuda")
IDS = ["two", "three", "four, no gate", "no compensator"]
CASES = kernel.CASES[: len(IDS)]


def problem(case, device="cpu"):
    """The whole product, its ranks' parts of x, weight and A, what all ranks have of the compensator, and the rest."""
    x, packed, made, *_ = kernel.make_whole(case)
    inputs = kernel.make_inputs(case, device)
    of_compensator = [inputs[name] for name in ("up", "gates", "scales")]
    return x, packed, made, inputs["parts"], of_compensator, (inputs["residual"], inputs["weight"])


def whole(x, packed: PackedWeight, made, residual, norm):
    """y and total by the operators of one rank."""
    if made is None:
        value = (x.float() @ dequantize(packed).T).to(x.dtype)
    else:
        form = packed.bits, packed.group, packed.rows, packed.columns, packed.symmetric
        args = packed.codes, packed.scale_zero, made.down, made.scales, made.up
        value = ec.reference(x, *args, *form, *made.spans, made.gates)
    return rms_norm.reference(value, norm, 1e-5, residual)


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    plans = kernel._product_plan, kernel._latent_plan, kernel._take_plan
    for plan in plans:
        plan.cache_clear()
    yield
    for plan in plans:
        plan.cache_clear()


def memories(case, device="cpu"):
    """One of each rank, with more values than the product has."""
    values = case["rows"] + 48
    return [torch.zeros(case["ranks"], values, dtype=torch.int64, device=device) for _ in range(case["ranks"])]


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_sources_give_to_every_rank_and_take_on_the_cpu(case, emulated):
    """Twice into the same memory, whose marks the first product has to take away; each rank has the same result."""
    x, packed, made, parts, (up, gates, scales), behind = problem(case)
    want, total = whole(x, packed, made, *behind)
    tolerance = ROUNDING[case["dtype"]]
    memory = memories(case)
    for turn in range(2):
        for rank, (own, part, down) in enumerate(parts):
            to = [of_rank[rank] for of_rank in memory]
            kernel.give(own, part, down, scales, to, config=kernel.CHECKED[turn])
        outputs = [kernel.take(of_rank, up, gates, scales, *behind, 1e-5, on_kernel=True) for of_rank in memory]
        y_of_first, total_of_first = outputs[0]
        for y, summed in outputs:
            assert relative_error(y, want) < 2 * tolerance
            assert relative_error(summed, total) < tolerance
            assert torch.equal(y, y_of_first) and torch.equal(summed, total_of_first)
        assert not torch.stack(memory).any()


@cuda_on_cpu.NEEDS_COMPILER
def test_nothing_is_written_before_all_sums_are_read(emulated):
    """`take` runs beside the product, whose x may have been freed: its outputs may lie where that one still reads.

    Here they lie over sums of rows that are read last.
    """
    case = CASES[1]
    *_, parts, (up, gates, scales), (residual, weight) = problem(case)
    of_ranks = memories(case)
    for rank, (own, part, down) in enumerate(parts):
        kernel.give(own, part, down, scales, [memory[rank] for memory in of_ranks], config=kernel.CHECKED[0])
    memory = of_ranks[0]
    want_y, want_total = kernel.take_reference(memory.clone(), up, gates, scales, residual, weight, 1e-5)
    rows, R = case["rows"], up.shape[1]
    plan = rows, residual.dtype, R, ec.hidden_of(gates, R), case["ranks"], memory.shape[1], residual.device
    function, threads = kernel._take_plan(*plan)
    in_each = memory.element_size() // residual.element_size()
    over_y, over_total = (memory[rank, rows - rows // in_each : rows].view(residual.dtype) for rank in (0, 1))
    eps = struct.unpack("I", struct.pack("f", 1e-5))[0]
    function(kernel.SPLITS, threads, memory, up, gates, scales, residual, weight, eps, over_y, over_total)
    assert relative_error(over_y[None], want_y) < 2 * ROUNDING[case["dtype"]]
    assert relative_error(over_total[None], want_total) < ROUNDING[case["dtype"]]


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", CASES[:2], ids=IDS[:2])
def test_sources_with_a_collective_on_the_cpu(case, emulated):
    """Each rank's float32 sums in memory of its own, added up by somebody else."""
    x, packed, made, parts, (up, gates, scales), behind = problem(case)
    values = case["rows"] + made.down.shape[1]
    sums = torch.zeros(case["ranks"], values)
    for rank, (own, part, down) in enumerate(parts):
        kernel.give(own, part, down, scales, [sums[rank]], config=kernel.CHECKED[0])
    y, total = kernel.take(sums.sum(0), up, gates, scales, *behind, 1e-5, on_kernel=True)
    want_y, want_total = whole(x, packed, made, *behind)
    tolerance = ROUNDING[case["dtype"]]
    assert relative_error(y, want_y) < 2 * tolerance
    assert relative_error(total, want_total) < tolerance


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case", [CASES[2], kernel.CASES[4]], ids=["given to peers", "collected"])
def test_what_the_sanitizer_runs(case, emulated):
    """All ranks in one call, with each configuration."""
    inputs = kernel.make_inputs(case)
    want = kernel.reference(**inputs)
    tolerance = ROUNDING[case["dtype"]]
    for config in kernel.CHECKED:
        outputs = kernel.launch(**inputs, config=config)
        assert len(outputs) == len(want) == (1 if case["collected"] else case["ranks"])
        for (y, total), (want_y, want_total) in zip(outputs, want):
            assert relative_error(y, want_y) < tolerance
            assert relative_error(total, want_total) < tolerance


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_reference_is_the_product_of_one_rank(case):
    x, packed, made, parts, (up, gates, scales), behind = problem(case)
    want, total = whole(x, packed, made, *behind)
    memory = memories(case)
    for rank, (own, part, down) in enumerate(parts):
        kernel.give(own, part, down, scales, [of_rank[rank] for of_rank in memory])
    tolerance = ROUNDING[case["dtype"]]
    for of_rank in memory:
        y, summed = kernel.take(of_rank, up, gates, scales, *behind, 1e-5)
        assert relative_error(y, want) < tolerance and relative_error(summed, total) < tolerance
        assert not of_rank.any()
    for y, summed in kernel.reference(**kernel.make_inputs(case)):
        assert relative_error(y, want) < tolerance and relative_error(summed, total) < tolerance


def test_the_gate_of_a_rank_s_own_part_is_another():
    """What the paper's Figure 7 has on its left: gates of partial sums do not add up to the gate of the sum."""
    case = CASES[0]
    x, packed, made, parts, (up, gates, scales), behind = problem(case)
    values = case["rows"] + made.down.shape[1]
    wrong = torch.zeros(1, case["rows"])
    nothing = torch.zeros_like(behind[0])
    for own, part, down in parts:
        sums = torch.zeros(values)
        kernel.give(own, part, down, scales, [sums])
        wrong += kernel.take(sums, up, gates, scales, nothing, behind[1], 1e-5)[1].float()
    _, total = whole(x, packed, made, nothing, behind[1])
    assert relative_error(wrong, total) > 0.02


def test_a_rank_that_gives_nothing_is_waited_for_and_named(monkeypatch):
    monkeypatch.setattr(kernel, "PATIENCE", 0.01)
    case = CASES[3]
    *_, parts, (up, gates, scales), behind = problem(case)
    memory = memories(case)
    own, part, down = parts[0]
    kernel.give(own, part, down, scales, [of_rank[0] for of_rank in memory])
    with pytest.raises(TimeoutError, match="a rank gave no partial sums"):
        kernel.take(memory[0], up, gates, scales, *behind, 1e-5)


def test_kernels_are_known_before_they_are_launched(monkeypatch, loaded_kernels):
    """What `loads` compiles is what `give` and `take` load, each by itself."""
    loaded = loaded_kernels
    for plan in (kernel._product_plan, kernel._latent_plan, kernel._take_plan):
        monkeypatch.setattr(kernel, plan.__name__, plan.__wrapped__)
    case = CASES[0]
    x, packed, made, parts, (up, gates, scales), behind = problem(case)
    own, part, down = parts[0]
    memory = torch.zeros(2, 99, dtype=torch.int64)
    config = wna16_gemv.configuration(part.rows, part.columns, 4, 1, "cpu")
    kernel.give(own, part, down, scales, [memory[0]] * 2, config=config)
    kernel.take(memory, up, gates, scales, *behind, 1e-5, on_kernel=True)
    kernel.give(own, part, down, scales, [torch.zeros(99)], config=config)
    kernel.take(torch.zeros(part.rows + 16), up, gates, scales, *behind, 1e-5, on_kernel=True)
    launched = set(loaded)
    loaded.clear()
    for call in kernel.loads(part, 16, 4, (1, 2), 99, own.dtype, torch.device("cpu")):
        call()
    of_one_rank = [(name, macros) for name, macros in loaded if name == "wna16_gemv" and "RANKS" not in dict(macros)]
    assert len(of_one_rank) == 1
    assert set(loaded) - set(of_one_rank) == launched and len(launched) == 6


def test_more_ranks_than_a_launch_has_addresses_are_refused():
    own, part, down = problem(CASES[3])[3][0]
    with pytest.raises(UserError, match="5 ranks; the kernel gives partial sums to at most 4"):
        kernel.give(own, part, down, None, [torch.zeros(99)] * 5)


@nvcc.NEEDS_NVCC
def test_sources_compile_for_a_gpu():
    give = wna16_gemv.defines(4, 0, 5504, False, torch.bfloat16, 1, kernel.CHECKED[1]) | {"RANKS": 2}
    latent = {"K": 5504, "RANK": 32, "HIDDEN": 0, "BF16": 1, "SPLITS": ec.SPLITS, "RANKS": 2}
    take = {"OUTPUTS": 8192, "RANKS": 4, "STRIDE": 8224, "RANK": 32, "HIDDEN": 4, "BF16": 1, "SPLITS": 8}
    take |= {"THREADS": 1024}
    for source, macros in ((wna16_gemv.SOURCE, give), (ec.SOURCE, latent), (kernel.SOURCE, take)):
        nvcc.compile_cubin(source, macros)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", [case for case in kernel.CASES if not case["collected"]], ids=str)
def test_ranks_one_after_the_other_on_one_gpu(case):
    """All ranks on one device, whose memories are all of this process; several times into the same memory."""
    x, packed, made, parts, (up, gates, scales), behind = problem(case, GPU)
    want, total = whole(x, packed, made, *(tensor.cpu() for tensor in behind))
    tolerance = ROUNDING[case["dtype"]]
    memory = memories(case, GPU)
    for _ in range(3):
        for rank, (own, part, down) in enumerate(parts):
            kernel.give(own, part, down, scales, [of_rank[rank] for of_rank in memory])
        for of_rank in memory:
            y, summed = kernel.take(of_rank, up, gates, scales, *behind, 1e-5)
            assert relative_error(y.cpu(), want) < 2 * tolerance
            assert relative_error(summed.cpu(), total) < tolerance
    assert not torch.stack(memory).any()
