"""Which devices can run a kernel, and recorded launch configurations.

Configurations are in `kernels/configs/<device>.json`, which `python -m repro tune` writes and this module reads.

    {"<kernel>": {"<shape key>": {"<option>": value, ...}, ...}, ...}

Nothing is tuned at run time. On a device without a file every kernel falls back to its own heuristic, with one warning
per process and device.
"""

import json
import warnings
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent / "configs"


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


@cache
def configurations(slug: str) -> dict[str, dict[str, dict]]:
    """Every kernel's configurations on one device; empty, with one warning, if the device has no file."""
    path = FOLDER / f"{slug}.json"
    if path.is_file():
        return json.loads(path.read_text())
    if slug != "cpu":
        warnings.warn(
            f"no launch configurations for {slug} (kernels/configs/{slug}.json); using heuristics", stacklevel=3
        )
    return {}


def launch_config(kernel: str, key: str, device: torch.device | str) -> dict | None:
    """The recorded configuration of `kernel` for the shape `key` on `device`, or None."""
    return configurations(device_slug(device)).get(kernel, {}).get(key)
