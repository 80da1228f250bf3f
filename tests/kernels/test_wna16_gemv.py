"""The decode kernel: its arithmetic lane by lane, its operator on a CPU, its source for three architectures."""

import contextlib
import ctypes
import itertools
import sys
from types import SimpleNamespace

import cuda_on_cpu
import nvcc
import pytest
import torch
from relative_error import ROUNDING, relative_error

from repro.kernels import nvrtc
from repro.kernels import wna16_gemv as kernel
from repro.kernels.launch_config import FOLDER, configurations
from repro.kernels.packing import block_columns, dequantize, pack, unpack

GPU = torch.device("cuda")
SMALL = [case for case in kernel.CASES if case["rows"] * case["columns"] < 1 << 20]


def emulate(x, packed):
    """What the lanes of wna16_gemv.cu compute for all tiles at once: the same operands, from the packed words."""
    bits, bf16 = packed.bits, x.dtype == torch.bfloat16 and x.shape[0] > 1  # one row becomes float16, scaled
    raised = 0 if bits == 8 or (bits == 4 and bf16) else bits
    spread, sum_in_low = bits == 2 and not bf16, bits == 4 and not bf16
    magic = 0x43004300 if bf16 else 0
    tiles, blocks = packed.codes.shape[:2]
    kb, m = block_columns(bits), x.shape[0]
    xs = torch.zeros(m, blocks * kb, dtype=torch.float64)
    xs[:, : packed.columns] = x.double()
    words = packed.codes.view(tiles, blocks, 8, 4, 4)  # lanes as (g, t)
    group = packed.group or blocks * kb
    groups = -(-blocks * kb // group)
    c = torch.zeros(2, tiles, groups, 2, 8, m, dtype=torch.float64)  # two chains; rows g and g+8

    def values(registers):
        """float64 [..., 2]: the halves of an operand register as the tensor core reads them."""
        return registers.contiguous()[..., None].view(torch.bfloat16 if bf16 else torch.float16).double()

    def upper(w):
        return w >> 8 & 0x00FF00FF

    for block, pair, i in itertools.product(range(blocks), range(kb // 32), range(2)):
        lane = words[:, block]
        if bits == 8:
            w, v = lane[..., 2 * i], lane[..., 2 * i + 1]
            parts = [w, w >> 8, v, v >> 8]
            if bf16:
                a = [values(p & 0x000F000F | magic) + values(p >> 4 & 0x000F000F | 0x45004500) for p in parts]
            else:
                a = [values(p) for p in (w & 0x00FF00FF, upper(w), v & 0x00FF00FF, upper(v))]
        elif bits == 4:
            w = lane[..., 2 * pair + i]
            v = upper(w)
            if bf16:
                a = [values(p & 0x000F000F | magic) for p in (w, w >> 4, v, v >> 4)]
            else:
                a = [values(p) for p in (w & 0x00FF00FF, w & 0x00F000F0, v, v & 0x00F000F0)]
        else:
            w, v = lane[..., pair], upper(lane[..., pair])
            if not spread:
                w, v = w >> 4 * i, v >> 4 * i
            mask = 0x00030003 << (4 * i if spread else 0)
            a = [values(p | magic) for p in (w & mask, w & mask << 2, v & mask, v & mask << 2)]
        # The operand's low columns meet b0 and its high ones b1: (step, pair of e) of x for either.
        low, high = ((0, i), (1, i)) if bits == 2 else ((i, 0), (i, 1))
        for half, t, e in itertools.product(range(2), range(4), range(2)):
            for operand, (step, two) in ((a[half], low), (a[2 + half], high)):
                column = block * kb + 32 * pair + 8 * t + 4 * step + 2 * two + e
                c[i, :, column // group, half] += operand[:, :, t, e][..., None] * xs[:, column]
    _, scales, zeros = unpack(packed)
    s, z = (torch.zeros(tiles * 16, packed.groups, dtype=torch.float64) for _ in range(2))
    s[: packed.rows], z[: packed.rows] = scales.double(), zeros.double()
    s, z = s.view(tiles, 2, 8, -1), z.view(tiles, 2, 8, -1)
    offset = 0 if not bf16 else 2176 if bits == 8 else 128
    y = torch.zeros(tiles, 2, 8, m, dtype=torch.float64)
    for i in range(packed.groups):
        both = c[0, :, i] + c[1, :, i] / (16 if spread else 1)
        if sum_in_low:
            both[:, 0] -= both[:, 1]
        for half in range(2):
            unit = (1 if bf16 else 2.0**-24) * (1 << raised if half else 1)
            sums = unit * xs[:, i * group : (i + 1) * group].sum(1)
            zero = z[:, half, :, i] + offset / (1 << raised if half else 1)
            y[:, half] += s[:, half, :, i][..., None] * (both[:, half] - zero[..., None] * sums) / unit
    return y.reshape(tiles * 16, m).T[:, : packed.rows]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_arithmetic_of_the_fragments(bits, group, dtype):
    """Masks, subnormals, offsets and raised rows give the product of the dequantized weight, in exact arithmetic."""
    columns = 200 if group == 0 else 2 * 128 + group
    for symmetric, m in ((False, 3), (True, 3), (False, 1)):
        case = {"rows": 40, "columns": columns, "bits": bits, "group": group, "symmetric": symmetric, "m": m, "seed": 1}
        x, packed = kernel.make_inputs(case, dtype=dtype)
        want = kernel.reference(x, packed)
        assert relative_error(emulate(x, packed), want) < 1e-6


def run_source(x, packed, config, monkeypatch):
    """The operator's own launch path, but the .cu file is compiled as C++ and runs on the CPU."""
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    monkeypatch.setattr(kernel, "unsupported", lambda device: None)
    kernel._plan.cache_clear()
    y = kernel.launch(x, packed, config)
    kernel._plan.cache_clear()
    return y


def configurations_of_the_source():
    """Every width, group, type and number of columns, each with another launch configuration and a ragged shape."""
    launches = itertools.cycle(
        [
            (4, 1, 128, 2, 1),
            (2, 2, 128, 1, 1),
            (2, 1, 256, 3, 2),
            (1, 4, 128, 4, 1),
            (2, 1, 128, 2, 4),
            (4, 1, 512, 1, 1),
        ]
    )
    formats = itertools.product((2, 4, 8), (0, 32, 64, 128), (torch.float16, torch.bfloat16))
    for i, (bits, group, dtype) in enumerate(formats):
        columns = {0: 1352, 32: 1056, 64: 1216, 128: 1408}[group]
        case = {"rows": 40, "columns": columns, "bits": bits, "group": group, "symmetric": i % 3 == 0, "seed": i}
        config = dict(zip(("warps", "tiles", "chunk", "stages", "splits"), next(launches)))
        yield case | {"m": (1, 1, 3, 11)[(i + i // 4) % 4]}, dtype, config
    case = {"rows": 40, "columns": 1536, "bits": 4, "group": 128, "symmetric": False, "seed": 0, "m": 1}
    for launch, dtype in itertools.product([(4, 1, 384, 1, 1), (2, 2, 384, 1, 2)], (torch.float16, torch.bfloat16)):
        yield case, dtype, dict(zip(("warps", "tiles", "chunk", "stages", "splits"), launch))  # a chunk for every warp


def most_of_them_slow():
    """Each case is compiled by itself, which takes more than a second; those that always run differ in everything."""
    for number, case in enumerate(configurations_of_the_source()):
        always = number % 8 in (0, 3, 5)
        yield pytest.param(*case, marks=() if always else pytest.mark.slow)


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("case, dtype, config", most_of_them_slow(), ids=str)
def test_source_on_the_cpu(case, dtype, config, monkeypatch):
    """The .cu file itself: indices, copies and their waits, swizzles, chains, ragged ends, clusters."""
    x, packed = kernel.make_inputs(case, dtype=dtype)
    y = run_source(x, packed, config | {"blocks": 1}, monkeypatch)
    want = kernel.reference(x, packed)
    assert relative_error(y, want) < ROUNDING[str(dtype)[6:]]


@cuda_on_cpu.NEEDS_COMPILER
def test_one_chunk_a_warp_and_several_stages_read_nothing_past_the_codes(monkeypatch):
    """What an unknown device uses at K = 512: a stage that has no chunk must not copy one."""
    case = {"rows": 16, "columns": 512, "bits": 4, "group": 128, "symmetric": False, "seed": 0, "m": 16}
    config = kernel.heuristic(16, 512, 4, 16) | {"blocks": 1}
    assert config["warps"] * config["splits"] * config["chunk"] == 512 and config["stages"] == 2
    x, packed = kernel.make_inputs(case)
    y = run_source(x, packed, config, monkeypatch)  # asserts that nothing outside is read
    assert relative_error(y, kernel.reference(x, packed)) < 1e-3


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("m, dtype, largest", [(1, torch.float16, 16), (2, torch.bfloat16, 144)])
def test_an_outlier_whose_codes_are_their_zero_costs_what_is_documented(m, dtype, largest, monkeypatch):
    """The outlier's products cancel, what they rounded away of the others does not come back."""
    case = {"rows": 16, "columns": 256, "bits": 4, "group": 128, "symmetric": False, "seed": 0, "m": m}
    x, packed = kernel.make_inputs(case, dtype=dtype)
    codes, scales, zeros = unpack(packed)
    codes[:, 7] = zeros[:, 0].to(torch.uint8)
    x[:, 7] = 1e4
    packed = pack(codes, scales, zeros, 4, 128)
    config = {"warps": 2, "tiles": 1, "chunk": 128, "stages": 1, "splits": 1, "blocks": 1}
    want = x.double() @ dequantize(packed).double().T
    off = (run_source(x, packed, config, monkeypatch).double() - want).abs()
    rounded = (2.0**-11 if dtype == torch.float16 else 2.0**-8) * want.abs()  # of the output
    bound = 128 * 2.0**-23 * largest * 1e4 * scales.double().max()
    assert (off <= rounded + bound).all()


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("scale", [1e-6, 1e5, 1e32])
def test_bfloat16_that_float16_cannot_hold(scale, monkeypatch):
    """One row of activations is computed as scaled float16: beyond its range, with outliers and zeros in a chunk."""
    case = {"rows": 40, "columns": 1024, "bits": 4, "group": 128, "symmetric": False, "seed": 0, "m": 1}
    x, packed = kernel.make_inputs(case, dtype=torch.bfloat16)
    x[:, ::100] *= 1000
    x[:, 256:512] *= 1e-3
    x[:, 512:768] = 0
    x *= scale
    config = {"warps": 4, "tiles": 1, "chunk": 256, "stages": 1, "splits": 1, "blocks": 1}
    y = run_source(x, packed, config, monkeypatch)
    want = kernel.reference(x, packed)
    assert relative_error(y, want) < 4e-3
    x[0, 5] = float("nan")
    assert run_source(x, packed, config, monkeypatch).isnan().all()


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_operator_on_the_cpu(case):
    x, packed = kernel.make_inputs(case)
    y = kernel.wna16_gemv(x, packed)
    want = kernel.reference(x, packed)
    assert y.dtype == x.dtype and relative_error(y, want) < 1e-3
    torch.library.opcheck(
        torch.ops.lowbit.wna16_gemv.default,
        (
            x,
            packed.codes,
            packed.scale_zero,
            packed.bits,
            packed.group,
            packed.rows,
            packed.columns,
            packed.symmetric,
        ),
    )


def test_misuse_names_the_shapes():
    x, packed = kernel.make_inputs(SMALL[0])
    for bad, words in (
        (x[0], r"\[416\]"),
        (x[:, :-1].contiguous(), r"\[6, 415\], expected \[1 to 16, 416\]"),
        (x.repeat(3, 1), r"\[18, 416\]"),
        (x.float(), r"a float32 tensor \[6, 416\]"),
        (x.to("meta"), "meta"),
    ):
        with pytest.raises(ValueError, match=words):
            kernel.wna16_gemv(bad, packed)


def test_every_configuration_has_its_keys_and_fits_an_sm():
    shapes = [(512, 2048), (1024, 4096), (4096, 4096), (4096, 11008), (28672, 8192), (33, 100)]
    for (rows, columns), bits, m in itertools.product(shapes, (2, 4, 8), (1, 3, 16)):
        config = kernel.configuration(rows, columns, bits, m, "cpu")
        assert set(config) == {"warps", "tiles", "chunk", "stages", "splits", "blocks"}
        assert (
            kernel.shared_bytes(kernel.defines(bits, 0, columns, False, torch.float16, m, config)) <= 99 << 10
        )  # what an sm_86 block may have
        assert config["warps"] * config["blocks"] <= 48 and config["chunk"] % 128 == 0


def test_recorded_configurations_fit_their_device():
    for path in FOLDER.glob("*.json"):
        for key, config in configurations(path.stem).get("wna16_gemv", {}).items():
            bits, m, (rows, columns) = int(key.split()[0][1:]), int(key.split()[1][1:]), key.split()[2].split("x")
            macros = kernel.defines(bits, 32, int(columns), False, torch.float16, m, config)
            assert set(config) == set(kernel.heuristic(int(rows), int(columns), bits, m)), key
            assert kernel.shared_bytes(macros) <= 227 << 10 and config["warps"] <= 32, key


@pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"compile check: {nvrtc.unavailable()}")
@pytest.mark.parametrize(
    "arch", ["sm_90", *(pytest.param(other, marks=pytest.mark.slow) for other in ("sm_80", "sm_100"))]
)
def test_the_source_compiles(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for case, m, splits in zip(kernel.CASES[:7], (1, 8, 16, 1, 8, 1, 16), (1, 1, 1, 2, 4, 1, 2)):
        dtype = torch.bfloat16 if splits > 1 or m == 8 else torch.float16
        config = kernel.heuristic(32, 384, case["bits"], kernel.batch_columns(m)) | {
            "splits": 1 if arch == "sm_80" else splits
        }
        form = case["bits"], case["group"], 384 if case["bits"] < 8 else 392, case["symmetric"]
        cubin = nvrtc.compile_cubin(kernel.SOURCE, kernel.defines(*form, dtype, m, config), arch)
        assert cubin[:4] == b"\x7fELF" and b"wna16_gemv" in cubin
    assert len(list((tmp_path / "lowbit-repro" / "cubin").glob("*.cubin"))) == 7
    with pytest.raises(RuntimeError, match="does not compile"):
        nvrtc.compile_cubin(kernel.SOURCE, {"BITS": 4}, arch)


@nvcc.NEEDS_NVCC
@pytest.mark.parametrize("splits", [1, 2])
def test_beside_another_launch_its_last_block_waits_for_that_one(splits):
    config = kernel.heuristic(32, 384, 4, 1) | {"splits": splits}
    for more in ({}, {"TAIL": 1}):
        macros = kernel.defines(4, 128, 384, False, torch.bfloat16, 1, config) | more
        waits = nvcc.ptx(kernel.SOURCE, macros).count("griddepcontrol.wait")
        assert waits == (splits if more else 0)  # one where blocks send their sums, one where they add them


def test_without_a_compiler_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nvrtc, "compiler", lambda: None)
    with pytest.raises(RuntimeError, match="pip install cuda-core"):
        nvrtc.compile_cubin(kernel.SOURCE, {}, "sm_90")


def test_more_shared_memory_than_a_block_has(monkeypatch):
    """The source's own bytes count too, and the driver is not asked for what the device lacks."""
    requested = []
    driver = SimpleNamespace(
        cuModuleLoadData=lambda cubin: (0, cubin),
        cuModuleGetFunction=lambda module, name: (0, name),
        CUfunction_attribute=int,
        cuFuncGetAttribute=lambda attribute, function: (0, {nvrtc.FIXED_SHARED: 24}[attribute]),
        cuFuncSetAttribute=lambda function, attribute, value: requested.append((attribute, value)) or (0,),
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    device = SimpleNamespace(shared_memory_per_block_optin=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    nvrtc.Function(b"", "gemv", 0, 976, {"WARPS": 4})
    with pytest.raises(ValueError, match=r"gemv with {'WARPS': 4} takes 1001 bytes .* a block here has 1000"):
        nvrtc.Function(b"", "gemv", 0, 977, {"WARPS": 4})
    assert requested == [(nvrtc.MAX_DYNAMIC_SHARED, 976)]
    for blocks in (8, 9):  # more than 8 in a cluster need the driver's leave
        nvrtc.Function(b"", "gemv", 0, 976, {"CLUSTER": blocks})
    assert requested[1:] == [(nvrtc.MAX_DYNAMIC_SHARED, 976)] * 2 + [(nvrtc.LARGE_CLUSTERS, 1)]


ATTRIBUTES = {  # what the driver calls them
    "CU_LAUNCH_ATTRIBUTE_COOPERATIVE": 2,
    "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": 6,
}
LAUNCHES = {
    "CUlaunchConfig": SimpleNamespace,
    "CUlaunchAttribute": SimpleNamespace,
    "CUlaunchAttributeValue": SimpleNamespace,
    "CUlaunchAttributeID": SimpleNamespace(**ATTRIBUTES),
}


def test_programs_that_wait_for_one_another_are_launched_together(monkeypatch):
    """By themselves and among others."""
    launched = []
    driver = SimpleNamespace(
        **LAUNCHES,
        cuLaunchKernelEx=lambda config, *what: launched.append(dict(vars(config))) or (0,),
        cuModuleLoadData=lambda cubin: (0, cubin),
        cuModuleGetFunction=lambda module, name: (0, name),
        CUfunction_attribute=int,
        cuFuncGetAttribute=lambda attribute, function: (0, 0),
        cuFuncSetAttribute=lambda function, attribute, value: (0,),
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    device = SimpleNamespace(shared_memory_per_block_optin=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    for programs in (1, 8):
        function = nvrtc.Function(b"", "zigzag", 0, 0, {"PROGRAMS": programs})
        function(8, 32, 5)
        assert function.step(8, 32, ()).together == (programs > 1)
    alone, together = launched
    assert "attrs" not in alone
    (attribute,) = together["attrs"]
    assert attribute.id == 2 and vars(attribute.value) == {"cooperative": 1}


def test_a_launch_beside_the_one_before_says_so_to_the_driver(monkeypatch):
    """With the grid, the stream and the arguments of each call, on the device of the kernel."""
    launched, device, stream = [], [0], [77]
    driver = SimpleNamespace(
        cuLaunchKernelEx=lambda config, *what: launched.append((dict(vars(config)), *what, *device)) or (0,), **LAUNCHES
    )
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: device[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream[0] + index, raising=False)

    @contextlib.contextmanager
    def on(index):
        device[:] = [index]
        yield
        device[:] = [3]

    monkeypatch.setattr(torch.cuda, "device", on)
    function = nvrtc.Function.__new__(nvrtc.Function)
    vars(function).update(_driver=driver, _shared=96, _index=0, _function="gemm", _rooms=[], digest="")
    x = torch.zeros(4)
    for grid, pointer, here, now in ((8, x, 0, 77), (9, x.data_ptr() + 8, 0, 78), (7, x[1:], 3, 79)):
        device[:], stream[:] = [here], [now]
        function.beside(grid, 32, 5, pointer)
        config, called, address, _, where = launched[-1]
        assert (config["gridDimX"], config["blockDimX"], config["sharedMemBytes"]) == (grid, 32, 96)
        assert (config["hStream"], config["numAttrs"], called, where) == (now, 1, "gemm", 0)
        attribute = config["attrs"][0]
        assert attribute.id == 6 and attribute.value.programmaticStreamSerializationAllowed == 1
        at = (ctypes.c_void_p * 2).from_address(address)
        assert ctypes.c_int.from_address(at[0]).value == 5
        want = pointer if isinstance(pointer, int) else pointer.data_ptr()
        assert ctypes.c_uint64.from_address(at[1]).value == want
    assert device == [3] and len(launched) == 3
    function(5, 64, 5, x)  # the same kernel, not beside
    config, *_ = launched[-1]
    assert (config["gridDimX"], config["blockDimX"]) == (5, 64) and "attrs" not in config


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", kernel.CASES, ids=str)
def test_kernel_on_the_gpu(case, dtype):
    for scale in (1.0,) if dtype == torch.float16 else (1.0, 1e5, 1e-6):
        x, packed = kernel.make_inputs(case, GPU, dtype)
        y = kernel.wna16_gemv(x * scale, packed)
        want = kernel.reference(x * scale, packed)
        assert relative_error(y, want) < ROUNDING[str(dtype)[6:]]  # bfloat16 output alone costs 2^-9


def test_arguments_of_a_launch_lie_where_their_addresses_say():
    """Tensor pointers of 64 bits and C ints of 32, negative ones too."""
    x = torch.zeros(3)
    room = nvrtc.Room((x, 0, 0, x, 0))
    at = (ctypes.c_void_p * 5).from_address(room.address)
    for first, last in ((7, 2**31 - 1), (-7, -(2**31))):  # a room serves one launch after the other
        room.fill((x, first, -5, x[1:], last))
        read = [ctypes.c_uint64.from_address(at[i]).value for i in (0, 3)]
        assert read == [x.data_ptr(), x.data_ptr() + 4]
        assert [ctypes.c_int.from_address(at[i]).value for i in (1, 2, 4)] == [first, -5, last]


def test_a_tensor_map_is_passed_by_value_each_launch_its_own(monkeypatch):
    monkeypatch.setattr(nvrtc, "encode", lambda matrix, box: bytes([box]) * 128)
    maps = [nvrtc.TensorMap(torch.zeros(2, 64), box) for box in (8, 16)]
    room = nvrtc.Room((maps[0], 3))
    for each, box in zip(maps, (8, 16)):
        room.fill((each, 3))
        at = (ctypes.c_void_p * 2).from_address(room.address)
        assert at[0] % 64 == 0 and ctypes.string_at(at[0], 128) == bytes([box]) * 128
        assert ctypes.c_int.from_address(at[1]).value == 3


def test_a_second_launch_has_a_configuration_of_its_own(monkeypatch):
    """Of the space, whatever is tuned for the layer: it starts on few SMs."""
    assert kernel.TAIL in kernel.SPACE
    launches = []

    class Function:
        def step(self, *launch, beside):
            return launch, beside

    def plan(form, dtype, m, device, part="", **config):
        launches.append((m, part, config))
        return Function(), 4, 256, form[2], form[3]

    monkeypatch.setattr(kernel, "_plan", plan)
    _, beside = kernel.tail(torch.zeros(325, 256).half(), 320, 4, 128, 64, 256, False)
    assert beside and launches == [(5, "TAIL", kernel.TAIL)]
