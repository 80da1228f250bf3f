"""Tuned launch configurations, and which devices can run a kernel.

Configurations are in `kernels/configs/<device>.json`, which `python -m repro tune` writes and this module reads.

    {"<kernel>": {"<shape key>": {"<option>": value, ...}, ...}, ...}

Nothing is tuned at run time. What a device's file lacks comes from that of a card with the same architecture and as
many SMs, else from a kernel's own heuristic; either is logged once per process and device.
"""

import json
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent / "configs"
MEASURED = {  # files to compute capability and number of SMs of their device; the first one that has a shape counts
    "nvidia-h200": (9, 0, 132),
    "nvidia-h100-80gb-hbm3": (9, 0, 132),
}
CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}  # of n thread blocks, on 132 SMs at once
LOG = logging.getLogger(__name__)
REGISTERS, MOST_REGISTERS = 512, 255  # of a thread that has a warp for itself on its part of an SM, and at most


@dataclass(frozen=True)
class LaunchPlan:
    """One launch.

    Attributes:
        grid: thread blocks.
        threads: of a block.
        macros: of the source.
        shared: bytes of dynamic shared memory of a block.
    """

    grid: int
    threads: int
    macros: dict[str, int]
    shared: int


def device_slug(device: torch.device | str) -> str:
    """The file name of a device: `nvidia-h200` for an NVIDIA H200, `cpu` if it is not a CUDA device."""
    return _slug(torch.device(device))


@cache
def _slug(device: torch.device) -> str:
    if device.type != "cuda" or not torch.cuda.is_available():
        return "cpu"
    return "-".join(torch.cuda.get_device_name(device).lower().split())


def lacks(kernel: str, device: torch.device | str, capability: tuple[int, int] = (8, 0)) -> str | None:
    """Why `device` cannot run `kernel`: it is not a CUDA device, or it is below `capability`; None if it can."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"{kernel} needs a CUDA device."
    if torch.cuda.get_device_capability(device) < capability:
        name = torch.cuda.get_device_name(device)
        return f"{kernel} needs compute capability {capability[0]}.{capability[1]}, {name} has less."
    return None


def processors(device: torch.device) -> int:
    """The number of SMs; that of an H200 where there is no CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability; that of an H200 where there is no CUDA device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def registers(warps: int) -> int:
    """Of a thread, where so many warps share an SM, whose four parts have their own."""
    return min(MOST_REGISTERS, REGISTERS // -(-warps // 4))


@cache
def configurations(slug: str) -> dict[str, dict[str, dict]]:
    """Every kernel's configurations on one device: its own, and where it has none those of a card like it."""
    path = FOLDER / f"{slug}.json"
    alike = twins(slug)
    of_device = json.loads(path.read_text()) if path.is_file() else {}
    if slug == "cpu":
        return of_device
    for like in alike:
        LOG.warning("launch configurations of %s for %s: same architecture, as many SMs", like, slug)
        shared = json.loads((FOLDER / f"{like}.json").read_text())
        of_device = {kernel: shared.get(kernel, {}) | of_device.get(kernel, {}) for kernel in shared | of_device}
    if not of_device:
        LOG.warning("no launch configurations for %s (kernels/configs/%s.json); using heuristics", slug, slug)
    return of_device


def twins(slug: str) -> list[str]:
    """The files of other devices with the architecture and the number of SMs of this machine's device `slug`."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if device_slug(f"cuda:{index}") != slug:
            continue
        properties = torch.cuda.get_device_properties(index)
        this_device = (properties.major, properties.minor, properties.multi_processor_count)
        alike = [like for like, measured in MEASURED.items() if like != slug and measured == this_device]
        return [like for like in alike if (FOLDER / f"{like}.json").is_file()]
    return []


def launch_config(kernel: str, key: str, device: torch.device | str) -> dict | None:
    """The tuned configuration of `kernel` for the shape `key` on `device`, or None."""
    return configurations(device_slug(device)).get(kernel, {}).get(key)
