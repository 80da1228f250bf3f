"""Decode several sequences together: prefill, then steps whose tokens arrive one step later."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repro.core.errors import UserError
from repro.engine.prefill import together
from repro.engine.step import Cache, Decoder, Tokens, on, step
from repro.engine.traffic import Traffic, noted
from repro.kernels import argmax, sample


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < math.inf and 0 <= self.top_k < 2**31 and 0 < self.top_p <= 1):
            settings = f"temperature {self.temperature}, top-k {self.top_k}, top-p {self.top_p}"
            raise UserError(f"{settings}: a temperature and top-k of 0 or more, a top-p above 0 and up to 1")


class DecodingState:
    """The tensors that a decode step reads and changes, at fixed addresses on the device; one entry per sequence.

    Attributes:
        ids: int64 `[T]`, each sequence's last token, not yet in the cache; -1 where the logits were not finite.
        rows: int32 `[T]`, its row of the cache, -1 where it has ended.
        drawn: whether tokens are drawn; else every one is the first of the largest logits.
        scored: whether a step computes `logprobs`, which reads the logits several times more.
        logprobs: float32 `[T]`, of the last tokens; NaN unless scored.
    """

    def __init__(self, size: int, drawn: bool, scored: bool, device: torch.device) -> None:
        self.drawn, self.scored = drawn, scored
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.rows = torch.full((size,), -1, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(size, dtype=torch.int64, device=device)
        self.temperature, self.top_p = torch.zeros(2, size, device=device).unbind()
        self.logprobs = torch.full((size,), math.nan, device=device)
        self.top_k = torch.zeros(size, dtype=torch.int32, device=device)

    def choose(self, logits: Tensor, lengths: Tensor) -> None:
        """Sample every sequence's next token, whose position is the number of tokens before it."""
        self.ids.copy_(self.following(logits, lengths))
        if self.scored:
            self.logprobs.copy_(logits.float().log_softmax(1).gather(1, self.ids.clamp(min=0)[:, None])[:, 0])

    def choose_behind(self, head: nn.Module, hidden: Tensor, lengths: Tensor) -> None:
        """The same from the last hidden states `[T, H]`; logits are whole only where they are read."""
        if self.chooses_on(head):
            self.ids.copy_(head.greedy(hidden))
        else:
            self.choose(head(hidden), lengths)

    def chooses_on(self, head: nn.Module) -> bool:
        """Whether the head chooses tokens itself: one that is split over ranks does, greedily (`parallel.py`)."""
        return hasattr(head, "greedy") and not (self.drawn or self.scored)

    def following(self, logits: Tensor, lengths: Tensor) -> Tensor:
        """Every sequence's next token, int64 `[T]`; -1 where the logits are not finite."""
        if not self.drawn:
            return on(logits.device, argmax)(logits)
        how = self.seeds, lengths.long(), self.temperature, self.top_k, self.top_p
        return on(logits.device, sample)(logits, *how)


@torch.inference_mode()
def advance(model: Decoder, cache: Cache, state: DecodingState) -> None:
    """One decode step: every sequence's last token goes through the decoder and gives the next one."""
    live = state.rows >= 0
    rows = state.rows.clamp(min=0).long()
    positions = cache.lengths[rows].where(live, 0)
    lengths = positions + 1
    tokens = Tokens(state.ids.clamp(min=0), state.rows, positions, positions, lengths)
    state.choose_behind(model.head, step(model, cache, tokens), lengths)
    cache.lengths.index_add_(0, rows, live.int())


class Steps:
    """`advance`, on a GPU as one CUDA graph for each number of tokens; it owns whatever a captured step reads.

    A model whose weights stream is not captured.

    Attributes:
        passes: notes every step for a measurement.

    CAPTURE: options of `torch.cuda.graph`.
    """

    STATE = DecodingState
    CAPTURE: Mapping[str, Any] = {}
    passes: Traffic | None = None

    def __init__(self, model: Decoder, rows: int) -> None:
        self.model = model
        self.cache = Cache(model, rows)
        self.graphed = model.device.type == "cuda" and not model.streams
        self.states: dict[tuple[int, bool, bool], DecodingState] = {}
        self.graphs: dict[DecodingState, torch.cuda.CUDAGraph] = {}

    def state(self, sequences: int, drawn: bool, scored: bool) -> DecodingState:
        """The state of a number of sequences: on a GPU padded to a power of two, so that few graphs are captured."""
        size = 1 << (sequences - 1).bit_length() if self.graphed else sequences
        state = self.states.setdefault((size, drawn, scored), self.STATE(size, drawn, scored, self.model.device))
        state.rows.fill_(-1)
        return state

    def rest(self) -> None:
        """Wait until no other thread uses the device for these steps, so that something else can be measured on it."""

    def __call__(self, state: DecodingState) -> None:
        """One step."""
        if self.graphed and state not in self.graphs:
            self.graphs[state] = self._capture(state)
        with noted(self.passes):
            self.graphs[state].replay() if self.graphed else advance(self.model, self.cache, state)

    def _capture(self, state: DecodingState) -> torch.cuda.CUDAGraph:
        """The step as a graph. It runs twice before, as libraries set themselves up, with all rows as padding."""
        saved = [(tensor, tensor.clone()) for tensor in (state.ids, state.rows, state.logprobs)]
        state.rows.fill_(-1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                advance(self.model, self.cache, state)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, **self.CAPTURE):
            advance(self.model, self.cache, state)
        for tensor, before in saved:
            tensor.copy_(before)
        return graph


