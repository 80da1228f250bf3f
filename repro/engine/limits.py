"""GPU memory limits: the allocator's bound, the driver's count, and free host memory."""

import gc

import psutil
import torch

from repro.core.errors import Crowded, NotMeasurable
from repro.engine import budget
from repro.kernels import prepared
from repro.train.training_cost import CONTEXT

MARGIN = 256 * 2**20  # bytes of a budget for kernels that the driver loads while they are first used


def reserved(device: torch.device) -> int:
    """Bytes of a budget that are not the allocator's: this process's context and libraries, and room for kernels.

    The driver counts all processes together. What lies beyond `CONTEXT` is others' and no part of this budget; up to
    it they cannot be told apart from this one.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.init()
    return min(_outside(device), CONTEXT) + MARGIN


def limit(device: torch.device, amount: int) -> None:
    """Bound the allocator of this process so that the device's memory in use stays within an amount."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        bound((amount - reserved(device)) / total, device)


def bound(share: float, device: torch.device) -> None:
    """Let the allocator of this process take at most a share of a GPU's memory; 1 is no bound."""
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(min(max(share, 0.0), 1.0), number)


def release() -> None:
    """Give a GPU back what the allocator of this process keeps for nobody, so that a limit counts from nothing again.

    That is what only cycles hold, what calls of our kernels keep between them, and cuBLAS's workspaces: 32 MiB on an
    H200 for every stream that called it, and each capture of a graph has a stream of its own. No graph that was
    captured may be replayed afterwards.
    """
    prepared.release()
    if torch.cuda.is_initialized():
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def device_bytes(device: torch.device) -> int:
    """Bytes in use on a GPU as the driver counts them: contexts, kernels and allocators of all processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def own_bytes(device: torch.device) -> int:
    """Bytes that this process uses on a GPU: its allocator's, and what the driver counts besides, `CONTEXT` at most."""
    return torch.cuda.memory_reserved(device) + min(_outside(device), CONTEXT)


def _outside(device: torch.device) -> int:
    """Bytes in use on a GPU that are not this process's allocator's."""
    return device_bytes(device) - torch.cuda.memory_reserved(device)


def check_host(name: str, needed: int) -> None:
    """Raise where the host has too little free memory for the weights that stream; the sentence names both amounts.

    Raises:
        NotMeasurable: it has too little at all.
        Crowded: it would have enough without what other programs use now.
    """
    memory = psutil.virtual_memory()
    if needed <= memory.available:
        return
    problem = (
        f"{name} streams {budget.shown(needed)} from host memory, of which {budget.shown(memory.available)} are free"
    )
    if needed > memory.total:
        raise NotMeasurable("oom", f"{problem}; give a larger --memory, or a machine with more")
    raise Crowded(f"{problem} of {budget.shown(memory.total)}; give a larger --memory, or run less beside it")
