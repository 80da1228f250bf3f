"""Continuous batching with chunked prefills: which tokens an iteration computes, and how long requests wait.

An iteration computes one token of every sequence that is decoding, and a chunk of the prompts that wait, in the order
of their arrival (Sarathi-Serve, arXiv 2403.02310, algorithm 3): no decode is ever put off. How many tokens a chunk has
is a policy's: a budget that is always the same, or SPEAR's, the largest chunk whose iteration a table of measured
latencies predicts to keep a target (section 4.3).

Nothing here knows a device: `serve` is given a clock and a function that computes an iteration.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from repro.core.errors import UserError


@dataclass(frozen=True)
class Request:
    """A prompt and how many tokens follow it; `arrival` in seconds."""

    number: int
    arrival: float
    prompt_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.new_tokens < 1 or self.arrival < 0:
            problem = f"{self.prompt_tokens} prompt tokens, {self.new_tokens} new ones, arrival {self.arrival}"
            raise UserError(f"request {self.number}: {problem}; one token of each at least, an arrival of 0 or later")


class Running:
    """A request that has a row of the cache.

    Attributes:
        row: of the cache.
        prefilled: tokens of the prompt that are in the cache.
        times: seconds at which each of its new tokens was there.
    """

    def __init__(self, request: Request, row: int) -> None:
        self.request, self.row, self.prefilled = request, row, 0
        self.times: list[float] = []

    @property
    def decodes(self) -> bool:
        """Whether its prompt is in the cache, so that an iteration computes its next token."""
        return self.prefilled == self.request.prompt_tokens

    @property
    def done(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.times) == self.request.new_tokens


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `start + count` of a prompt."""

    running: Running
    start: int
    count: int

    @property
    def ends_prompt(self) -> bool:
        """Whether it has the prompt's last token, whose logits give the first new one."""
        return self.start + self.count == self.running.request.prompt_tokens


@dataclass(frozen=True)
class Batch:
    """The work of an iteration: the next token of `decodes`, and `chunks` of prompts."""

    decodes: Sequence[Running]
    chunks: Sequence[Chunk]

    @property
    def tokens(self) -> int:
        """How many tokens go through the decoder."""
        return len(self.decodes) + sum(chunk.count for chunk in self.chunks)


# --- how many tokens a chunk has --------------------------------------------------------------------------------------


class ChunkPolicy(Protocol):
    """How many tokens of prompts an iteration takes beside its decodes."""

    def chunk(self, decodes: int) -> int:
        """Tokens of prompts, 0 or more, beside so many that are decoded."""


