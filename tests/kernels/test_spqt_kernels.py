"""Q4_K in two planes and its products on a CPU, against ggml's bytes and plain loops.

The Triton kernels run in the interpreter in `test_kernels_triton.py`.
"""

import pytest
import torch
from fake_device import Host
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import every_case

pytest.importorskip("triton")

from repro.bench import operator_tasks, timing  # noqa: E402
from repro.bench.kernel_list import load  # noqa: E402
from repro.kernels import active_inputs as lists  # noqa: E402
from repro.kernels import q4_k_planes as planes  # noqa: E402
from repro.methods.spqt import layout, q4_k  # noqa: E402
from repro.methods.spqt.q4_k_weight import pack  # noqa: E402

PRODUCERS = ("rms_norm_active", "silu_product_active")
NAMES = (*PRODUCERS, "active_inputs", "q4_k_gemv", "q4_k_naive_sparse", "zigzag_gemv", "zigzag_sparse", "zigzag_masked")
FAST = settings(max_examples=10, deadline=None, derandomize=True)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small(name, **changes):
    module = load(name)
    return module.make_inputs(module.CASES[0] | changes)


def op(name):
    return getattr(torch.ops.lowbit, name)


# --- the format -------------------------------------------------------------------------------------------------------


@FAST
@given(st.binary(min_size=144 * 3, max_size=144 * 3))
def test_any_bytes_mean_the_same_in_planes(data):
    blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(3, 144)
    codes, headers = layout.to_planes(blocks)
    assert torch.equal(layout.from_planes(codes, headers), blocks)
    weights = planes.dequantize(codes[None], headers[None])[0]
    torch.testing.assert_close(weights.float(), q4_k.decode(blocks), rtol=1e-6, atol=0, equal_nan=True)


