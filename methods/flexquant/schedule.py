"""When layers are switched (Algorithm 1), the log of it, and the mean bits that follow from the log.

Tokens of a generation count from 0, the one that the prefill gives; token t >= 1 is computed by decode step t. A
switch at step t means that step t is the first one with the new weights.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from repro.core.errors import UserError
from repro.methods.flexquant.config import Config
from repro.methods.flexquant.order import Move

BEHIND = 2  # a token's signal decides on the step after the next one, which is under way when the signal is read
EARLIEST = 1 + BEHIND  # step that a signal of a decode step can lead to


@dataclass(frozen=True)
class Switch:
    """From decode step `step` on, `layer` computes with `bits`."""

    step: int
    layer: str
    bits: int


@dataclass
class SwitchingState:
    """The state that a rule is called with, besides the signal.

    Attributes:
        bits: each layer's width, from the next step on.
        ahead: the moves that are left, in order.
        window: the PPLE of the last `config.window` tokens, of those since the last switch took effect.
        threshold: the mean below which the paper's rule switches; NaN before the prefill.
        since: the first step of the present weights.
    """

    bits: dict[str, int]
    ahead: list[Move]
    window: deque[float]
    threshold: float
    since: int = 1


Rule = Callable[
    [float, int, SwitchingState], Sequence[str]
]  # PPLE of a token, its number, the state; the layers to switch


def paper_rule(config: Config) -> Rule:
    """Algorithm 1's rule, or that of a fixed interval: the layers of the next moves where it is time, else none.

    Without a window every token decides alone, from that of the prefill on.
    """

    def undercut(pple: float, step: int, state: SwitchingState) -> list[str]:
        from_old_weights = 0 < step < state.since
        if len(state.window) < config.window or from_old_weights:
            return []
        mean = sum(state.window) / len(state.window) if state.window else pple
        return _next_layers(state, config.layers) if mean < state.threshold else []

    def after_interval(pple: float, step: int, state: SwitchingState) -> list[str]:
        due = step + BEHIND - state.since >= config.interval
        return _next_layers(state, config.layers) if due else []

    return after_interval if config.interval else undercut


def planned_rule(steps: Sequence[int], layers: int) -> Rule:
    """Switches at given steps, none before `EARLIEST`, whatever the signal is, so many layers each: a control."""
    due = Counter(steps)
    return lambda pple, step, state: _next_layers(state, layers * due[step + BEHIND])


def _next_layers(state: SwitchingState, count: int) -> list[str]:
    return [move.layer for move in state.ahead[:count]]


@dataclass
class Controller:
    """One generation's switches: it is told every token's PPLE in turn, and says what is switched.

    Attributes:
        config: window, threshold and how many layers a switch takes.
        ahead: all moves in order (`order.moves`).
        rule: which layers are switched; the paper's if none is given.
        log: the switches so far.
    """

    config: Config
    ahead: Sequence[Move]
    rule: Rule | None = None
    log: list[Switch] = field(default_factory=list)

    def __post_init__(self) -> None:
        layers = dict.fromkeys(move.layer for move in self.ahead)
        start = dict.fromkeys(layers, self.config.path[0])
        self.state = SwitchingState(start, list(self.ahead), deque(maxlen=self.config.window), math.nan)
        self.rule = self.rule or paper_rule(self.config)

    def start(self, prompt_pple: Sequence[float]) -> list[Switch]:
        """Set the threshold from the PPLE of the last prompt positions; without a window the rule is asked here.

        Args:
            prompt_pple: at every position of the prompt, or at the last ones, at least one.
        """
        config = self.config
        last = prompt_pple[-config.prompt_tokens :]
        mean = sum(last) / len(last)
        self.state.threshold = config.multiple * mean if config.threshold is None else config.threshold
        return self._ask(last[-1], 0, first=1) if config.window == 0 and not config.interval else []

    def observe(self, pple: float, token: int) -> list[Switch]:
        """The switches that token `token` (0, 1, …) leads to; they hold from step `token + BEHIND` on."""
        if token == 0:  # the prefill's, which `start` has seen
            return []
        if token >= self.state.since:
            self.state.window.append(pple)
        return self._ask(pple, token, first=token + BEHIND)

    def upcoming(self) -> dict[str, int]:
        """The widths that layers get if the next moves are made in order, as many as a switch takes."""
        return {move.layer: move.bits for move in self.state.ahead[: self.config.layers]}

    def _ask(self, pple: float, token: int, first: int) -> list[Switch]:
        """Ask the rule, and make its moves from step `first` on."""
        switches = []
        for layer in self.rule(pple, token, self.state):
            move = next((move for move in self.state.ahead if move.layer == layer), None)
            if move is None:
                raise UserError(
                    f"the rule names {layer!r}, which has no move left; choose from the layers of state.ahead"
                )
            self.state.ahead.remove(move)
            self.state.bits[layer] = move.bits
            switches.append(Switch(first, layer, move.bits))
        if switches:
            self.log += switches
            self.state.window.clear()
            self.state.since = first
        return switches


# --- what a log says --------------------------------------------------------------------------------------------------


def bits_by_step(log: Iterable[Switch], sizes: Mapping[str, int], high: int, steps: int) -> np.ndarray:
    """Mean bits of a weight in each of decode steps 1 to `steps`, float64 `[steps]`.

    Args:
        log: the switches.
        sizes: weights of each layer.
        high: the width that every layer begins with.
        steps: how many decode steps there were.
    """
    total = sum(sizes.values())
    bits = dict.fromkeys(sizes, high)
    change = np.zeros(steps + 1, dtype=np.int64)  # of all weights together
    for switch in sorted(log, key=lambda switch: switch.step):
        if switch.step <= steps:
            change[switch.step - 1] += sizes[switch.layer] * (switch.bits - bits[switch.layer])
        bits[switch.layer] = switch.bits
    return (high * total + change[:steps].cumsum()) / total


def mean_bits(
    log: Iterable[Switch], sizes: Mapping[str, int], high: int, steps: int, prefill: int | None = None
) -> float:
    """Mean bits of a weight over the decode steps, or over these and the prefill as one more pass of `prefill` bits.

    Without a step it is the width that decoding would begin with.
    """
    by_step = bits_by_step(log, sizes, high, steps)
    if prefill is not None:
        by_step = np.append(by_step, prefill)
    return float(by_step.mean()) if len(by_step) else float(high)


# --- controls of equal mean bits --------------------------------------------------------------------------------------


def even_steps(count: int, every: float, steps: int) -> list[int]:
    """Steps of at most `count` switches, `every` steps apart; those beyond `steps` are left out."""
    switch_steps = [max(EARLIEST, 1 + round(every * (i + 1))) for i in range(count)]
    return [step for step in switch_steps if step <= steps]


def random_steps(count: int, power: float, steps: int, seed: int) -> list[int]:
    """Sorted steps of `count` switches, drawn uniformly at power 1, earlier at larger powers and later at smaller."""
    times = np.sort(np.random.default_rng(seed).random(count)) ** power
    return [EARLIEST + int(share * max(steps + 1 - EARLIEST, 0)) for share in times]


def stretched_steps(steps: Sequence[int], factor: float) -> list[int]:
    """Steps whose distances from the earliest one that there can be are multiplied."""
    return [EARLIEST + round((step - EARLIEST) * factor) for step in steps]


def matched(
    steps_of: Callable[[float], Sequence[int]],
    cost: Callable[[Sequence[int]], float],
    target: float,
    low: float,
    high: float,
) -> list[int]:
    """The steps whose mean bits are nearest to a target, by bisection of a parameter that `cost` grows or falls with.

    Args:
        steps_of: from the parameter to the steps of the switches.
        cost: from these to mean bits.
        target: mean bits that are wanted.
        low: the parameter is at least this, above 0.
        high: and at most this.
    """
    rising = cost(steps_of(high)) >= cost(steps_of(low))
    best = min((steps_of(low), steps_of(high)), key=lambda steps: abs(cost(steps) - target))
    for _ in range(60):
        middle = math.sqrt(low * high)
        steps = steps_of(middle)
        if abs(cost(steps) - target) < abs(cost(best) - target):
            best = steps
        if (cost(steps) < target) == rising:
            low = middle
        else:
            high = middle
    return list(best)
