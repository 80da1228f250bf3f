"""CUDA C++ without a build step: compile one `.cu` file with NVRTC, cache the cubin, load and launch it.

    function = load(path, "kernel_name", {"BITS": 4, ...}, device, shared_bytes)
    function(grid, block, tensor, 3, ...)      # on torch's current stream

NVRTC comes with torch's CUDA build and is called through `cuda.core`. If only `nvcc` is installed, it is used instead,
so that a machine without a GPU can check that every kernel compiles. Cubins are cached in
`$XDG_CACHE_HOME/lowbit-repro/cubin` (`~/.cache/...`), named by the hash of source, headers, defines, architecture and
compiler.
"""

import contextlib
import copy
import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.kernels import launches
from repro.kernels.launches import Launches, Parameter, Step, configuration

FIXED_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
LARGE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
PORTABLE_CLUSTER = 8  # blocks


@cache
def compiler() -> str | None:
    """The available compiler and its version: "nvrtc 13.0.88", "nvcc /usr/bin/nvcc ...", or None."""
    if util.find_spec("cuda") and util.find_spec("cuda.core"):
        for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                return f"nvrtc {metadata.version(wheel)}"
    if nvcc := shutil.which("nvcc"):
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.split()[-1]
        return f"nvcc {nvcc} {version}"
    return None


def unavailable() -> str | None:
    """Why no CUDA C++ can be compiled on this machine, or None if it can."""
    if compiler() is None:
        return (
            "CUDA C++ kernels need cuda-core and nvidia-cuda-nvrtc (pip install cuda-core nvidia-cuda-nvrtc), or nvcc."
        )
    return None


def compile_cubin(path: Path, defines: Mapping[str, int], arch: str) -> bytes:
    """The cubin of a `.cu` file for `arch` ("sm_90"), from the cache if it was compiled before.

    The file may include the headers (`.cuh`) of its folder.

    Raises:
        RuntimeError: no compiler is installed, or it rejects the source; the message has the compiler's output.
    """
    name = compiler()
    if name is None:
        raise RuntimeError(unavailable())
    cached = cached_at(path, defines, arch)
    with contextlib.suppress(OSError):
        return cached.read_bytes()
    compiled = (_nvrtc if name.startswith("nvrtc") else _nvcc)(path, path.read_text(), defines, arch)
    with contextlib.suppress(OSError):  # a read-only cache is not an error
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cached.parent, delete=False) as unfinished:
            unfinished.write(compiled)
        os.replace(unfinished.name, cached)
    return compiled


def cached_at(path: Path, defines: Mapping[str, int], arch: str) -> Path:
    """The file in which the cubin of a source is cached, by the contents of the source and its headers."""
    headers = [header.read_text() for header in sorted(path.parent.glob("*.cuh"))]
    key = repr((path.read_text(), headers, sorted(defines.items()), arch, compiler()))
    return cache_folder() / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"


