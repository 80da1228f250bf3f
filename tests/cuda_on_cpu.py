"""Kernels in CUDA C++ on a CPU: their source, compiled as C++ with the plain twin of `kernels/ptx.cuh` in front."""

import atexit
import ctypes
import fcntl
import hashlib
import itertools
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from repro.core.files import ROOT
from repro.kernels import launches, nvrtc

COMPILER = ("g++", "-std=c++17", "-O1", "-w", "-fPIC", "-pthread")
COUNT = itertools.count()
HEADER = Path(__file__).with_name("cuda_emulation.h")
RUNTIME = HEADER.with_suffix(".cpp")
KEPT = ROOT / "build" / "cuda-on-cpu"
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU emulation of CUDA needs g++")
CLUSTER = ("CLUSTER", "SPLITS", "SPLIT", "PROGRAMS")  # macros that say how many blocks run together
LEAST_ADDRESS = 2**32  # of an int argument; smaller ones are C ints
LAST: list[tuple[int, int]] = []  # memory of the last launch's tensors, as `spans`
SHARED_BYTES = 227 * 1024  # of a block on sm_90
NEVER_ENDS = -(1 << 30)  # what `run` gives in cuda_emulation.h


@cache
def _header() -> Path:
    """A copy of the emulation's header, compiled once a process: most kernels are smaller than what it includes."""
    folder = Path(tempfile.mkdtemp(prefix="cuda-on-cpu-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = Path(shutil.copy(HEADER, folder))
    subprocess.run([*COMPILER, "-x", "c++-header", copy, "-o", f"{copy}.gch"], check=True)
    return copy


@cache
def _runtime() -> Path:
    """The library that runs kernels, compiled where its text or the compiler is new."""
    version = subprocess.run([COMPILER[0], "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(repr((HEADER.read_text(), RUNTIME.read_text(), COMPILER, version)).encode()).hexdigest()
    library = KEPT / f"{key[:24]}.so"
    KEPT.mkdir(parents=True, exist_ok=True)
    with open(KEPT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.is_file():
            part = library.with_suffix(".part")
            subprocess.run([*COMPILER, "-O2", "-shared", "-o", part, RUNTIME], check=True)
            part.replace(library)
    return library


@cache
def _launcher(path: Path, name: str, cluster: int, macros: tuple[tuple[str, object], ...]) -> Callable:
    """The C function that launches a kernel of a source with macros, compiled and loaded once a process."""
    stub = _header().with_name(f"{name}-{next(COUNT)}.cpp")  # a library that is loaded cannot be written over
    stub.write_text(
        f'#include "{path}"\n'
        'extern "C" int launch(u32 grid, u32 threads, u32 shared_bytes, u32 boxes_land_early, void **at, u32 count,\n'
        "                      void **starts, u64 *sizes) {\n"
        f"    const Launch one = {{grid, threads, {cluster}, at, call_with<{name}>, shared_here, shared_bytes,\n"
        "                        boxes_land_early != 0};\n"
        "    return run(one, count, starts, sizes);\n"
        "}\n"
    )
    flags, library = [f"-D{key}={value}" for key, value in macros], stub.with_suffix(".so")
    subprocess.run([*COMPILER, "-shared", *flags, "-include", _header(), "-o", library, stub, _runtime()], check=True)
    return ctypes.CDLL(str(library)).launch


def load(
    path: Path, name: str, macros: dict, device: object, shared_bytes: int = 0, *, boxes_land_early: bool = False
) -> Callable:
    """A stand-in for `nvrtc.load`; boxes of tensor maps land when somebody waits for them, or as early as they may."""
    assert shared_bytes <= SHARED_BYTES, f"{name} with {macros} takes {shared_bytes} bytes of shared memory"
    cluster = max((macros[key] for key in CLUSTER if key in macros), default=1)
    function = _launcher(path, name, cluster, tuple(macros.items()))

    def launch(grid: int, block: int, *arguments: torch.Tensor | int) -> None:
        memory = [spans(a) for a in arguments if not isinstance(a, int)]
        memory += [inside_last(a) for a in arguments if isinstance(a, int) and a >= LEAST_ADDRESS]
        LAST[:] = memory
        starts = (ctypes.c_void_p * len(memory))(*(start for start, _ in memory))
        sizes = (ctypes.c_uint64 * len(memory))(*(size for _, size in memory))
        room = nvrtc.Room(arguments)
        room.fill(arguments)
        outside = function(grid, block, shared_bytes, boxes_land_early, room.pointers, len(memory), starts, sizes)
        assert outside != NEVER_ENDS, f"{name} with {macros} never ends: every thread of a cluster waits"
        assert outside >= 0, f"{name} with {macros} leaves {-outside} pieces of bulk copies in flight"
        where = "the tensors or the shared memory that it was given"
        assert outside == 0, f"{name} with {macros} is {outside} times outside {where}"

    launch.beside = launch
    launch.step = lambda grid, block, parameters, beside=False: (launch, grid, block, parameters)
    launch.in_a_row = in_a_row
    return launch


def in_a_row(names: Sequence[str], steps: Sequence[tuple]) -> Callable:
    """A stand-in for `nvrtc.Function.in_a_row`."""

    def write(*tensors: torch.Tensor) -> None:
        tensors_by_name = dict(zip(names, tensors, strict=True))
        for launch, grid, block, parameters in steps:
            LAST[:] = [spans(tensor) for tensor in tensors]
            launch(grid, block, *(argument(parameter, tensors_by_name) for parameter in parameters))

    return write


def argument(
    parameter: launches.Parameter, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor | nvrtc.TensorMap | int:
    """What a parameter of a launch stands for."""
    if isinstance(parameter, launches.Behind):
        return tensors[parameter.name].data_ptr() + parameter.nbytes
    if isinstance(parameter, launches.Mapped):
        return parameter.encode(tensors[parameter.name])
    return tensors[parameter] if isinstance(parameter, str) else parameter


def inside_last(address: int) -> tuple[int, int]:
    """What is left behind an address of the tensor of the last launch that it lies in, as `spans`."""
    return next((address, start + size - address) for start, size in LAST if start <= address < start + size)


def spans(argument: torch.Tensor | nvrtc.TensorMap) -> tuple[int, int]:
    """Address and size in bytes of the memory that an argument gives a kernel to read."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr(), argument.nbytes
    start, rows, columns = struct.unpack("3Q", ctypes.string_at(argument.data_ptr(), 24))
    return start, 2 * rows * columns


def encode(matrix: torch.Tensor, box: int) -> bytes:
    """A stand-in for `nvrtc.encode`: what the emulation's tensor map has."""
    return struct.pack("16Q", matrix.data_ptr(), *matrix.shape, box, *[0] * 12)
