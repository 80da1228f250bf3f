"""Milliseconds a token at a paper's shapes along a schedule of precision, calculated from measured steps.

The steps are those of `python -m repro.studies.precision`, one JSON file each: all layers at one width, after so
many tokens, mixtures of widths, and what switches lose. A text's time is their sum along its switches
(`repro/bench/along.py`; FlexQuant, Figures 6 and 7). That run's `whole.json` compares one whole run with such a sum.

A schedule is shown at its best: every window qualifies, and no threshold can be faster with as many layers a switch.

A step is not the same from one process to the next. Where the measurements were made in several processes, each in a
folder `run-1`, `run-2`, ..., a time is calculated from each, and its interval is that of their mean; one process gives
none.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np

from repro.bench import along
from repro.bench.along import MeasuredSteps
from repro.core.errors import UserError
from repro.core.strict import load_yaml
from repro.engine import weights
from repro.methods.flexquant import order
from repro.methods.flexquant.config import Config
from repro.methods.flexquant.schedule import Controller, Switch
from repro.metrics.metric import External
from repro.recipes import precision_schedules
from repro.stats.quantity import Quantity
from repro.stats.statistics import Interval
from repro.store.measurement import RESULTS
from repro.store.observations import Series

BUILT = Path("build") / "precision"
STORED = RESULTS / "nvidia-h200" / "precision"
PROMPT = 128  # tokens before the text
HIGH = 16


@dataclass(frozen=True)
class TimePerToken(External):
    """A time of a text of a number of tokens.

    Attributes:
        show: `ms` a token, in the mean over the text, or how many `times` that of 16 bits is as long; of the last token
            alone, `16 bits`, `8 bits` and `4 bits` are the milliseconds of the layers at a width, `mixing` what the
            mixture of widths takes beyond these, `cache` what keys and values add, `PPLE` what the signal costs (the
            measured steps listen: it is taken out of the layers'), `switching` what switches delay a token in the mean.
        schedule: such as `flexquant(layers=4)`; empty is `bits` from the first token to the last.
    """

    VERSION = 3  # the parts of a step add up: the signal is not in the layers' any more

    show: Literal["ms", "times", "16 bits", "8 bits", "4 bits", "mixing", "cache", "PPLE", "switching"]
    tokens: str
    schedule: str = ""
    bits: str = ""
    unit: str = "ms"

    def __post_init__(self) -> None:
        if not self.tokens.isdecimal() or int(self.tokens) < 1:
            raise UserError(f"tpot: tokens is {self.tokens!r:.40}; it must be a number, 1 or more")
        if bool(self.schedule) == bool(self.bits):
            raise UserError("tpot: give a schedule, such as flexquant(layers=4), or bits, such as 8")
        widths = precision_schedules.read(self.schedule).path if self.schedule else [self.bits]
        if odd := [bits for bits in widths if str(bits) not in ("16", "8", "4")]:
            raise UserError(f"tpot: {odd[0]} bits have no step that is timed; choose from 16, 8, 4")

    def read(self) -> Quantity | None:
        """The number of each process; None where a step that it takes was not measured."""
        values = [_value(self, *run) for run in _runs()]
        if not values or None in values:
            return None
        if len(values) == 1:
            exact = Interval(values[0], values[0], values[0], 0, None, "", (values[0],))
            return Quantity([{}], lambda mean: mean["x"], known={"x": exact})
        processes = [{"x": Series(np.asarray([value]), "model")} for value in values]
        return Quantity(processes, lambda mean: mean["x"])

    @staticmethod
    def origin(all_params: Sequence["TimePerToken"]) -> dict[str, str]:
        """Where the steps come from, as fields of a measurement."""
        runs = _runs()
        facts = []
        for folder, files in runs:
            facts += [json.loads((folder / name).read_text()) for name, _ in files if name.startswith("step-")]
        joined = {key: " + ".join(sorted({entry[key] for entry in facts})) for key in ("device", "commit", "shape")}
        processes = f", of {len(runs)} processes" if len(runs) > 1 else ""
        return {
            "device": joined["device"],
            "stand_in": joined["shape"],
            "commit": joined["commit"],
            "device_class": "cuda",
            "protocol": f"sum of measured steps after {PROMPT} tokens{processes}",
            "covers": "processes" if processes else "",
            "source": "fresh" if any(folder.is_relative_to(BUILT) for folder, _ in runs) else "stored",
            "status": "ok",
            "note": "calculated",
        }


def at_best(config: Config, sizes: dict[str, int], steps: int) -> list[Switch]:
    """The switches in decode steps 1 to `steps` if every window qualifies: none is earlier with as many layers each.

    Args:
        config: window, layers a switch and path.
        sizes: weights of each layer, in the model's order.
        steps: decode steps.
    """
    always = replace(config, threshold=None, multiple=1e30, order="model")
    controller = Controller(always, order.moves({}, list(sizes), always))
    controller.start([1.0])
    for token in range(1, steps):
        controller.observe(1.0, token)
    return [switch for switch in controller.log if switch.step <= steps]


# --- measured steps ---------------------------------------------------------------------------------------------------


Stamps = tuple[tuple[str, int], ...]  # files of a folder, and when each was written


def _runs() -> list[tuple[Path, Stamps]]:
    """The folders of the processes, each with its files: those made here, else the stored ones; none without a step."""
    for folder in (BUILT, STORED):
        runs = [_files(path) for path in (sorted(folder.glob("run-*/")) or [folder])]
        if all(any(name.startswith("step-") for name, _ in files) for _, files in runs):
            return runs
    return []


def _files(folder: Path) -> tuple[Path, Stamps]:
    """A folder and its measurements."""
    return folder, tuple(sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("*.json")))


@cache
def _measured(folder: Path, files: Stamps) -> MeasuredSteps:
    """The measurements of a folder whose files are those."""
    return along.read(folder)


@cache
def _sizes(shape: str) -> dict[str, int]:
    """Weights of every layer of a shape, in the model's order."""
    public = load_yaml(Path(weights.__file__).with_name("shapes.yaml"))
    config = SimpleNamespace(**public[shape.removeprefix("shape/")])
    sizes = {}
    for number in range(config.num_hidden_layers):
        for product, (rows, columns) in weights.layer_sizes(config).items():
            for layer, size in zip(weights.LAYERS[product], rows):
                sizes[f"{number}.{layer}"] = size * columns
    return sizes


@cache
def _value(params: TimePerToken, folder: Path, files: Stamps) -> float | None:
    measured, count = _measured(folder, files), int(params.tokens)
    config = precision_schedules.read(params.schedule) if params.schedule else None
    path = config.path if config else [int(params.bits)]
    widths = {*path, HIGH} if params.show == "times" else set(path)
    contexts = PROMPT + np.arange(1, count + 1)
    if measured.lacks(sorted(widths), contexts[-1], config.layers if config else 0):
        return None
    share = np.ones((count, 1))
    switches = []
    if config:
        sizes = _sizes(measured.shape)
        log = at_best(config, sizes, count)
        share = along.shares(log, path, sizes, count)
        switches = sorted({switch.step for switch in log})
    lost = len(switches) * measured.lost_by(config.layers) / count if switches else 0.0
    if params.show == "switching":
        return lost
    if params.show == "PPLE":
        return _signal(folder) if config else 0.0
    if params.show in ("ms", "times"):
        mean = float(measured.tokens(path, share, contexts).mean()) + lost
        return mean if params.show == "ms" else float(measured.static([HIGH], contexts).mean()) / mean
    last = contexts[-1:]
    if params.show == "mixing":
        return float((measured.tokens(path, share[-1:], last) - (share[-1:] * measured.static(path, last)).sum())[0])
    signal = (_signal(folder) or 0.0) if config else 0.0
    short = [measured.steps[bits][1][0] - signal for bits in path]
    return _part(params.show, path, share[-1], measured.static(path, last)[0] - signal, short)


def _signal(folder: Path) -> float | None:
    """Milliseconds a token of PPLE, window and decision; None where they were not measured."""
    path = folder / "signal.json"
    if not path.is_file():
        return None
    times = json.loads(path.read_text())
    return max(0.0, times["listening ms"] - times["plain ms"])


def _part(show: str, path: Sequence[int], share: np.ndarray, milliseconds: np.ndarray, short: Sequence[float]) -> float:
    """Milliseconds of one part of a step.

    Args:
        show: `cache`, or a width.
        path: widths.
        share: of the weights at each width.
        milliseconds: the step of each width at this context.
        short: and at the shortest one that was measured, where keys and values are next to nothing.
    """
    if show == "cache":
        return float((share * (milliseconds - short)).sum())
    bits = int(show.split()[0])
    return float(share[path.index(bits)] * short[path.index(bits)]) if bits in path else 0.0
