"""Time of a text along a log of switches, from steps that were measured one by one (FlexQuant, Figures 6 and 7).

    ms(t) = sum over widths w of share_w(t) x step_w(context of t)    each layer's share of the static step of its width
            + extra(progress of t)                                    what a mixture of widths takes beyond that
            + lost(layers)                                            where t is the first token after a switch

The measurements are files of `python -m repro.studies.precision`. Progress is 0 with all layers at 16 bits, 1
with all at 8 and 2 with all at 4: layers go to one width before any goes to the next.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from repro.methods.flexquant.schedule import Switch

WIDTHS = (16, 8, 4)
NEAR = 2  # tokens before a switch that it may delay already: its graph is captured, its weights are copied
Points = tuple[Sequence[float], Sequence[float]]  # rising x, and y


@dataclass(frozen=True)
class MeasuredSteps:
    """The measurements of one shape on one device.

    Attributes:
        shape: its name.
        steps: width to the contexts of its static steps, in the middle of what was timed, and their milliseconds.
        extra: progress of mixtures, and their milliseconds beyond their layers' shares of the static steps.
        lost: layers of a switch, and the milliseconds that one costs all tokens together.
    """

    shape: str
    steps: Mapping[int, Points]
    extra: Points
    lost: Points

    def lacks(self, widths: Sequence[int], context: float, layers: int) -> bool:
        """Whether something that a text needs was not measured: a width, so long a context, mixtures, or its switches.

        Args:
            widths: that the text has.
            context: slots that its last token sees.
            layers: of a switch; 0 is a text that never switches.
        """
        absent = [bits for bits in widths if bits not in self.steps]
        if absent or any(context > self.steps[bits][0][-1] for bits in widths):
            return True
        return layers > 0 and not (len(self.extra[0]) and layers <= max(self.lost[0], default=0))

    def static(self, widths: Sequence[int], contexts: np.ndarray) -> np.ndarray:
        """Milliseconds of static steps, float64 `[tokens, widths]`, between the measured contexts by interpolation."""
        return np.stack([np.interp(contexts, *self.steps[bits]) for bits in widths], axis=1)

    def tokens(self, widths: Sequence[int], share: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        """Milliseconds of every token without what switches lose, float64 `[tokens]`.

        Args:
            widths: of the path, from the first one down.
            share: of the weights at each width, `[tokens, widths]`.
            contexts: slots that each token sees, `[tokens]`.
        """
        times = (share * self.static(widths, contexts)).sum(1)
        if len(widths) > 1:
            progress = share @ np.array([WIDTHS.index(bits) for bits in widths])
            times += np.interp(progress, *self.extra)
        return times

    def lost_by(self, layers: int) -> float:
        """Milliseconds that a switch of so many layers loses."""
        return float(np.interp(layers, *self.lost))


def read(folder: Path) -> MeasuredSteps:
    """The measurements of a folder; what is not there is empty.

    Raises:
        OSError, ValueError: a file that cannot be read.
    """
    facts = [json.loads(path.read_text()) | {"name": path.stem} for path in sorted(folder.glob("*.json"))]

    def of(start: str) -> list[dict]:
        return [one for one in facts if one["name"].startswith(start)]

    steps: dict[int, list[tuple[float, float]]] = {}
    for one in of("step-"):
        middle = one["context"] + one["timed"] / 2
        steps.setdefault(int(one["name"].split("-")[1]), []).append((middle, one["ms"]))
    extra = {}
    for one in of("mixed-random-"):
        extra[float(one["name"].rpartition("-")[2])] = one["ms"] - one["expected ms"]
    if extra:
        extra |= dict.fromkeys((0.0, 1.0, 2.0), 0.0)  # all layers at one width are a static step
    switches = [(one["layers"], statistics.mean(lost(one["ms"], one["steps"]))) for one in of("switch-ahead-")]
    shape = next((one["shape"] for one in of("step-")), "")
    return MeasuredSteps(
        shape, {bits: _points(each) for bits, each in steps.items()}, _points(extra.items()), _points(switches)
    )


def _points(pairs: Iterable[tuple[float, float]]) -> Points:
    ordered = sorted(pairs)
    return [x for x, _ in ordered], [y for _, y in ordered]


def lost(ms: Sequence[float], steps: Sequence[int]) -> list[float]:
    """Milliseconds that each switch but the first and the last loses: what tokens take beyond the settled ones.

    Settled are the last third of the tokens before the next switch, when the next graph is there. The first switch is
    left out, whose graph is the first one ever captured; after the last one there is no next.

    Args:
        ms: of steps 1, 2, …
        steps: at which layers are switched, at least three.
    """
    losses = []
    for before, at, after in zip(steps, steps[1:], steps[2:]):
        earlier, settled = settled_ms(ms, before, at), settled_ms(ms, at, after)
        during = sum(one - earlier for one in ms[at - 1 - NEAR : at - 1])
        behind = sum(one - settled for one in ms[at - 1 : after - 1 - NEAR])
        losses.append(during + behind)
    return losses


def settled_ms(ms: Sequence[float], at: int, after: int) -> float:
    """The median of the last third of the tokens from one switch to what the next one may delay."""
    end = after - 1 - NEAR
    return statistics.median(ms[end - max(1, (end - at + 1) // 3) : end])


def shares(log: Sequence[Switch], path: Sequence[int], sizes: Mapping[str, int], steps: int) -> np.ndarray:
    """The share of the weights at each width of a path in each of decode steps 1 to `steps`, float64 `[steps, widths]`.

    Args:
        log: the switches.
        path: widths, the first being that which every layer begins with.
        sizes: weights of each layer.
        steps: how many decode steps there are.
    """
    change = np.zeros((steps + 1, len(path)))
    change[0, 0] = sum(sizes.values())
    width = dict.fromkeys(sizes, path[0])
    for switch in log:
        at = min(switch.step - 1, steps)
        change[at, path.index(width[switch.layer])] -= sizes[switch.layer]
        change[at, path.index(switch.bits)] += sizes[switch.layer]
        width[switch.layer] = switch.bits
    return change.cumsum(0)[:steps] / sum(sizes.values())
