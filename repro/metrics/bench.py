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

from repro.metrics.metric import External
from repro.stats.quantity import Quantity, constant
from repro.store.measurement import RESULTS

BUILT = Path("build")
STORED = RESULTS / "nvidia-h200"


@dataclass(frozen=True)
class Bench(External):
    """Field `show` of the measurement `name` of a bench."""

    VERSION = 1

    bench: Literal["offload", "precision", "sparse"]
    name: str
    show: str
    unit: str = ""

    def read(self) -> Quantity | None:
        """The number; None where it was not measured."""
        number = _read(self).get(self.show)
        return None if number is None else constant(float(number))

    def absent(self) -> str:
        """Why there is no number."""
        return _read(self).get("why", "") or f"{self.bench} has no measurement {self.name} here"

    @staticmethod
    def origin(all_params: Sequence["Bench"]) -> dict[str, str]:
        """Where numbers come from, as fields of a measurement."""
        facts = [_read(params) for params in all_params]
        joined = {key: " + ".join(sorted({entry[key] for entry in facts})) for key in ("device", "commit")}
        built = any(_path(params).is_relative_to(BUILT) for params in all_params)
        calculated = any(entry.get("status") == "calculated" for entry in facts)
        return joined | {
            "device_class": "cuda",
            "protocol": " + ".join(sorted(set(map(_protocol, all_params)))),
            "source": "fresh" if built else "stored",
            "status": "ok",
            "note": "calculated" if calculated else "",
        }


def _protocol(params: Bench) -> str:
    """The name of a measurement's protocol; of sparse products, without layer and sparsity."""
    name = params.name.partition("-")[0] if params.bench == "sparse" else params.name
    return f"{params.bench}/{name}"


def _path(params: Bench) -> Path:
    built = BUILT / params.bench / f"{params.name}.json"
    return built if built.is_file() else STORED / params.bench / f"{params.name}.json"


def _read(params: Bench) -> dict[str, Any]:
    path = _path(params)
    return json.loads(path.read_text()) if path.is_file() else {}
