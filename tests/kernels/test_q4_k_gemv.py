"""Products with Q4_K: their sources on a CPU against the float64 references, and compiled; on a GPU for real."""

import struct
import types

import cuda_on_cpu
import nvcc
import pytest
import torch
from relative_error import relative_error

pytest.importorskip("triton")

from repro.bench import operator_tasks  # noqa: E402
from repro.bench.kernel_list import load  # noqa: E402
from repro.kernels import nvrtc, q4_k_gemv, q4_k_planes, zigzag_gemv  # noqa: E402

ROWS = {"warps": 2, "blocks": 1, "ahead": 2}
BANDS = {"n1": 3, "n2": 2, "stages": 2, "blocks": 1}
CASES = [  # operator, shape, what differs from the configurations above
    ("q4_k_gemv", {"N": 19, "K": 1280, "dtype": "bfloat16"}, {"ahead": 3}),  # a ragged tile; a warp has one unit more
    ("q4_k_gemv", {"N": 40, "K": 512, "dtype": "float16"}, {}),  # two tiles at a time, of three or two
    ("q4_k_gemv", {"N": 33, "K": 1792, "dtype": "bfloat16"}, {}),  # half of a tile at a time
    ("q4_k_gemv", {"N": 5, "K": 256, "dtype": "bfloat16"}, {"warps": 3, "ahead": 1}),  # warps without super-blocks
    ("q4_k_gemv", {"N": 19, "K": 1280, "dtype": "float16"}, {"blocks": 16, "ahead": 1}),  # x in shared memory
    ("zigzag_gemv", {"N": 300, "K": 333, "dtype": "bfloat16", "ordered": True}, {}),  # an odd number of columns
    ("zigzag_gemv", {"N": 256, "K": 97, "dtype": "float16", "ordered": True}, {"n1": 1, "n2": 1, "stages": 1}),
    ("zigzag_gemv", {"N": 20, "K": 30, "dtype": "bfloat16", "ordered": False}, {"n1": 2, "stages": 3}),
    ("zigzag_gemv", {"N": 300, "K": 133, "dtype": "bfloat16", "ordered": False}, {"n1": 7, "n2": 1, "cluster": True}),
    ("zigzag_gemv", {"N": 300, "K": 133, "dtype": "bfloat16", "ordered": False}, {"n1": 7, "n2": 1, "posts": True}),
    ("zigzag_sparse", {"N": 300, "K": 97, "dtype": "float16", "ordered": True}, {"n1": 2, "posts": True}),
    ("zigzag_sparse", {"N": 512, "K": 97, "dtype": "float16", "ordered": False}, {"n1": 2, "cluster": True}),
    ("zigzag_sparse", {"N": 20, "K": 200, "dtype": "bfloat16"}, {"n1": 13, "n2": 1, "cluster": True}),  # more than 8
    ("zigzag_sparse", {"N": 300, "K": 333, "dtype": "bfloat16", "ordered": True}, {}),
    ("zigzag_sparse", {"N": 512, "K": 97, "dtype": "float16", "ordered": False}, {"stages": 3}),
    ("zigzag_masked", {"N": 300, "K": 333, "dtype": "bfloat16", "ordered": True}, {}),
    ("zigzag_masked", {"N": 40, "K": 97, "dtype": "float16", "ordered": False}, {"n1": 2}),
]
FP16 = 5e-4  # relative error that is allowed where x, d and scale are one float16


def made(name, case):
    module = load(name)
    return module, module.make_inputs({"seed": 3, "share": 0.4, "ordered": True} | case)


def emulate(monkeypatch, name, inputs, config):
    """The operator's own launch path, its source compiled as C++ for the CPU."""
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    monkeypatch.setattr(q4_k_gemv, "processors", lambda device: 2)  # so that a thread block has some tiles of rows
    return load(name).launch(**inputs, config=config)