@dataclass(frozen=True)
class StaticBudget:
    """An iteration has at most `tokens` tokens, those that are decoded among them (Sarathi-Serve's token budget)."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserError(f"a budget of {self.tokens} tokens; it must be 1 or more")

    def chunk(self, decodes: int) -> int:
        """The tokens of the budget that decodes leave for prompts."""
        return max(self.tokens - decodes, 0)


class LatencyTable:
    """Milliseconds of an iteration by its number of tokens, between measured numbers by linear interpolation.

    Args:
        points: milliseconds by number of tokens, at least two. They may fall by noise: what is looked up is the least
            function above them that never falls, so that the largest chunk can be found by bisection.
        sizes: numbers of tokens that an iteration is padded to, in order; empty is no padding.
    """

    def __init__(self, points: dict[int, float], sizes: Sequence[int] = ()) -> None:
        if len(points) < 2 or min(points) < 1 or min(points.values()) <= 0:
            raise UserError("a latency table needs two numbers of tokens or more, each with a positive time")
        self.tokens, self.sizes = sorted(points), list(sizes)
        self.milliseconds: list[float] = []
        for tokens in self.tokens:
            below = self.milliseconds[-1] if self.milliseconds else 0.0
            self.milliseconds.append(max(points[tokens], below))

    def __call__(self, tokens: int) -> float:
        """Milliseconds of an iteration of so many tokens; 0 of none.

        Below the first measured number it is that number's time, above the last the last slope goes on.
        """
        if tokens <= 0:
            return 0.0
        padded = self.padded(tokens)
        if padded <= self.tokens[0]:
            return self.milliseconds[0]
        above = min(bisect_left(self.tokens, padded), len(self.tokens) - 1)
        first, second = self.tokens[above - 1 : above + 1]
        low, high = self.milliseconds[above - 1 : above + 1]
        return low + (high - low) * (padded - first) / (second - first)

    def padded(self, tokens: int) -> int:
        """The number of tokens that an iteration of so many is computed as."""
        index = bisect_left(self.sizes, tokens)
        return self.sizes[index] if index < len(self.sizes) else tokens


@dataclass(frozen=True)
class LatencyTarget:
    """The largest chunk whose predicted iteration keeps a target (SPEAR, section 4.3).

    As the paper prints it, T(d) + T(c) ≤ T_SLO with c in [c_min, c_max]: decodes and chunk are priced apart, as if they
    were two passes. `joint` prices them as the one batch that they are, T(d + c) ≤ T_SLO.

    Attributes:
        table: T, of the placement that is served.
        target: T_SLO in milliseconds.
        least, most: c_min, which a chunk has even where the target is missed, so that no prompt waits for ever; and the
            most tokens of an iteration, which bound c_max. The paper gives neither.
    """

    table: LatencyTable
    target: float
    least: int = 16
    most: int = 512
    joint: bool = False

    def __post_init__(self) -> None:
        if self.target <= 0 or not 1 <= self.least <= self.most:
            problem = f"a target of {self.target} ms, chunks of {self.least} tokens up to {self.most} of an iteration"
            raise UserError(f"{problem}; the target must be positive, and 1 <= least <= most")

    def predicted(self, decodes: int, chunk: int) -> float:
        """Milliseconds of an iteration as the rule prices it."""
        if self.joint:
            return self.table(decodes + chunk)
        return self.table(decodes) + self.table(chunk)

    def chunk(self, decodes: int) -> int:
        """The largest chunk by bisection, which T allows because it never falls."""
        least = self.least
        most = max(self.most - decodes, self.least)
        while least < most:
            middle = (least + most + 1) // 2
            if self.predicted(decodes, middle) <= self.target:
                least = middle
            else:
                most = middle - 1
        return least


# --- which tokens an iteration computes -------------------------------------------------------------------------------


class Scheduler:
    """Requests that wait and that run, first come, first served.

    Args:
        policy: how many tokens of prompts an iteration takes.
        rows: of the cache: so many requests run at a time.
    """

    def __init__(self, policy: ChunkPolicy, rows: int) -> None:
        if rows < 1:
            raise UserError(f"{rows} rows of the cache; it must have 1 or more")
        self.policy = policy
        self.waiting: deque[Request] = deque()
        self.running: list[Running] = []
        self.free = list(range(rows - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Put a request after those that wait."""
        self.waiting.append(request)

    def next(self) -> Batch | None:
        """The tokens of the next iteration; None where nothing waits and nothing runs."""
        decodes = [running for running in self.running if running.decodes]
        left = self.policy.chunk(len(decodes))
        chunks = []
        for running in self.running:  # prompts that have begun, in the order of their arrival
            if left > 0 and not running.decodes:
                chunk = self._chunk(running, left)
                chunks.append(chunk)
                left -= chunk.count
        while left > 0 and self.waiting and self.free:
            running = Running(self.waiting.popleft(), self.free.pop())
            self.running.append(running)
            chunk = self._chunk(running, left)
            chunks.append(chunk)
            left -= chunk.count
        return Batch(decodes, chunks) if decodes or chunks else None

    def finish(self, batch: Batch, now: float) -> list[Running]:
        """Note that an iteration is over at a time in seconds; the requests that it ended."""
        for running in batch.decodes:
            running.times.append(now)
        for chunk in batch.chunks:
            chunk.running.prefilled += chunk.count
            if chunk.ends_prompt:
                chunk.running.times.append(now)
        ended = [running for running in self.running if running.done]
        for running in ended:
            self.running.remove(running)
            self.free.append(running.row)
        return ended

    def _chunk(self, running: Running, most: int) -> Chunk:
        """The next tokens of a prompt."""
        return Chunk(running, running.prefilled, min(most, running.request.prompt_tokens - running.prefilled))


# --- serving ----------------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Seconds since serving began."""

    def now(self) -> float:
        """The time."""

    def skip_to(self, seconds: float) -> None:
        """Nothing is to be done before that time."""


class WallClock:
    """The wall's time without the time in which nothing is to be done, which is skipped instead of slept."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds that were computed or skipped."""
        return time.perf_counter() - self._began

    def skip_to(self, seconds: float) -> None:
        """Go on from that time at once."""
        self._began = min(self._began, time.perf_counter() - seconds)


@dataclass
class Served:
    """The observations of served requests, in the order of their numbers.

    Attributes:
        first: seconds from arrival to the first token (TTFT).
        gaps: seconds between neighbouring tokens of each request (ITL).
        iterations: of every iteration its decodes, its tokens of prompts, and its seconds.
    """

    first: list[float] = field(default_factory=list)
    gaps: list[list[float]] = field(default_factory=list)
    iterations: list[tuple[int, int, float]] = field(default_factory=list)


def serve(
    requests: Sequence[Request], scheduler: Scheduler, iteration: Callable[[Batch], object], clock: Clock
) -> Served:
    """Serve requests until each has all its tokens.

    Args:
        requests: in the order of their arrival.
        scheduler: without requests.
        iteration: computes a batch; it returns when its tokens are there.
        clock: whose seconds pass while `iteration` computes.
    """
    coming = deque(sorted(requests, key=lambda request: request.arrival))
    ended: dict[int, Running] = {}
    served = Served()
    while len(ended) < len(requests):
        began = clock.now()
        while coming and coming[0].arrival <= began:
            scheduler.add(coming.popleft())
        batch = scheduler.next()
        if batch is None:
            clock.skip_to(coming[0].arrival)
            continue
        iteration(batch)
        now = clock.now()
        served.iterations.append((len(batch.decodes), batch.tokens - len(batch.decodes), now - began))
        for running in scheduler.finish(batch, now):
            ended[running.request.number] = running
    for request in sorted(requests, key=lambda request: request.number):
        times = ended[request.number].times
        served.first.append(times[0] - request.arrival)
        served.gaps.append([after - before for before, after in zip(times, times[1:])])
    return served
