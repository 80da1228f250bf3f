"""Launches one after the other: arguments where the driver looks for them, one stream, maps by address, what fails."""

import ctypes
import hashlib
import struct
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from repro.kernels import launches, nvrtc, prepared
from repro.kernels.launches import Behind, Launches, Mapped, Step

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def read(address: int, kinds: str) -> list[int]:
    """Arguments of a launch as a kernel reads them: C ints (i), 64 bits (q), or the first 64 bits of a map (M)."""
    pointers = (ctypes.c_void_p * len(kinds)).from_address(address)
    types = {"i": ctypes.c_int, "q": ctypes.c_uint64, "M": ctypes.c_uint64}
    return [types[kind].from_address(pointer).value for kind, pointer in zip(kinds, pointers)]


class Driver:
    """What `cuda.bindings.driver` has of launches; each is kept with its arguments as `kinds` say by function."""

    CUlaunchConfig = CUlaunchAttribute = CUlaunchAttributeValue = SimpleNamespace
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_COOPERATIVE=2, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6
    )
    CUfunction = staticmethod(lambda handle: handle)

    def __init__(self, kinds):
        self.kinds, self.launched, self.answers = kinds, [], []
        self.between = lambda: None

    def cuLaunchKernelEx(self, config, function, address, extra):
        self.between()
        self.launched.append((function, config.hStream, read(address, self.kinds[function]), vars(config).copy()))
        return (self.answers.pop(0) if self.answers else 0,)


@pytest.fixture
def current(monkeypatch):
    """The current device and stream, which a test may set."""
    now = SimpleNamespace(device=0, stream=70)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: now.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: now.stream + index, raising=False)

    @contextmanager
    def on(index):
        before, now.device = now.device, index
        yield
        now.device = before

    monkeypatch.setattr(torch.cuda, "device", on)
    return now


STEPS = (
    Step("head", (5, 2, 1), 128, 96, ("x", "y", -3, 2**31 - 1)),
    Step("tail", (7, 1, 1), 64, 0, (Behind("x", 8), 4, Behind("y", 16), "y"), beside=True),
)
KINDS = {"head": "qqii", "tail": "qiqq"}


def test_every_launch_has_its_arguments_and_all_one_stream(current):
    driver = Driver(KINDS)
    launch = Launches(driver, 0, ("x", "y"), STEPS)
    for stream in (70, 71):
        current.stream, x, y = stream, torch.zeros(9), torch.zeros(9)
        driver.launched.clear()
        launch(x, y)
        (head, tail), at_x, at_y = driver.launched, x.data_ptr(), y.data_ptr()
        assert head[:3] == ("head", stream, [at_x, at_y, -3, 2**31 - 1])
        assert tail[:3] == ("tail", stream, [at_x + 8, 4, at_y + 16, at_y])
    sizes = ["gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes"]
    assert [head[3][size] for size in sizes] == [5, 2, 1, 128, 1, 1, 96]
    assert [tail[3][size] for size in sizes] == [7, 1, 1, 64, 1, 1, 0]
    assert "attrs" not in head[3] and tail[3]["numAttrs"] == 1
    (attribute,) = tail[3]["attrs"]
    assert attribute.id == 6 and attribute.value.programmaticStreamSerializationAllowed == 1


def test_blocks_that_wait_for_one_another_are_all_on_the_device_at_once(current):
    """The driver refuses a launch that says so and does not fit; another one would wait for ever."""
    driver = Driver(KINDS)
    head, tail = (step._replace(together=True) for step in STEPS)
    Launches(driver, 0, ("x", "y"), (head, tail))(torch.zeros(9), torch.zeros(9))
    first, second = (config for *_, config in driver.launched)
    (attribute,) = first["attrs"]
    assert (first["numAttrs"], attribute.id, vars(attribute.value)) == (1, 2, {"cooperative": 1})
    members = [(attribute.id, vars(attribute.value)) for attribute in second["attrs"]]
    assert members == [(6, {"programmaticStreamSerializationAllowed": 1}), (2, {"cooperative": 1})]
    assert second["numAttrs"] == 2