def in_double(module, inputs):
    """The reference before its rounding to the dtype of x."""
    return module.reference(**inputs | {"x": inputs["x"].double()})


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("name, case, changes", CASES, ids=str)
def test_sources_on_the_cpu(name, case, changes, monkeypatch):
    """Copies and their waits, places of codes, scales and minima, ragged ends, sums of programs; same bits twice."""
    module, inputs = made(name, case)
    config = (ROWS if name == "q4_k_gemv" else BANDS) | changes
    outputs = [emulate(monkeypatch, name, inputs, config) for _ in range(2)]
    assert torch.equal(*outputs) and outputs[0].dtype == inputs["x"].dtype
    rounding = torch.finfo(inputs["x"].dtype).eps / 2
    assert relative_error(outputs[0], in_double(module, inputs)) < FP16 + rounding


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("name, config", [("q4_k_gemv", ROWS), ("zigzag_gemv", BANDS | {"n1": 1, "n2": 1})], ids=str)
def test_inputs_that_float16_cannot_hold(name, config, monkeypatch):
    """Scaled by powers of two: tiny and huge bfloat16 inputs, ones that grow along a warp's columns, zeros, and NaN."""
    module, inputs = made(name, {"N": 20, "K": 512, "dtype": "bfloat16"})
    x = inputs["x"]
    for scale in (1e-30, 1e30):
        grown = x * scale * torch.logspace(-4, 2, x.shape[1]).to(x.dtype)
        grown[0, :100] = 0
        large = inputs | {"x": grown}
        assert relative_error(emulate(monkeypatch, name, large, config), in_double(module, large)) < FP16 + 2**-8
    assert not emulate(monkeypatch, name, inputs | {"x": x * 0}, config).any()
    spoiled = x.clone()
    spoiled[0, 300] = torch.nan
    assert emulate(monkeypatch, name, inputs | {"x": spoiled}, config).isnan().all()


@cuda_on_cpu.NEEDS_COMPILER
def test_skipped_columns_are_not_read(monkeypatch):
    """Codes and headers of a column that is not listed, or not above the threshold, may be anything."""
    for name in ("zigzag_sparse", "zigzag_masked"):
        module, inputs = made(name, {"N": 40, "K": 97, "dtype": "bfloat16"})
        skipped = ~q4_k_planes.kept(inputs["x"], inputs.get("threshold", 0.0))[0]
        if name == "zigzag_sparse":
            skipped[:] = True
            skipped[inputs["active"][1 : 1 + int(inputs["active"][0])].long()] = False
        want = emulate(monkeypatch, name, inputs, BANDS)
        for plane in ("codes", "headers"):
            inputs[plane][:, skipped] = 255  # a scale that is NaN
        assert skipped.any() and torch.equal(emulate(monkeypatch, name, inputs, BANDS), want)


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("name, config", [("q4_k_gemv", ROWS), ("zigzag_gemv", BANDS)], ids=str)
def test_nothing_is_written_past_the_last_row(name, config, monkeypatch):
    _, inputs = made(name, {"N": 20, "K": 512, "dtype": "bfloat16"})
    around = torch.full((512,), 7, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: around[: shape[1]].view(shape))
    emulate(monkeypatch, name, inputs, config)
    assert (around[20:] == 7).all()


@cuda_on_cpu.NEEDS_COMPILER
def test_posted_sums_are_taken_away(monkeypatch):
    """A launch finds no sums of the one before; sums of 0 are posted, too."""
    module, inputs = made("zigzag_gemv", {"N": 40, "K": 97, "dtype": "bfloat16"})
    config = BANDS | {"n2": 1, "posts": True}
    for factor in (1, 0, 2):
        scaled = inputs | {"x": inputs["x"] * factor}
        want = in_double(module, scaled)
        assert (emulate(monkeypatch, "zigzag_gemv", scaled, config) - want).norm() <= 4e-3 * want.norm()  # 0 too


class Noted:
    """A kernel that launches nothing and notes the parameters and the tensors of each launch."""

    def __init__(self, launched):
        self.launched = launched

    def step(self, grid, block, parameters):
        return parameters

    def in_a_row(self, names, steps):
        (parameters,) = steps
        return lambda *tensors: self.launched.append((parameters, dict(zip(names, tensors, strict=True))))