def prefill(steps: Steps, ids: Tensor, row: int, chunk: int) -> Iterator[Tensor]:
    """Put tokens `[T]` into an empty row of the cache; yields their last hidden states in pieces `[≤ chunk, H]`."""
    yield from together(steps.model, steps.cache, [ids], chunk, row)[0].split(chunk)


class Decoding:
    """A batch of sequences: token ids, the number of new tokens of each (one or more), sampling, and seeds.

    `scored` asks for log probabilities, which are NaN else.

    Attributes:
        running: the sequences that go on.
        prefill_s: seconds until every sequence had its first token.
        seconds: of every step after that.
        slots: cache slots that all these steps read.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], sampling: Sampling, seeds: Sequence[int],
        scored: bool = False,
    ) -> None:  # fmt: skip
        self.prompts = prompts
        self.limits = limits
        self.sampling = sampling
        self.seeds = seeds
        self.scored = scored
        self.running = set(range(len(prompts)))
        self.prefill_s = math.nan
        self.seconds = []
        self.slots = 0

    def run(self, steps: Steps, chunk: int) -> Iterator[list[tuple[int, int, float]]]:
        """(sequence, token, log probability) of those that go on, step by step; the next step is launched before."""
        began = time.perf_counter()
        self.state = steps.state(len(self.prompts), self.sampling.temperature > 0, self.scored)
        self._prefill(steps, chunk)
        waiting = self._fetch()
        emitted = 0
        while self.running:
            emitted += 1
            going = {i for i in self.running if self.limits[i] > emitted}
            for i in self.running - going:
                self.state.rows[i] = -1  # its last token is on its way
            following = None
            if going:
                steps(self.state)
                self.slots += sum(len(self.prompts[i]) + emitted for i in going)
                following = self._fetch()
            tokens, logprobs, ready = waiting()
            if emitted == 1:
                self.prefill_s = ready - began
            else:
                self.seconds.append(ready - began)
            began = ready
            tokens_of_step = [(i, tokens[i], logprobs[i]) for i in sorted(self.running)]
            if any(token < 0 for _, token, _ in tokens_of_step):
                raise UserError("the logits are not finite; the model or its compression is damaged")
            yield tokens_of_step
            self.running &= going
            waiting = following

    def end(self, sequence: int) -> None:
        """Drop a sequence; what is under way for it is dropped too."""
        self.running.discard(sequence)
        self.state.rows[sequence] = -1

    @torch.inference_mode()
    def _prefill(self, steps: Steps, chunk: int) -> None:
        state = self.state
        device = steps.model.device
        count = len(self.prompts)
        last = []
        state.rows[:count] = torch.arange(count, dtype=torch.int32, device=device)
        state.seeds[:count] = torch.tensor(self.seeds, device=device)
        for name in ("temperature", "top_k", "top_p"):
            getattr(state, name).fill_(getattr(self.sampling, name))
        for row, hidden in enumerate(together(steps.model, steps.cache, self.prompts, chunk)):
            last.append(self._last(steps, row, iter(hidden.split(chunk))))
        head, hidden = steps.model.head, torch.cat(last)
        padding = len(state.ids) - count
        if state.chooses_on(head):
            tokens = head.greedy(hidden)
            state.ids.copy_(torch.cat([tokens, tokens[-1:].expand(padding)]))
            return
        logits = head(hidden)
        lengths = torch.tensor([*map(len, self.prompts), *[0] * padding], device=device)
        state.choose(torch.cat([logits, logits[-1:].expand(padding, -1)]), lengths)

    def _last(self, steps: Steps, row: int, chunks: Iterator[Tensor]) -> Tensor:
        """Run a prompt's prefill; the hidden state `[1, H]` of its last token."""
        *_, last = chunks
        return last[-1:]

    def _fetch(self) -> Callable[[], tuple[list[int], list[float], float]]:
        """Start copying the last tokens to the host; the function waits for them and says when they were there."""
        tensors = self.state.ids, self.state.logprobs
        if self.state.ids.device.type != "cuda":
            fetched = (*(t.tolist() for t in tensors), time.perf_counter())
            return lambda: fetched
        host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
        event = torch.cuda.Event()
        event.record()

        def wait() -> tuple[list[int], list[float], float]:
            event.synchronize()
            return host[0].tolist(), host[1].tolist(), time.perf_counter()

        return wait
