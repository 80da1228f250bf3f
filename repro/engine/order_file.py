"""Files with the divergences of a model's layers: FlexQuant computes its order of layers offline (section 4.3).

They follow from the weights alone, and take minutes for a model of 8B; `python -m repro generate --order FILE` makes
them once and reads them from then on. The file says of which model, copies and histograms they are.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repro.core.errors import UserError, shortened
from repro.core.files import reading, regular, write_text
from repro.methods.flexquant.config import Config

Divergence = Mapping[int, Mapping[str, float]]  # width to layer to nats
HISTOGRAM = ("bins", "pseudocount", "direction")  # settings that decide a divergence


def read(path: Path, model: str, weights: Mapping[int, str], config: Config) -> Divergence | None:
    """The divergences of a file; None where there is no file yet.

    Args:
        path: the file.
        model: name, for the sentences.
        weights: width to the id of the model compressed to it.
        config: whose histograms they are of.

    Raises:
        UserError: the file is of another model, of other copies, of other histograms, or not such a file.
    """
    if not path.exists():
        return None
    facts, where = _facts(weights, config), shortened(path, 150)
    again = "name another --order, which is made now"
    try:
        with reading(path, again):
            content = json.loads(regular(path).read_text(encoding="utf-8"))
        whose = content["model"]
        of = dict(content["of"])
        divergences = {int(bits): dict(by_layer) for bits, by_layer in content["divergence"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{where}: no order of layers; {again}") from None
    if of.get("weights") != facts["weights"]:
        difference = (
            f"an order of {whose}, of other weights than {model}'s here (model, quantizer, calibration or path)"
        )
        raise UserError(f"{where}: {difference}; {again}")
    if odd := [name for name in HISTOGRAM if of.get(name) != facts[name]]:
        difference = f"{odd[0]} is {of.get(odd[0])} there and {facts[odd[0]]} here"
        raise UserError(f"{where}: an order of other histograms ({difference}); {again}")
    return divergences


def write(path: Path, model: str, weights: Mapping[int, str], config: Config, divergence: Divergence) -> None:
    """Keep divergences in a file; arguments as of `read`."""
    facts = {"model": model, "of": _facts(weights, config), "divergence": divergence}
    write_text(path, json.dumps(facts, indent=1) + "\n")


def _facts(weights: Mapping[int, str], config: Config) -> dict[str, Any]:
    """The facts that identify the weights of divergences."""
    of_weights = {str(bits): name for bits, name in weights.items()}
    return {"weights": of_weights} | {name: getattr(config, name) for name in HISTOGRAM}
