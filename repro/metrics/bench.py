"""A number of a measurement that a bench of this project has written, one JSON file each.

    offload      python -m repro.studies.offload, and repro.studies.offload_peers
    precision    python -m repro.studies.precision
    sparse       python -m repro.studies.sparse

Files are looked for in `build/<bench>` before `results/<device>/<bench>`. A file may say why it has no number (`why`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from repro.stats.quantity import Quantity, constant
from repro.store.measurement import RESULTS

VERSION = 1
BUILT = Path("build")
STORED = RESULTS / "nvidia-h200"


@dataclass(frozen=True)
class Ask:
    """Field `show` of the measurement `name` of a bench."""

    bench: Literal["offload", "precision", "sparse"]
    name: str
    show: str
    unit: str = ""


def quantity(ask: Ask) -> Quantity | None:
    """The number; None where it was not measured."""
    found = _read(ask).get(ask.show)
    return None if found is None else constant(float(found))


def several(ask: Ask) -> bool:
    """One number a cell."""
    return False


def absent(ask: Ask) -> str:
    """Why there is no number."""
    return _read(ask).get("why", "") or f"{ask.bench} has no measurement {ask.name} here"


def origin(asks: Sequence[Ask]) -> dict[str, str]:
    """Where numbers come from, as fields of a measurement."""
    facts = [_read(ask) for ask in asks]
    joined = {key: " + ".join(sorted({one[key] for one in facts})) for key in ("device", "commit")}
    built = any(_path(ask).is_relative_to(BUILT) for ask in asks)
    calculated = any(one.get("status") == "calculated" for one in facts)
    return joined | {
        "device_class": "cuda",
        "protocol": " + ".join(sorted(set(map(_protocol, asks)))),
        "live": "fresh" if built else "stored",
        "status": "ok",
        "note": "calculated" if calculated else "",
    }


def _protocol(ask: Ask) -> str:
    """What was measured; of the many sparse products without layer and sparsity."""
    name = ask.name.partition("-")[0] if ask.bench == "sparse" else ask.name
    return f"{ask.bench}/{name}"


def _path(ask: Ask) -> Path:
    built = BUILT / ask.bench / f"{ask.name}.json"
    return built if built.is_file() else STORED / ask.bench / f"{ask.name}.json"


def _read(ask: Ask) -> dict[str, Any]:
    path = _path(ask)
    return json.loads(path.read_text()) if path.is_file() else {}