def test_a_tensor_that_is_a_parameter_is_the_same_at_every_call_and_kept(current):
    driver = Driver({"sum": "qqiqq"})
    parts, tickets = torch.zeros(9), torch.zeros(9, dtype=torch.int32)
    place, kept = parts.data_ptr(), weakref.ref(tickets)
    step = Step("sum", (1, 1, 1), 32, 0, (parts[2:], "x", 7, tickets, tickets))
    launch = Launches(driver, 0, ("x",), (step,))
    del step, tickets
    for x in (torch.zeros(1), torch.zeros(1)):
        launch(x)
        at = kept().data_ptr()
        assert driver.launched[-1][2] == [place + 8, x.data_ptr(), 7, at, at]


def test_launches_are_on_their_own_device(current):
    driver = Driver(KINDS)
    driver.between = lambda: devices.append(current.device)
    current.device, devices = 3, []
    Launches(driver, 1, ("x", "y"), STEPS)(torch.zeros(9), torch.zeros(9))
    assert devices == [1, 1] and current.device == 3
    assert [stream for _, stream, *_ in driver.launched] == [71, 71]


def test_a_map_is_made_once_for_each_address_and_passed_by_value(current, monkeypatch):
    encoded, driver = [], Driver({"gemm": "qMi", "again": "M"})

    def encode(matrix):
        encoded.append(matrix.data_ptr())
        return launches.TensorMap(matrix.data_ptr().to_bytes(8, "little") * 16)

    mapped = Mapped("x", encode)
    steps = Step("gemm", (1, 1, 1), 32, 0, ("y", mapped, 6)), Step("again", (1, 1, 1), 32, 0, (mapped,))
    launch = Launches(driver, 0, ("x", "y"), steps)
    x, other, y = (torch.zeros(16) for _ in range(3))
    for each in (x, other, x):
        driver.launched.clear()
        launch(each, y)
        assert [arguments for _, _, arguments, _ in driver.launched] == [
            [y.data_ptr(), each.data_ptr(), 6],
            [each.data_ptr()],
        ]
    assert encoded == [x.data_ptr(), other.data_ptr()]
    monkeypatch.setattr(launches, "MOST_MAPS", 2)
    third = torch.zeros(16)
    launch(third, y)  # takes all others' place
    launch(x, y)
    assert encoded[2:] == [third.data_ptr(), x.data_ptr()]


def test_a_map_is_there_until_the_driver_has_read_it(current, monkeypatch):
    """Also where another thread's calls put others into its place meanwhile."""
    alive = weakref.WeakSet()

    def encode(matrix):
        made = launches.TensorMap(bytes(128))
        alive.add(made)
        return made

    driver = Driver({"gemm": "M"})
    launch = Launches(driver, 0, ("x",), (Step("gemm", (1, 1, 1), 32, 0, (Mapped("x", encode),)),))
    monkeypatch.setattr(launches, "MOST_MAPS", 1)
    driver.between = lambda: [kept.clear() for kept in launch._kept.values()] and seen.append(len(alive))
    seen = []
    launch(torch.zeros(16))
    assert seen == [1]


def test_the_bytes_of_a_map_are_at_a_multiple_of_64():
    for byte in range(8):
        made = launches.TensorMap(bytes([byte]) * 128)
        assert made.data_ptr() % 64 == 0 and ctypes.string_at(made.data_ptr(), 128) == bytes([byte]) * 128


def test_two_threads_have_rooms_of_their_own(current):
    """The second call begins while the driver reads the arguments of the first."""
    driver, others = Driver(KINDS), []
    launch = Launches(driver, 0, ("x", "y"), STEPS)
    x, y = torch.zeros(9), torch.zeros(9)

    def between():
        while others:
            other = others.pop()
            other.start()
            other.join()

    driver.between = between
    launch(x, y)
    others.append(threading.Thread(target=launch, args=(y, x)))
    driver.launched.clear()
    launch(x, y)
    assert [arguments[0] - x.data_ptr() for _, _, arguments, _ in driver.launched] == [
        y.data_ptr() - x.data_ptr(), y.data_ptr() - x.data_ptr() + 8, 0, 8
    ]  # fmt: skip
    assert len(launch._rooms) == 2
    launch(x, y)
    assert len(launch._rooms) == 2