def test_programs_that_do_not_fit_post_nothing(monkeypatch):
    """They would wait for programs that wait for their place."""
    _, inputs = made("zigzag_gemv", {"N": 600, "K": 97, "dtype": "bfloat16"})
    programs = []

    def load(path, name, macros, *rest):
        programs.append(macros["PROGRAMS"])
        return Noted([])

    monkeypatch.setattr(nvrtc, "load", load)
    for processors in (8, 9):
        monkeypatch.setattr(zigzag_gemv, "processors", lambda device, count=processors: count)
        zigzag_gemv.launch(**inputs, config=BANDS | {"posts": True})
    assert programs == [1, 3]


@cuda_on_cpu.NEEDS_COMPILER
def test_a_list_of_nothing_gives_zeros(monkeypatch):
    _, inputs = made("zigzag_sparse", {"N": 40, "K": 97, "dtype": "bfloat16"})
    inputs["active"] = torch.zeros_like(inputs["active"])
    assert not emulate(monkeypatch, "zigzag_sparse", inputs, BANDS).any()


def test_float32_is_refused_on_a_gpu():
    _, inputs = made("zigzag_gemv", {"N": 40, "K": 256, "dtype": "float32"})
    assert q4_k_planes.misfit(inputs["x"], inputs["codes"], 40) is None
    on_gpu = types.SimpleNamespace(is_cuda=True, dtype=torch.float32, shape=inputs["x"].shape)
    assert "x is float32; on a GPU" in q4_k_planes.misfit(on_gpu, inputs["codes"], 40)