def cache_folder() -> Path:
    """The folder of cached cubins."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowbit-repro" / "cubin"


def _nvrtc(path: Path, source: str, defines: Mapping[str, int], arch: str) -> bytes:
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError:  # the module's name before version 1
        from cuda.core.experimental import Program, ProgramOptions
    macros = [(name, str(value)) for name, value in defines.items()]
    options = ProgramOptions(name=path.name, arch=arch, std="c++17", define_macro=macros, include_path=str(path.parent))
    try:
        return bytes(Program(source, "c++", options).compile("cubin").code)
    except Exception as error:
        raise RuntimeError(f"{path.name} with {dict(defines)} does not compile for {arch}: {error}") from error


def _nvcc(path: Path, source: str, defines: Mapping[str, int], arch: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.cubin")
        macros = [f"-D{name}={value}" for name, value in defines.items()]
        command = ["nvcc", "-cubin", f"-arch={arch}", "-std=c++17", *macros, "-o", str(out), str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{path.name} with {dict(defines)} does not compile for {arch}: {done.stderr}")
        return out.read_bytes()


class Function:
    """A kernel on one device. Call it with the size of the grid and of a block and the arguments.

    `defines` are those with which it was compiled. Its PROGRAMS, if there are some, wait for one another outside a
    cluster: such a launch has all of its thread blocks on the device at once, or fails.
    """

    _beside = _together = False

    def __init__(
        self, cubin: bytes, name: str, index: int, shared_bytes: int, defines: Mapping[str, int] | None = None
    ) -> None:
        try:
            from cuda.bindings import driver
        except ImportError:
            raise RuntimeError(
                f"{name} needs the package cuda-bindings to be launched (torch's CUDA build has it)."
            ) from None
        self._driver, self._index, self._shared = driver, index, shared_bytes
        self._rooms: list[Room] = []  # that no launch is using; a list takes and gives one at a time, whatever thread
        self.digest = hashlib.sha256(cubin).hexdigest()  # what a recorded time names as its machine code
        self._module = _checked(driver.cuModuleLoadData(cubin))
        self._function = _checked(driver.cuModuleGetFunction(self._module, name.encode()))
        fixed, dynamic = map(driver.CUfunction_attribute, (FIXED_SHARED, MAX_DYNAMIC_SHARED))
        asked = shared_bytes + _checked(driver.cuFuncGetAttribute(fixed, self._function))
        most = torch.cuda.get_device_properties(index).shared_memory_per_block_optin
        if asked > most:
            config = dict(defines or {})
            raise ValueError(f"{name} with {config} takes {asked} bytes of shared memory, a block here has {most}")
        _checked(driver.cuFuncSetAttribute(self._function, dynamic, shared_bytes))
        if (defines or {}).get("CLUSTER", 1) > PORTABLE_CLUSTER:
            large = driver.CUfunction_attribute(LARGE_CLUSTERS)
            _checked(driver.cuFuncSetAttribute(self._function, large, 1))
        self._together = (defines or {}).get("PROGRAMS", 1) > 1

    def __call__(self, grid: int, block: int, *arguments: "Tensor | int | TensorMap") -> None:
        """Launch on torch's current stream of the kernel's device.

        Tensors become pointers, ints become C ints or, from 2^32 on, addresses inside a tensor that the caller keeps;
        tensor maps are passed by value.
        """
        if torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._index):
                return self(grid, block, *arguments)
        # As Triton and inductor do: a Stream object takes as long as the rest of a launch.
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        try:
            room = self._rooms.pop()
        except IndexError:
            room = Room(arguments, configuration(self._driver, self.step(grid, block, (), self._beside)))
        room.fill(arguments)
        config = room.config
        config.gridDimX, config.blockDimX, config.hStream = grid, block, stream
        _checked(self._driver.cuLaunchKernelEx(config, self._function, room.address, 0))
        self._rooms.append(room)  # the driver has copied the arguments

    def step(self, grid: int, block: int, parameters: Sequence[Parameter], beside: bool = False) -> Step:
        """A launch of it among `in_a_row`."""
        size = (grid, 1, 1), block, self._shared
        return Step(self._function, *size, tuple(parameters), beside, self._together, self.digest)

    def in_a_row(self, names: Sequence[str], steps: Sequence[Step]) -> Launches:
        """Launches on its device, of it and of other kernels, that are called with the tensors `names`."""
        return Launches(self._driver, self._index, names, steps)

    @cached_property
    def beside(self) -> "Function":
        """The same kernel, whose launches may run beside the launch before them.

        They begin once every thread block of that one has called `begin_next` or ended, and end after it if one of
        their own calls `wait_for_launch_before` (ptx.cuh).
        """
        same = copy.copy(self)
        same._beside, same._rooms = True, []
        return same


class Room:
    """Memory for a launch's arguments, tensor pointers and C ints, and for their addresses; one launch at a time.

    Making it takes 4 us, filling it 1. A thread that launches a kernel while another does has a room of its own.

    Attributes:
        config: the driver's configuration of the launch.
    """

    def __init__(self, arguments: Sequence["Tensor | int | TensorMap"], config: Any = None) -> None:  # noqa: ANN401
        self.config = config
        # 64-bit words for all: a C int is read from the first half of its word, devices and hosts being little-endian.
        count = len(arguments)
        self._maps = [i for i, argument in enumerate(arguments) if type(argument) is TensorMap]  # passed by value
        self.words = (ctypes.c_int64 * count)()
        first = ctypes.addressof(self.words)
        self.pointers = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        self.address = ctypes.addressof(self.pointers)
        self._pack = struct.Struct(f"{count}q").pack_into

    def fill(self, arguments: Sequence["Tensor | int | TensorMap"]) -> None:
        """Put in the arguments of a launch."""
        self._pack(self.words, 0, *[a if type(a) is int else a.data_ptr() for a in arguments])
        for i in self._maps:
            self.pointers[i] = self.words[i]


class TensorMap(launches.TensorMap):
    """How a kernel copies boxes of a matrix `[rows, columns]` of 16-bit numbers into the layout of `wgmma`.

    A box is 64 columns of `box` rows, zeros outside the matrix, in rows of 128 bytes with the 128-byte swizzle. Rows of
    the matrix begin at multiples of 16 bytes. It is an argument of a launch, passed by value.
    """

    def __init__(self, matrix: Tensor, box: int) -> None:
        super().__init__(encode(matrix, box))


def encode(matrix: Tensor, box: int) -> bytes:
    """The 128 bytes of a tensor map, by the driver."""
    from cuda.bindings import driver

    kind = {torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}[matrix.dtype]
    rows, columns = matrix.shape
    tensor_map = _checked(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
            2,
            matrix.data_ptr(),
            [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
            [driver.cuuint64_t(2 * columns)],
            [driver.cuuint32_t(64), driver.cuuint32_t(box)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return struct.pack("16Q", *map(int, tensor_map.opaque))


def _checked(answer: tuple) -> object:
    """The result of a driver call; RuntimeError if the call failed."""
    if int(answer[0]):
        raise RuntimeError(f"CUDA driver: {answer[0]!r}")
    return answer[1] if len(answer) > 1 else None


Job = tuple[Path, tuple[tuple[str, int], ...], str]  # a source, its macros, an architecture
_LOADED: dict[tuple, Function] = {}
_noted: set[Job] | None = None  # what `load` would compile, while `jobs_of` asks


class NotCompiled(Exception):
    """A kernel is not compiled, because `jobs_of` asks what would be."""


def jobs_of(calls: Iterable[Callable[[], object]]) -> list[Job]:
    """What calls would compile that is not in memory, without compiling it; other errors of theirs are theirs later."""
    global _noted
    _noted = set()
    try:
        for call in calls:
            with contextlib.suppress(Exception):
                call()
        return sorted(_noted, key=str)
    finally:
        _noted = None


def is_compiled(job: Job) -> bool:
    """Whether the cache has it."""
    path, defines, arch = job
    return cached_at(path, dict(defines), arch).is_file()


def compile_job(job: Job) -> None:
    """Compile into the cache."""
    path, defines, arch = job
    compile_cubin(path, dict(defines), arch)


def load(path: Path, name: str, defines: Mapping[str, int], device: torch.device, shared_bytes: int = 0) -> Function:
    """Kernel `name` of a `.cu` file, compiled for `device` with `defines` and cached in memory.

    Args:
        path: the source, compiled with the macros `defines`.
        device: a CUDA device.
        shared_bytes: dynamic shared memory of a launch.

    Raises:
        RuntimeError: no compiler is installed, the source does not compile, or the driver cannot load it.
        ValueError: the kernel needs more shared memory than a thread block of the device may have.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (path, name, tuple(defines.items()), index, shared_bytes)
    if key not in _LOADED:
        major, minor = torch.cuda.get_device_capability(index)
        with torch.cuda.device(index):
            torch.cuda.current_stream().synchronize()  # makes the device's context current
            arch = f"sm_{major}{minor}" + "a" * (major == 9)  # sm_90a has wgmma
            if _noted is not None:
                _noted.add((path, tuple(defines.items()), arch))
                raise NotCompiled(name)
            _LOADED[key] = Function(compile_cubin(path, defines, arch), name, index, shared_bytes, defines)
    return _LOADED[key]
