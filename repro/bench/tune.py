"""Launch configurations as data: `python -m repro tune <kernel>` sweeps a kernel's `SPACE` on this device.

Every configuration is checked against the reference before it is timed, all of a shape take turns, and the fastest goes
to `kernels/configs/<device>.json`, which `kernels/launch_config.py` reads. Keys that were not swept stay as they are.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from repro.bench.timing import COLD, Backend, Cuda, Task, Timing, measure
from repro.errors import UserError
from repro.files import ROOT, write_text

CONFIGS = ROOT / "kernels" / "configs"
TIE = 0.01  # within so much of the fastest, the configuration that comes first in SPACE wins: no churn from noise


@dataclass(frozen=True)
class Tunable:
    """A kernel with more than one way to be launched.

    Attributes:
        space: the configurations that are worth trying at a place.
        places: what is swept: shapes, sizes.
        key: the shape key of a place, as the kernel's launcher looks it up.
        task: the task of launching the kernel at a place with a configuration; inputs are made once a place, by `make`.
        make: the inputs of a place.
    """

    space: Callable[[Any], Sequence[Mapping[str, Any]]]
    places: Sequence[Any]
    key: Callable[[Any], str]
    make: Callable[[Any], Any]
    task: Callable[[Any, Any, Mapping[str, Any]], Task]


def sweep(
    kernel: str, tunable: Tunable, backend: Backend, say: Callable[[str], None] = print, rounds: int = 9
) -> dict[str, dict[str, Any]]:
    """The fastest configuration of each place, by shape key.

    Raises:
        UserError: nothing in the space runs at a place.
    """
    best: dict[str, dict[str, Any]] = {}
    for place in tunable.places:
        key, inputs = tunable.key(place), tunable.make(place)
        configs = {json.dumps(config, sort_keys=True): config for config in tunable.space(place)}
        failures: dict[str, Exception] = {}
        found: list[Timing] = []
        for some in _chunks(list(configs), 12):  # each has its copies of the weights
            tasks = [replace(tunable.task(place, inputs, configs[name]), name=name) for name in some]
            found += measure(tasks, backend, COLD, rounds, failures=failures)
        if not found:
            reason = next(iter(failures.values()), "its SPACE is empty")
            raise UserError(f"tune: no configuration of {kernel} runs at {key}: {reason}")
        winner = pick(found)
        best[key] = dict(configs[winner.name])
        say(f"{kernel} {key}: {winner.us:.2f} us, {winner.name}; {len(found)} of {len(configs)} run")
    return best


def _chunks(items: list[str], size: int) -> list[list[str]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def pick(found: Sequence[Timing]) -> Timing:
    """The fastest; of those that tie with it, the first."""
    least = min(t.us for t in found)
    return next(t for t in found if t.us <= least * (1 + TIE))


def read(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The configurations of a device; empty where it has no file.

    Raises:
        UserError: the file is not what this room writes.
    """
    wrong = UserError(f"{path}: not a file of launch configurations; mend or remove it")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise wrong from None
    kernels = content.values() if isinstance(content, dict) else [None]
    if not all(isinstance(by_key, dict) and all(isinstance(c, dict) for c in by_key.values()) for by_key in kernels):
        raise wrong
    return content


def merge(path: Path, kernel: str, best: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the configurations of one kernel into a device's file, atomically; everything else in it stays."""
    content = read(path)
    content.setdefault(kernel, {}).update({key: dict(config) for key, config in best.items()})
    lines = [f"  {json.dumps(name)}: {{\n{_entries(content[name])}\n  }}" for name in sorted(content)]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _entries(by_key: Mapping[str, Any]) -> str:
    """One configuration a line, so that a change is a line of a diff."""
    return ",\n".join(f"    {json.dumps(k)}: {json.dumps(by_key[k], sort_keys=True)}" for k in sorted(by_key))


def gemlite(
    places: Sequence[tuple[int, int, int]],
    forms: Sequence[tuple[int, int]] = ((4, 128), (2, 64)),
    path: Path | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Let the peer GemLite's own tuner run on this GPU where nothing is recorded, and keep what it finds.

    Args:
        places: (N, K, M) of layers and activation rows.
        forms: (bits, group).
        path: the file to add to; that of the device, which `bench` loads, when not given.
        say: takes a line a place.

    Raises:
        UserError: no CUDA device, or GemLite is not there in the release that is compared.
    """
    from repro.bench import peers

    if reason := peers.no_gemlite("cuda"):
        raise UserError(f"tune: gemlite {reason}")
    from gemlite import core

    path, layer = path or peers.gemlite_file("cuda"), None
    for n, k, m in places:
        if layer is None or (layer.rows, layer.columns) != (n, k):
            layer = peers.Layer(n, k)
        for bits, group in forms:
            provider = peers.PEERS[f"w{bits}-g{group}/fp16/gemlite"]
            if provider.takes(m) and not peers.gemlite_configuration(bits, group, layer, m):
                inputs, launch, _ = peers.gemlite_task(bits, group, layer, m)
                launch(**inputs)
                say(f"gemlite W{bits} g{group}, {n} x {k}, M = {m}")
        with tempfile.TemporaryDirectory() as folder:
            core.GemLiteLinear.cache_config(f"{folder}/all.json")
            for name, by_place in read(Path(folder) / "all.json").items():
                if by_place:
                    merge(path, name, by_place)
    return path


def tune(kernel: str, say: Callable[[str], None] = print, configs: Path = CONFIGS) -> Path:
    """Sweep a kernel on this machine's GPU and record what is fastest; `gemlite`: let the peer tune itself.

    Returns:
        The file that was written.

    Raises:
        UserError: no such kernel, one that is launched in one way only, no CUDA device, or one that it cannot run on.
    """
    from repro.bench.kernel_list import TUNABLE, load

    if kernel == "gemlite":
        from repro.bench.bench import COUNTS
        from repro.bench.recorded import shapes

        return gemlite([(n, k, m) for n, k in shapes() for m in COUNTS], say=say)
    module = load(kernel)
    if kernel not in TUNABLE:
        raise UserError(f"tune: {kernel} is launched in one way only; there is {', '.join(sorted(TUNABLE))}")
    if not torch.cuda.is_available():
        raise UserError("tune: this machine has no CUDA device; without a file of configurations heuristics are used")
    if reason := module.unsupported("cuda"):
        raise UserError(f"tune: {reason}")
    from repro.kernels.launch_config import device_slug

    path = configs / f"{device_slug('cuda')}.json"
    read(path)  # complain before the sweep, not after it
    merge(path, kernel, sweep(kernel, TUNABLE[kernel](), Cuda(), say))
    return path