def test_configurations_fit_an_sm():
    """227 KB of shared memory and 64 K registers, of which a source takes at least 56 or 120 a thread."""
    in_registers = [q4_k_gemv.kept(q4_k_gemv.heuristic(columns), columns // 256) for columns in (4096, 14336, 28672)]
    assert in_registers == [True, True, False]
    for columns in (1024, 4096, 5120, 11008, 16384, 28672):
        tried = [config for config in q4_k_gemv.SPACE if q4_k_gemv.worth_trying(config, columns)]
        assert 5 < len(tried) < 70 and q4_k_gemv.heuristic(columns) in q4_k_gemv.SPACE
        assert q4_k_gemv.heuristic(columns) in tried
        for config in tried:
            how = q4_k_gemv.plan(57344, columns, torch.bfloat16, config, 132)
            assert config["blocks"] * (how.shared + 1024) <= 228 * 1024
            assert 32 * config["warps"] * config["blocks"] <= 1024
    for config in zigzag_gemv.SPACE:
        assert config["blocks"] * (zigzag_gemv.shared_bytes(config) + 1024) <= 228 * 1024
        assert 32 * config["n2"] * config["blocks"] <= 512


SHAPES = [(112, 8192), (32, 28672), (56, 4096), (16, 14336), (4, 4096), (1, 40), (400, 9)]


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("bands, columns", SHAPES)
def test_programs_fill_the_device_in_one_wave(bands, columns, clusters):
    config = zigzag_gemv.heuristic(bands, columns, clusters=clusters)
    assert config in zigzag_gemv.SPACE and config.get("cluster", False) == (clusters and 48 <= bands < 264)
    assert bands * config["n1"] <= 132 * config["blocks"] or config["n1"] == 1
    assert columns < 4096 or bands < 16 or zigzag_gemv.fill(config, bands) >= 0.84
    tried = [config for config in zigzag_gemv.SPACE if zigzag_gemv.worth_trying(config, bands)]
    assert bands > 112 or 3 < len(tried) < 140


@nvcc.NEEDS_NVCC
@pytest.mark.parametrize("arch", ["sm_90a", *(pytest.param(a, marks=pytest.mark.slow) for a in ("sm_80", "sm_100"))])
def test_the_sources_compile_without_spills(arch):
    """Registers that a launch configuration leaves are enough."""
    forms = [(zigzag_gemv.SOURCE, zigzag_gemv.defines(1, True, torch.bfloat16, zigzag_gemv.FORMS[0] | {"n1": 8}))]
    if arch != "sm_80":
        config = zigzag_gemv.heuristic(56, 4096)
        forms.append((zigzag_gemv.SOURCE, zigzag_gemv.defines(1, True, torch.bfloat16, config)))
    for columns in (4096, 5120):
        how = q4_k_gemv.plan(8192, columns, torch.bfloat16, q4_k_gemv.heuristic(columns), 132)
        forms.append((q4_k_gemv.SOURCE, how.macros))
    for source, macros in forms:
        report = nvcc.ptxas_report(source, macros, arch)
        assert " 0 bytes spill stores, 0 bytes spill loads" in report, report


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["q4_k_gemv", "zigzag_gemv", "zigzag_sparse", "zigzag_masked"])
def test_sources_on_a_gpu(name):
    """Every case with several configurations; three times, with the same bits where the order is fixed."""
    module = load(name)
    for case in module.CASES:
        inputs = module.make_inputs(case, "cuda")
        want = module.reference(**inputs).double()
        tolerance = operator_tasks.tolerance(name, getattr(torch, case["dtype"]))
        for config in (None, *module.SPACE[:: max(1, len(module.SPACE) // 12)]):
            outputs = [module.launch(**inputs, config=config) for _ in range(3)]
            if inputs.get("ordered", True):
                assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
            for output in outputs:
                assert relative_error(output, want) <= tolerance, (case, config)


@pytest.mark.parametrize("name", ["zigzag_gemv", "zigzag_sparse", "zigzag_masked"])
@pytest.mark.parametrize("more", [{"posts": True}, {"cluster": True}, {}], ids=str)
def test_a_call_gives_its_own_tensors_alone(name, more, monkeypatch):
    """Sums and tickets of programs are in memory that stays, whatever else wants such memory meanwhile."""
    launched = []
    monkeypatch.setattr(nvrtc, "load", lambda *what: Noted(launched))
    monkeypatch.setattr(q4_k_planes, "SCRATCH", {})
    module, inputs = made(name, {"N": 300, "K": 133, "dtype": "bfloat16", "ordered": True})
    config = BANDS | {"n1": 7, "n2": 1} | more
    inputs.pop("ordered")
    call = module.prepare(**inputs, config=config)
    _, larger = made(name, {"N": 600, "K": 133, "dtype": "bfloat16", "ordered": True})
    module.prepare(**larger, config=config)
    y = call(*inputs.values())
    ((parameters, tensors),) = launched
    given = {"codes", "headers", "x", "y"} | ({"active"} if name == "zigzag_sparse" else set())
    assert set(tensors) == {parameter for parameter in parameters if isinstance(parameter, str)} == given
    assert tensors.pop("y") is y and all(tensor is inputs[key] for key, tensor in tensors.items())
    *_, parts, tickets, rows, columns, programs, threshold = parameters
    sums = 2 * 7 * 7 * -(-256 // 7) if more.get("posts") else 2 * 256 * 7
    assert parts.numel() >= sums and tickets.numel() >= 2 and (rows, columns, programs) == (300, 133, 7)
    assert struct.pack("<i", threshold) == struct.pack("<f", inputs.get("threshold", 0.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_posts_in_a_graph_on_a_gpu():
    """Programs are on the device at once in a replay, too, and the driver refuses more of them than fit."""
    module, inputs = made("zigzag_gemv", {"N": 4096, "K": 1024, "dtype": "bfloat16"})
    inputs = {key: value.cuda() if torch.is_tensor(value) else value for key, value in inputs.items()}
    config = {"n2": 8, "stages": 2, "blocks": 2, "n1": 16, "posts": True}
    call = module.prepare(**inputs, config=config)
    want = in_double(module, inputs)
    assert relative_error(call(*inputs.values()), want) <= 4e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(*inputs.values())
    for factor in (2, -0.5):
        inputs["x"].mul_(factor)
        graph.replay()
        assert relative_error(y, in_double(module, inputs)) <= 4e-3
    macros = zigzag_gemv.defines(zigzag_gemv.ALL, True, torch.bfloat16, config)
    function = nvrtc.load(zigzag_gemv.SOURCE, "zigzag", macros, torch.device("cuda", 0), module.shared_bytes(config))
    step = function.step(16 * 1024, 256, (*[inputs["x"]] * 7, 4096, 1024, 16, 0))
    with pytest.raises(RuntimeError, match="COOPERATIVE_LAUNCH_TOO_LARGE"):
        function.in_a_row((), (step,))()