def test_a_thread_without_a_context_gets_one_and_other_failures_are_errors(current, monkeypatch):
    driver, made = Driver(KINDS), []
    stream = SimpleNamespace(synchronize=lambda: made.append("context"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    launch = Launches(driver, 0, ("x", "y"), STEPS)
    driver.answers = [launches.NO_CONTEXT, 0, 0]
    launch(torch.zeros(9), torch.zeros(9))
    assert made == ["context"] and [name for name, *_ in driver.launched] == ["head", "head", "tail"]
    for answers in ([launches.NO_CONTEXT, 201], [0, 700]):
        driver.answers = answers
        with pytest.raises(RuntimeError, match="CUDA driver: "):
            launch(torch.zeros(9), torch.zeros(9))
    assert made == ["context"] * 2


def test_a_function_is_a_step_on_its_device(current):
    driver = Driver({"gemm": "qi"})
    function = nvrtc.Function.__new__(nvrtc.Function)
    vars(function).update(_driver=driver, _index=0, _function="gemm", _shared=96, digest="abc")
    step = function.step(4, 32, ["x", 5], beside=True)
    assert step == Step("gemm", (4, 1, 1), 32, 96, ("x", 5), beside=True, together=False, digest="abc")
    x = torch.zeros(1)
    row = function.in_a_row(("x",), (step,))
    row(x)
    assert row.digests == {"abc"}
    assert driver.launched[0][2] == [x.data_ptr(), 5]


# ---- kernels of Triton's


class Launcher:
    """Triton's launcher of a compiled kernel."""

    def __init__(self, **other):
        facts = {
            "launch_cooperative_grid": False,
            "launch_pdl": False,
            "global_scratch_size": 0,
            "profile_scratch_size": 0,
        }
        vars(self).update(facts | other)


class Kernel:
    """What `triton.jit` gives, compiled for one signature."""

    def __init__(self, signature, function, warps=4, clusters=1, forms=(), **run):
        self.arg_names = list(signature)
        self.compiled = SimpleNamespace(
            src=SimpleNamespace(signature=signature), function=function, run=Launcher(**run), asm={"cubin": b"x"},
            packed_metadata=(warps, clusters, 48), metadata=SimpleNamespace(tensordesc_meta=list(forms)),
        )  # fmt: skip
        self.launched = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launched.append(arguments) or self.compiled


QUANTIZE = {"x": "*bf16", "q": "*i8", "s": "constexpr", "K": "i32", "BLOCK": "constexpr"}
PRODUCT = {
    "x_q": "tensordesc<int8[16, 64]>",
    "s_x": "*fp32",
    "y": "*bf16",
    "partial": "constexpr",
    "M": "constexpr",
    "N": "i64",
}


@pytest.fixture
def triton(monkeypatch):
    """Triton's driver and CUDA's, the latter as the module that is imported."""
    own = SimpleNamespace(_BASE_ARGS_FORMAT=prepared.IN_C, CudaLauncher=Launcher, encoded=[])

    def make_tensordesc_arg(matrix, form):
        own.encoded.append((matrix.base.data_ptr(), form))
        return [Bytes(matrix.base.data_ptr()), *matrix.shape, *matrix.strides]

    own.make_tensordesc_arg = make_tensordesc_arg
    cuda = Driver({"quantize": "qqiqq", "product": "Miiqqqqqqq"})
    modules = {"triton.backends.nvidia.driver": own, "cuda.bindings.driver": cuda}

    def find(name):
        if modules.get(name) is None:
            raise ImportError(name)
        return modules[name]

    monkeypatch.setattr(prepared.importlib, "import_module", find)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return SimpleNamespace(own=own, cuda=cuda, modules=modules)


class Bytes(ctypes.Structure):
    """Stands for the object: `id` and `__basicsize__` are replaced to find its last 128 bytes."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]

    def __init__(self, word):
        super().__init__((ctypes.c_uint64 * 16)(*[word] * 16))


@pytest.fixture
def row(current, triton, monkeypatch):
    """Two kernels in a row, the second by a descriptor; `make(**other)` gives them with a second one that is other."""
    monkeypatch.setattr(prepared, "last_bytes", lambda made, count: bytes(made))
    monkeypatch.setattr(prepared, "in_c", lambda *_: None)  # of a first launch nothing else is used

    def make(signature=PRODUCT, forms=("form",), **other):
        kernels = Kernel(QUANTIZE, "quantize"), Kernel(signature, "product", forms=forms, **other)
        describe = lambda matrix: SimpleNamespace(base=matrix, shape=[16, 64], strides=[64, 1])  # noqa: E731
        first = prepared.Prepared(kernels[0], (5,), BLOCK=64)
        second = prepared.Prepared(kernels[1], (3, 2), (describe,))
        arguments = ("x", "between", None, 64), ("between", "between", "y", None, 1, 7)
        return prepared.InARow(("x", "between", "y"), list(zip((first, second), arguments))), kernels

    return make


def test_triton_launches_once_and_the_driver_from_then_on(row, triton):
    pair, kernels = row()
    x, between, y = (torch.zeros(16) for _ in range(3))
    for _ in range(3):
        pair.launch(x, between, y)
    assert [len(kernel.launched) for kernel in kernels] == [1, 1] and len(triton.cuda.launched) == 4
    quantize, product = triton.cuda.launched[-2:]
    assert quantize[:3] == ("quantize", 70, [x.data_ptr(), between.data_ptr(), 64, 0, 0])
    at = between.data_ptr()
    assert product[:3] == ("product", 70, [at, 16, 64, 64, 1, at, y.data_ptr(), 7, 0, 0])
    assert (product[3]["gridDimX"], product[3]["gridDimY"], product[3]["blockDimX"]) == (3, 2, 128)
    assert pair.launch.digests == {hashlib.sha256(b"x").hexdigest()}
    assert product[3]["sharedMemBytes"] == 48 and triton.own.encoded == [(at, "form")]


OTHER = {
    "memory of Triton's": {"global_scratch_size": 8},
    "all programs at once": {"launch_cooperative_grid": True},
    "beside the launch before": {"launch_pdl": True},
    "clusters": {"clusters": 2},
    "no tensor maps": {"forms": ()},
    "a number of another type": {"signature": PRODUCT | {"N": "fp32"}},
}


@pytest.mark.parametrize("what", OTHER)
def test_what_the_driver_is_not_told_triton_launches(row, triton, monkeypatch, what):
    pair, _ = row(**OTHER[what])
    launched = []
    first = prepared.Prepared._first
    monkeypatch.setattr(
        prepared.Prepared, "__call__", lambda self, *arguments: launched.append(arguments) or first(self, arguments)
    )
    for _ in range(2):
        pair.launch(*(torch.zeros(16) for _ in range(3)))
    assert triton.cuda.launched == [] and len(launched) == 4


@pytest.mark.parametrize("name", ["cuda.bindings.driver", "triton.backends.nvidia.driver"])
def test_without_a_driver_that_is_known_triton_launches(row, triton, monkeypatch, name):
    triton.modules[name] = None
    pair, _ = row()
    launched = []
    monkeypatch.setattr(prepared.Prepared, "__call__", lambda self, *arguments: launched.append(arguments))
    for _ in range(2):
        pair.launch(*(torch.zeros(16) for _ in range(3)))
    assert triton.cuda.launched == [] and len(launched) == 4


def test_the_last_bytes_of_an_object_are_read():
    assert prepared.last_bytes(2.5, 8) == struct.pack("d", 2.5)


@pytest.mark.gpu
@GPU
def test_a_thread_of_its_own_launches_what_another_prepared():
    """Without a context of its own, and with the same result."""
    from repro.kernels import w8a8

    x = torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16)
    weight = w8a8.quantize_weight(torch.randn(512, 1024, device="cuda"))
    want, outputs = w8a8.w8a8(x, *weight), []
    w8a8.w8a8(x, *weight)
    thread = threading.Thread(target=lambda: outputs.append(w8a8.w8a8(x, *weight)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(outputs[0], want)