@settings(FAST, max_examples=5)
@given(st.integers(1, 3), st.integers(1, 600), st.integers(1, 40), st.integers(0, 99))
def test_planes_of_a_quantized_weight_are_the_weight(supers, rows, columns, seed):
    """Ragged in both layouts: any number of rows in rows, any number of rows and columns in zigzag."""
    columns = min(columns, 1 + 4000 // rows)
    row = pack({"w": normal(1 + rows % 5, 256 * supers, seed=seed)}, "row")["w"]
    codes, headers = layout.to_planes(row.blocks.view(len(row.blocks), supers, 144))
    torch.testing.assert_close(planes.dense(codes, headers, False).float(), row.dequantize(), rtol=1e-6, atol=1e-9)

    band = pack({"w": normal(rows, columns, seed=seed)}, "zigzag-planes")["w"]
    codes, headers = band.stack
    assert codes.shape == (-(-rows // 256), columns, 128) and headers.shape == (*codes.shape[:2], 16)
    whole = planes.dense(codes, headers, True)
    torch.testing.assert_close(whole[:rows].float(), band.dequantize(), rtol=1e-6, atol=1e-9)


def test_random_planes_have_about_the_variance_of_a_layer():
    for zigzag in (False, True):
        made = planes.make_planes(512, 512, zigzag, 0)
        weights = planes.dense(**made, zigzag=zigzag)
        assert weights.isfinite().all() and 0.3 < weights.std() * 512**0.5 < 3


# --- products ---------------------------------------------------------------------------------------------------------


def by_loops(weight, x, indices):
    """float64 `[N]`, one listed column after the other."""
    y = torch.zeros(len(weight), dtype=torch.float64)
    for k in indices:
        y += weight[:, k].double() * x[0, k].double()
    return y


@FAST
@given(st.integers(1, 300), st.integers(1, 60), st.floats(0, 1.5), st.integers(0, 99))
def test_zigzag_products_are_loops_over_the_listed_columns(rows, columns, threshold, seed):
    codes, headers = planes.make_planes(rows, columns, True, seed).values()
    x, dense = normal(1, columns, seed=seed + 1), planes.dense(codes, headers, True)[:rows]
    active = op("active_inputs")(x, threshold)
    indices = [k for k in range(columns) if abs(x[0, k].item()) > threshold]
    assert active.tolist() == [len(indices), *indices, *[0] * (columns - len(indices))]
    wanted = by_loops(dense, x, indices)
    for y in (
        op("zigzag_sparse")(x, codes, headers, rows, active),
        op("zigzag_masked")(x, codes, headers, rows, threshold),
    ):
        torch.testing.assert_close(y[0].double(), wanted, rtol=1e-5, atol=1e-5)
    y = op("zigzag_gemv")(x, codes, headers, rows)
    torch.testing.assert_close(y[0].double(), by_loops(dense, x, range(columns)), rtol=1e-5, atol=1e-5)


@FAST
@given(st.integers(1, 3), st.integers(1, 5), st.floats(0, 1.5), st.integers(0, 99))
def test_row_products_are_loops_over_the_listed_columns(supers, rows, threshold, seed):
    codes, headers = planes.make_planes(rows, 256 * supers, False, seed).values()
    x, dense = normal(1, 256 * supers, seed=seed + 1), planes.dense(codes, headers, False)
    active = op("active_inputs")(x, threshold)
    listed = active[1 : 1 + int(active[0])].tolist()
    y = op("q4_k_naive_sparse")(x, codes, headers, active)
    torch.testing.assert_close(y[0].double(), by_loops(dense, x, listed), rtol=1e-5, atol=1e-5)
    y = op("q4_k_gemv")(x, codes, headers)
    torch.testing.assert_close(y[0].double(), by_loops(dense, x, range(256 * supers)), rtol=1e-5, atol=1e-5)


def test_an_input_that_is_no_number_is_listed_and_reaches_every_output():
    inputs = small("zigzag_masked")
    inputs["x"][0, 5] = torch.nan
    assert op("zigzag_masked")(**inputs).isnan().all()
    active = op("active_inputs")(inputs["x"], inputs["threshold"])
    assert 5 in active[1 : 1 + int(active[0])]


def test_scratch_memory_that_a_graph_holds_is_never_replaced(monkeypatch):
    monkeypatch.setattr(planes, "SCRATCH", {})

    def scratch(values):
        return planes.scratch("it", values, torch.int32, torch.device("cpu"))

    small_one, large = scratch(5), scratch(9)
    assert small_one.numel() >= 5 and large.numel() >= 9 and not large.any()
    assert scratch(7) is small_one and scratch(16) is large


def test_a_list_of_nothing_gives_zeros():
    inputs = small("zigzag_sparse")
    inputs["active"] = op("active_inputs")(inputs["x"], 100.0)
    assert inputs["active"][0] == 0 and not op("zigzag_sparse")(**inputs).any()


@pytest.mark.parametrize("name", NAMES)
def test_operators_are_traceable(name):
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(op(name).default, (), small(name), test_utils=checks)


# --- tasks of the timer -----------------------------------------------------------------------------------------------

BYTES = {  # of the first cases, by hand
    "active_inputs": 4 * (2311 + 2312),
    "rms_norm_active": 4 * (5 * 1301 + 1302),
    "silu_product_active": 4 * (3 * 1301 + 1302),
    "q4_k_gemv": 144 * 67 * 2 + 2 * (512 + 67),
    "q4_k_naive_sparse": 144 * 67 * 2 + 2 * (512 + 67) + 4 * 257,
    "zigzag_gemv": 144 * 333 * 2 + 2 * (333 + 300),
    "zigzag_sparse": 144 * 166 * 2 + 2 * (333 + 300) + 4 * 167,
    "zigzag_masked": 144 * 166 * 2 + 2 * (333 + 300),
}


@pytest.mark.parametrize("name", NAMES)
def test_tasks_are_sound_and_count_what_is_read(name):
    task = operator_tasks.task(name, load(name).CASES[0], name, "cpu")
    (timed,) = timing.measure([task], Host(), timing.WARM, rounds=3)
    assert timed.nbytes == BYTES[name] and timed.facts["provider"] == name


@pytest.mark.parametrize("name", PRODUCERS)
def test_a_producer_lists_its_own_output(name):
    inputs = small(name)
    *vectors, active = op(name)(**inputs)
    alone = op(name.removesuffix("_active"))(**{key: v for key, v in inputs.items() if key != "threshold"})
    for output, want in zip(vectors, alone if isinstance(alone, tuple) else (alone,), strict=True):
        assert torch.equal(output, want)
    assert torch.equal(active, op("active_inputs")(vectors[0], inputs["threshold"]))


def test_a_list_in_any_order_is_checked_by_its_count():
    task = operator_tasks.task("active_inputs", lists.CASES[1], "active_inputs", "cpu")
    assert task.want(**task.inputs).shape == (1,)


# --- GPU --------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name, case", every_case(NAMES), ids=str)
def test_kernels_on_a_gpu(name, case):
    """Against the reference; three times, with the same bits where the order is fixed."""
    module = load(name)
    inputs = module.make_inputs(case, "cuda")
    want, outputs = module.reference(**inputs), [module.launch(**inputs) for _ in range(3)]
    ordered = inputs.get("ordered", True)
    if name == "active_inputs":
        for active in outputs:
            assert torch.equal(active if ordered else lists.in_order(active), want)
        return
    if name in PRODUCERS:
        for y, *_, active in outputs:
            assert torch.equal(active, lists.reference(y, inputs["threshold"]))
        outputs, want = [y for y, *_ in outputs], want[0]
    if ordered:
        assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    bound = operator_tasks.tolerance(name, getattr(torch, case["dtype"]))
    for y in outputs:
        assert (y.double() - want.double()).norm() <= bound * want.double().norm()
