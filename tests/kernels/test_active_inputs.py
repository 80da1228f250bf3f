"""The source of the list of active inputs and of its producers on a CPU, in clusters and without them."""

import cuda_on_cpu
import nvcc
import pytest
import torch
from relative_error import relative_error

pytest.importorskip("triton")

from repro.kernels import active_inputs, nvrtc, rms_norm_active, silu_product_active  # noqa: E402

CASES = [  # values, dtype, blocks of a cluster
    (2311, "float32", 8),
    (520, "float16", 8),
    (9000, "bfloat16", 1),
]


def normal(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


@pytest.fixture(params=CASES, ids=str)
def case(request, monkeypatch):
    """Values and dtype; launches are emulated, with the blocks of the case."""
    columns, dtype, blocks = request.param
    why = None if blocks > 1 else "it has no clusters"
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    monkeypatch.setattr(active_inputs, "lacks", lambda kernel, device, capability: why)
    return columns, dtype


@cuda_on_cpu.NEEDS_COMPILER
def test_a_list_is_in_order_and_has_what_is_no_number(case):
    columns, dtype = case
    x = normal(1, columns, dtype=dtype)
    x[0, 5] = torch.nan
    for threshold in (0.7, 0.0, 1e4):
        assert torch.equal(active_inputs.launch(x, threshold), active_inputs.reference(x, threshold))


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("residual", [False, True])
def test_a_norm_lists_its_own_output(case, residual):
    """The sum bit for bit; the norm but for the order in which squares are added up."""
    columns, dtype = case
    x, other = normal(1, columns, dtype=dtype), normal(1, columns, dtype=dtype, seed=1)
    weight = 1 + normal(columns, dtype=dtype, seed=2) / 4
    operands = (x, weight, 1e-5, 0.7, other if residual else None)
    y, total, active = rms_norm_active.launch(*operands)
    want, sums, _ = rms_norm_active.reference(*operands)
    assert torch.equal(total, sums) and torch.equal(active, active_inputs.reference(y, 0.7))
    assert relative_error(y, want) <= torch.finfo(x.dtype).eps
    assert 0.2 * columns < int(active[0]) < 0.8 * columns


@cuda_on_cpu.NEEDS_COMPILER
def test_a_gated_product_lists_its_own_output(case):
    columns, dtype = case
    x = 4 * normal(1, 2 * columns, dtype=dtype)
    x[0, 3], x[0, 4] = -1e4, torch.nan  # whose exponential is infinite; no number
    y, active = silu_product_active.launch(x, 3.0)
    want = silu_product_active.reference(x, 3.0)[0]
    torch.testing.assert_close(y, want, rtol=torch.finfo(x.dtype).eps, atol=1e-6, equal_nan=True)
    listed = active[1 : 1 + int(active[0])].tolist()
    assert torch.equal(active, active_inputs.reference(y, 3.0)) and 4 in listed and 3 not in listed


@pytest.mark.parametrize("blocks", [1, 8])
@pytest.mark.parametrize("columns", [1, 64, 4096, 14336, 28672, active_inputs.MOST])
def test_blocks_have_a_thread_for_every_value(columns, blocks):
    sizes = active_inputs.sizes(columns, blocks)
    values = blocks * 32 * sizes["WARPS"] * 8 * sizes["VECTORS"]
    assert 1 <= sizes["WARPS"] <= 32 and values >= columns
    assert columns < 4096 or values < 1.3 * columns


@nvcc.NEEDS_NVCC
@pytest.mark.parametrize("makes", [active_inputs.NOTHING, active_inputs.NORM, active_inputs.GATED])
@pytest.mark.parametrize("arch", ["sm_90a", *(pytest.param(a, marks=pytest.mark.slow) for a in ("sm_80", "sm_100"))])
def test_the_source_compiles_without_spills(arch, makes):
    blocks = 1 if arch == "sm_80" else 8
    macros = {"MAKES": makes, "RESIDUAL": 1, "TYPE": 2, "ALIGNED": 1, "CLUSTER": blocks}
    macros |= active_inputs.sizes(14336, blocks)
    report = nvcc.ptxas_report(active_inputs.SOURCE, macros, arch)
    assert " 0 bytes spill stores" in report, report
