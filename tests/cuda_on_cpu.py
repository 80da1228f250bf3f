"""Kernels in CUDA C++ on a CPU: their source, compiled as C++ with the plain twin of `kernels/ptx.cuh` in front."""

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from repro.kernels import nvrtc

HEADER = Path(__file__).with_name("cuda_emulation.h")
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="the CPU emulation of CUDA needs g++")
CLUSTER = ("SPLITS", "SPLIT", "CLUSTER")  # macros that say how many blocks form a cluster
SHARED_BYTES = 227 * 1024  # of a block on sm_90


def load(folder: Path) -> Callable:
    """A stand-in for `nvrtc.load` that keeps what it builds in `folder`."""
    count = itertools.count()

    def stand_in(path: Path, name: str, macros: dict, device: object, shared_bytes: int = 0) -> Callable:
        assert shared_bytes <= SHARED_BYTES, f"{name} with {macros} takes {shared_bytes} bytes of shared memory"
        cluster = next((macros[key] for key in CLUSTER if key in macros), 1)
        number = next(count)  # a library that is loaded cannot be written over
        stub, library = folder / f"{name}-{number}.cpp", folder / f"{name}-{number}.so"
        stub.write_text(
            f'#include "{path}"\n'
            'extern "C" void launch(u32 grid, u32 threads, void **at) '
            f"{{ launch_kernel({name}, grid, threads, {cluster}, at); }}\n"
        )
        flags = [f"-D{key}={value}" for key, value in macros.items()]
        command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread", *flags, "-include", HEADER]
        subprocess.run([*command, "-o", library, stub], check=True)
        function = ctypes.CDLL(str(library)).launch

        def launch(grid: int, block: int, *arguments: torch.Tensor | int) -> None:
            function(grid, block, nvrtc.pointers(arguments))

        return launch

    return stand_in
