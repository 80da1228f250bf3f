"""Decoding that switches layers to fewer bits as it goes (FlexQuant): one controller per sequence, and its layers.

The signal of a token is read while the next one is computed, so that decoding never waits (`schedule.BEHIND`). A single
sequence runs the products of its present state; on a GPU each state has a captured step, which a thread captures while
the state before is replayed (`Recorder`). In a batch each sequence has a state of its own, and every copy computes
(`copies.py`).
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

from repro.core.errors import UserError
from repro.engine import copies, hosted, weights
from repro.engine.core import Core
from repro.engine.decoding import Decoding, DecodingState, Sampling, Steps, advance
from repro.engine.prefill import together
from repro.engine.step import Cache, Decoder, Tokens, step
from repro.methods.flexquant import order, schedule
from repro.methods.flexquant.config import Config
from repro.methods.flexquant.order import Move
from repro.methods.flexquant.pple import fault_tolerance, pple, pple_and_token
from repro.methods.flexquant.schedule import Controller, Rule, Switch
from repro.models.lowbit import LowBitModel, block_linears

BY_WEIGHTS = ("kl", "reversed")  # orders that follow from the divergence of weights
TURN = 1e-4  # seconds for which a thread that captures may keep the interpreter's lock from the one that decodes


class SignalState(DecodingState):
    """A state whose steps also say how uncertain they were.

    Attributes:
        pple: float32 `[T]`, perplexity entropy of every last token's distribution.
    """

    def __init__(self, size: int, drawn: bool, scored: bool, device: torch.device) -> None:
        super().__init__(size, drawn, scored, device)
        self.pple = torch.zeros(size, device=device)

    def following(self, logits: Tensor, lengths: Tensor) -> Tensor:
        """Every sequence's next token; the signal of its distribution is kept."""
        signal, greedy = pple_and_token(logits)
        self.pple.copy_(signal)
        return super().following(logits, lengths) if self.drawn else greedy


class SwitchingSteps(Steps):
    """Steps of a decoder whose products have copies: one state for a single sequence, one a row for a batch.

    On a GPU the step of a single sequence is a graph for each state. Where the next state is known before it is asked
    for, its graph is captured by a thread while the present one is replayed, so that a switch replays another graph.

    Attributes:
        ahead: whether graphs are captured before they are asked for.
        recorder: what captures them, from the first one on.
    """

    STATE = SignalState

    def __init__(self, model: Decoder, rows: int) -> None:
        super().__init__(model, rows)
        self.copies = []
        for block in model.blocks:
            self.copies += copies.copies_of(block)
        self.where = {}
        for weight in self.copies:
            self.where |= {name: (weight, i) for i, name in enumerate(weight.names)}
        self.widths = list(self.copies[0].at)
        self.staging = getattr(self.copies[0], "staging", None)  # of copies on the host
        self.ahead = True
        self.levels: Tensor | None = None  # int8 [rows, layers] on the host, of a batch
        self._on_device: Tensor | None = None  # the same on the device; the copies' own are views of it
        self.recorder: Recorder | None = None
        self._single: DecodingState | None = None
        self._next: dict[str, int] | None = None  # the state that may come next
        self._coming: Future | None = None  # of its weights from the host
        self._retired: list[torch.cuda.CUDAGraph] = []  # may still run

    def state(self, sequences: int, drawn: bool, scored: bool) -> DecodingState:
        """The state of a number of sequences, each of which begins with the first width."""
        state = super().state(sequences, drawn, scored)
        if sequences == 1:
            self.levels, self._single = None, state
            for weight in self.copies:
                weight.levels = None
            self.set_bits(dict.fromkeys(self.where, self.widths[0]))
            if self.staging is not None:
                self.staging.prefetched = self.staging.late = 0  # of this generation
            return state
        size = len(state.ids)
        if self._on_device is None or len(self._on_device) < size:
            self._on_device = torch.zeros(size, len(self.where), dtype=torch.int8, device=self.model.device)
            self.graphs.clear()  # captured steps read the tensor before
        self.levels = torch.zeros(self._on_device.shape, dtype=torch.int8)
        start = 0
        for weight in self.copies:
            weight.levels = self._on_device[:, start : start + len(weight.names)]
            start += len(weight.names)
        self._on_device.zero_()
        return state

    @property
    def bits(self) -> dict[str, int]:
        """Each layer's width, of a single sequence."""
        return {name: weight.bits[i] for name, (weight, i) in self.where.items()}

    def set_bits(self, bits: Mapping[str, int]) -> None:
        """Give layers their widths, of a single sequence, for the next step that is launched."""
        if self._coming is not None:
            self._coming.result()
            self._coming = None
        if self.recorder is not None:
            self.recorder.wait(self._single, self.bits | bits)
        changed = False
        for weight in self.copies:
            new_bits = [bits.get(name, current) for name, current in zip(weight.names, weight.bits)]
            if new_bits != weight.bits:
                weight.set(new_bits)
                changed = True
        if changed and self._single in self.graphs:
            self._retired = [*self._retired[-1:], self.graphs.pop(self._single)]

    def prepare(self, bits: Mapping[str, int]) -> None:
        """Make ready for a state that may come next: bring its weights from the host, and capture its step on a GPU."""
        self._next = self.bits | bits if self.levels is None else None
        if self.staging is not None:
            self.staging.release()
            bring = partial(self._bring, dict(bits), self._next)
            if self.recorder is None:
                bring()
            else:
                self._coming = self.recorder.submit(bring)
        if self.recorder is not None:
            self._begin_next()

    def rest(self) -> None:
        """Wait for the weights that come and the step that is captured, of a state that may not come any more."""
        if self.recorder is not None:
            self.recorder.rest()

    def _bring(self, moved: Mapping[str, int], state: Mapping[str, int]) -> None:
        """Begin to copy the weights of moves from the host, and find where a switch to the state will put them."""
        by_weight = {}
        for name, width in moved.items():
            weight, layer = self.where[name]
            by_weight[name, width] = weight.source(layer, width)
        self.staging.begin(by_weight)
        for weight in self.copies:
            after = [state[name] for name in weight.names]
            if after != weight.bits:
                weight.change(weight.bits, after)

    def _begin_next(self) -> None:
        if self.ahead and self._next is not None and self._next != self.bits:
            self.recorder.begin(self._single, self._next)

    def switch(self, sequence: int, switches: Sequence[Switch]) -> None:
        """Make a sequence's switches, for the next step that is launched."""
        if not switches:
            return
        if self.levels is None:
            self.set_bits({switch.layer: switch.bits for switch in switches})
            return
        for number, layer in enumerate(self.where):
            for switch in switches:
                if switch.layer == layer:
                    self.levels[sequence, number] = self.widths.index(switch.bits)
        self._on_device.copy_(self.levels)

    def _capture(self, state: DecodingState) -> torch.cuda.CUDAGraph:
        if self.levels is not None:
            return super()._capture(state)
        if self.recorder is not None:
            return self.recorder.graph(state, self.bits)
        self.recorder = Recorder(self.model, self.cache)
        graph = self.recorder.graph(state, self.bits)
        self._begin_next()
        return graph


class Recorder:
    """Captures decode steps of a model's states in a thread of its own, on a stream of its own.

    One thread captures all of them, because libraries keep their handles and workspaces by thread: what a capture may
    not set up is set up by running every product once before the first.

    The thread makes the products of a state as well, and brings its weights where the copies are on the host, so that a
    switch costs the thread that decodes nothing but looking up those of the layers that it names, and launching the
    copies. The interpreter's lock is handed over often while a capture runs.

    Attributes:
        captured: seconds of every capture.
        waited: seconds that decoding waited for a graph that had been begun.
    """

    def __init__(self, model: Decoder, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.captured: list[float] = []
        self.waited: list[float] = []
        self._thread = ThreadPoolExecutor(1, "capture")
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._first: tuple[tuple, torch.cuda.CUDAGraph] | None = None  # that of the state which generations begin with
        self._begun: dict[tuple, Future] = {}
        self._spent = 0.0  # seconds that were waited for the graph that comes next
        self._thread.submit(self._warm).result()

    def submit(self, work: Callable[[], None]) -> Future:
        """Let the thread do something between two captures, so that the one that decodes does not."""
        return self._thread.submit(self._do, work)

    @torch.inference_mode()
    def _do(self, work: Callable[[], None]) -> None:
        torch.cuda.set_device(self.model.device)
        with quick_turns():
            work()

    def rest(self) -> None:
        """Wait until the thread has nothing to do."""
        self._thread.submit(lambda: None).result()

    def begin(self, state: DecodingState, bits: Mapping[str, int]) -> None:
        """Begin to capture a state's step."""
        key = (id(state), *bits.values())
        if key not in self._begun:
            self._begun[key] = self._thread.submit(self._record, dict(bits), state)
        while len(self._begun) > 2:  # of a switch that was not made
            self._begun.pop(next(iter(self._begun)))

    def wait(self, state: DecodingState | None, bits: Mapping[str, int]) -> None:
        """Wait for a step that has been begun, so that its products are there when layers are given their widths."""
        key = (id(state), *bits.values())
        if key in self._begun:
            began = time.perf_counter()
            self._begun[key].result()
            self._spent += time.perf_counter() - began

    def graph(self, state: DecodingState, bits: Mapping[str, int]) -> torch.cuda.CUDAGraph:
        """The captured step of a state; waits for it where it is not there yet."""
        key = (id(state), *bits.values())
        if self._first and self._first[0] == key:
            return self._first[1]
        began = time.perf_counter()
        if key in self._begun:
            recorded = self._begun.pop(key).result()
            self.waited.append(self._spent + time.perf_counter() - began)
            self._spent = 0.0
            return recorded
        recorded = self._thread.submit(self._record, dict(bits), state).result()
        if self._first is None or self._first[0][0] != id(state):
            self._first = key, recorded
        return recorded

    @torch.inference_mode()
    def _warm(self) -> None:
        """Run the step once in the first state, and every product of a block in all that it can be made of."""
        torch.cuda.set_device(self.model.device)
        self._stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(self._stream):
            for weight in copies.copies_of(self.model.blocks[0]):
                for bits in weight.at:
                    x = torch.zeros(1, weight.columns, dtype=self.model.embedding.dtype, device=self.model.device)
                    for first, end in combinations(range(len(weight.names) + 1), 2):
                        weight.part(first, end, bits)(x)
                        for side in weights.side_streams(len(weight.names) - 1):
                            side.wait_stream(self._stream)
                            with torch.cuda.stream(side):
                                weight.part(first, end, bits)(x)
            spare = SignalState(1, False, False, self.model.device)  # all of its rows are padding
            for _ in range(2):
                advance(self.model, self.cache, spare)
        torch.cuda.synchronize()

    def _record(self, bits: Mapping[str, int], state: DecodingState) -> torch.cuda.CUDAGraph:
        began = time.perf_counter()
        torch.cuda.set_device(self.model.device)
        graph = torch.cuda.CUDAGraph()
        with quick_turns(), no_collection(), torch.cuda.stream(self._stream):
            model = copies.static(self.model, bits)
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                advance(model, self.cache, state)
            finally:
                graph.capture_end()
        self.captured.append(time.perf_counter() - began)
        return graph


@contextmanager
def quick_turns() -> Iterator[None]:
    """Let a thread that asks for the interpreter's lock wait for `TURN` at most; otherwise 5 ms, a whole step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def no_collection() -> Iterator[None]:
    """Let no garbage collection begin: it may free an older graph, which a thread that captures must not do."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class SwitchingDecoding(Decoding):
    """A batch of sequences with a controller each.

    Attributes:
        signal: the PPLE of every token of each sequence.
    """

    def __init__(
        self,
        *given: Any,  # noqa: ANN401
        controllers: Sequence[Controller],
        fixed_bits: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(*given)
        self.controllers, self.fixed_bits = controllers, fixed_bits
        self.signal: list[list[float]] = [[] for _ in self.prompts]
        self._fetched = 0

    def run(self, steps: SwitchingSteps, chunk: int) -> Iterator[list[tuple[int, int, float]]]:
        """As `Decoding.run`; a switch is made as soon as the signal that asks for it is read."""
        self._steps = steps
        yield from super().run(steps, chunk)

    def start(self, steps: SwitchingSteps, row: int, chunks: Iterator[Tensor]) -> Tensor:
        """Run a prompt's prefill and set its controller's threshold; the hidden state `[1, H]` of the last token."""
        controller = self.controllers[row]
        tail = None
        for hidden in chunks:
            tail = hidden if tail is None else torch.cat([tail, hidden])
            tail = tail[-controller.config.prompt_tokens :]
        steps.switch(row, controller.start(pple(steps.model.head(tail)).tolist()))
        if not self.fixed_bits:
            steps.prepare(controller.upcoming())
        return tail[-1:]

    def observe(self, token: int, signal: Sequence[float], steps: SwitchingSteps) -> None:
        """Make the switches that the signals of the sequences that go on lead to."""
        for row in sorted(self.running):
            if moves := self.controllers[row].observe(signal[row], token):
                steps.switch(row, moves)
                steps.prepare(self.controllers[row].upcoming())

    def _prefill(self, steps: SwitchingSteps, chunk: int) -> None:
        if self.fixed_bits:
            steps.set_bits(self.fixed_bits)
        super()._prefill(steps, chunk)

    def _last(self, steps: SwitchingSteps, row: int, chunks: Iterator[Tensor]) -> Tensor:
        return self.start(steps, row, chunks)

    def _fetch(self) -> Callable[[], tuple[list[int], list[float], float]]:
        token = self._fetched
        pinned = self.state.pple.device.type == "cuda"
        self._fetched += 1
        host = torch.empty(self.state.pple.shape, pin_memory=pinned)
        host.copy_(self.state.pple, non_blocking=pinned)  # before the event that the other copies wait for
        wait = super()._fetch()

        def observed() -> tuple[list[int], list[float], float]:
            arrived = wait()
            signal = host.tolist()
            for row in self.running:
                self.signal[row].append(signal[row])
            self.observe(token, signal, self._steps)
            return arrived

        return observed


@dataclass(frozen=True)
class SwitchingRecord:
    """A record of a generation's precision; every list has one entry per sequence.

    Attributes:
        logs: the switches.
        signal: the PPLE of every token.
        thresholds: below which the window's mean asked for a switch.
        bits: mean bits of a weight over the decode steps.
        bits_with_prefill: the prefill counted as one more step.
    """

    logs: list[list[Switch]] = field(default_factory=list)
    signal: list[list[float]] = field(default_factory=list)
    thresholds: list[float] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)
    bits_with_prefill: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        lines = []
        for log, bits, threshold in zip(self.logs, self.bits, self.thresholds):
            steps = sorted({switch.step for switch in log})
            when = f", the first before token {steps[0]}, the last before {steps[-1]}" if steps else ""
            layers = "1 layer" if len(log) == 1 else f"{len(log)} layers"
            lines.append(f"{bits:.3f} bits a weight | {layers} switched{when} | threshold {threshold:.3f}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Along:
    """A run along given outputs; every list has an entry a sequence, of a number a token.

    Attributes:
        kl: KL divergence in nats from the other decoder.
        gap: the probability of the first token less that of the second.
        switching: what became of the precision.
    """

    kl: list[list[float]]
    gap: list[list[float]]
    switching: SwitchingRecord


class SwitchingCore(Core):
    """An engine whose layers have copies at several widths; `Core` says what it can be asked.

    Attributes:
        config: of FlexQuant.
        ahead: every switch in the order in which they are made.
        rule: which layers are switched, and when; one for each sequence of a batch, or None for the paper's.
        switching: of the last generation.
        high: the width that every layer begins with.
    """

    STEPS = SwitchingSteps

    def __init__(
        self,
        name: str,
        model: Decoder,
        config: Config,
        ahead: Sequence[Move],
        hub: bool = False,
        rule: Rule | Sequence[Rule] | None = None,
    ) -> None:
        super().__init__(name, model, hub)
        self.config = config
        self.ahead = list(ahead)
        self.rule = rule
        self.switching = SwitchingRecord()
        self.weights = copies.weights_of(model)
        self.high = self.steps.widths[0]
        self._fixed_bits = None

    @classmethod
    def of(
        cls,
        name: str,
        models: Mapping[int, LowBitModel],
        config: Config,
        context: int,
        device: torch.device,
        dtype: torch.dtype,
        rule: Rule | None = None,
        hub: bool = False,
        original: LowBitModel | None = None,
        by_weights: Mapping[int, Mapping[str, float]] | None = None,
    ) -> "SwitchingCore":
        """An engine of a model that is there at every width of the path, on the CPU.

        Args:
            name, context, device, dtype, rule, hub: as everywhere.
            models: width to the model at it.
            config: of FlexQuant.
            original: the model in full precision, which the order of layers compares with; by default the first width.
            by_weights: the layers' `divergences` where they are known.
        """
        make = {bits: partial(weights.decoder, lm, context, device, dtype) for bits, lm in models.items()}
        model = assembled(make, config)
        if by_weights is None:
            by_weights = divergences(models, config, original) if config.order in BY_WEIGHTS else {}
        first_order = replace(config, order="model") if config.order == "oracle" else config  # until texts are known
        ahead = order.moves(by_weights, list(copies.weights_of(model)), first_order)
        return cls(name, model, config, ahead, hub, rule)

    def hold(self, bits: Mapping[str, int] | int | None) -> None:
        """Let layers keep these widths in every following single generation, whose rule is not asked; None ends it."""
        self._fixed_bits = dict.fromkeys(self.weights, bits) if isinstance(bits, int) else bits

    def _decoding(
        self, ids: list[list[int]], new: int | None, sampling: Sampling, seed: int | Sequence[int], scored: bool = False
    ) -> Decoding:
        self._check_count(len(ids))
        plain = super()._decoding(ids, new, sampling, seed, scored)
        listens = self.ahead and self.rule is None and self._fixed_bits is None and not self.config.interval
        if listens and self.config.window >= max(plain.limits):
            problem = f"a window of {self.config.window} tokens is longer than the generation of {max(plain.limits)}"
            raise UserError(
                f"flexquant: {problem}, so that nothing would switch; take a shorter one, or more new tokens"
            )
        arguments = plain.prompts, plain.limits, plain.sampling, plain.seeds, plain.scored
        return SwitchingDecoding(*arguments, controllers=self._controllers(len(ids)), fixed_bits=self._fixed_bits)

    def _check_count(self, count: int) -> None:
        """UserError for several sequences, each in its own state, where the device has the weights of one state."""
        if count > 1 and self.steps.staging is not None:
            raise UserError("flexquant: copies=host decodes one prompt at a time; give one, or say copies=device")

    def _controllers(self, count: int) -> list[Controller]:
        """A controller for each sequence; one that never switches while widths are held."""
        rules = self.rule if isinstance(self.rule, Sequence) else [self.rule] * count
        if self._fixed_bits is not None:
            rules = [lambda pple, step, state: []] * count
        return [Controller(self.config, self.ahead, rule) for rule in rules]

    @torch.inference_mode()
    def forced(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], full: Decoder) -> "Along":
        """How the distributions along given outputs differ from another decoder's, and what was switched.

        The rule sees the signal of this engine on those outputs. Token 0 is the prefill's.

        Args:
            prompts: token ids of each sequence.
            outputs: the tokens that follow, at least one of each.
            full: the decoder that the divergence is from, such as that of full precision; on the same device.
        """
        count = len(prompts)
        self._check_count(count)
        steps = self.STEPS(self.model, count)
        theirs = Steps(full, count)
        batch = SwitchingDecoding(
            prompts, list(map(len, outputs)), Sampling(), [0] * count, controllers=self._controllers(count)
        )
        steps.state(count, drawn=False, scored=False)
        ours = _first_logits(steps, prompts, self.chunk, batch.start)
        reference = _first_logits(theirs, prompts, self.chunk)
        kl: list[list[float]] = [[] for _ in prompts]
        gap: list[list[float]] = [[] for _ in prompts]
        signal: list[float] = []
        for token in range(max(map(len, outputs))):
            if token:
                ours = _next_logits(steps, prompts, outputs, token)
                reference = _next_logits(theirs, prompts, outputs, token)
                batch.observe(token - 1, signal, steps)  # one token behind, as in a generation
            batch.running = {row for row in range(count) if token < len(outputs[row])}
            signal = pple(ours).tolist()
            divergence = kl_divergence(reference, ours).tolist()
            ahead = fault_tolerance(ours).tolist()
            for row in batch.running:
                kl[row].append(divergence[row])
                gap[row].append(ahead[row])
                batch.signal[row].append(signal[row])
        return Along(kl, gap, self._became(batch))

    def foresee(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], full: Decoder) -> None:
        """Order the moves by what each does alone to the predictions along given outputs: a control that sees them.

        Args:
            prompts, outputs, full: as `forced`.
        """
        effects = output_divergences(self.model, prompts, outputs, full, self.config.path)
        self.ahead = order.moves(effects, list(self.weights), self.config)

    def _run(self, batch: SwitchingDecoding) -> Iterator[list[tuple[int, int, float]]]:
        try:
            yield from super()._run(batch)
        finally:
            self.switching = self._became(batch)

    def _became(self, batch: SwitchingDecoding) -> SwitchingRecord:
        """The record of a batch that has ended, of the switches that took effect."""
        high = self.high
        record = SwitchingRecord(signal=batch.signal)
        first = 8 if self.config.prefill == "w8a8" else high
        switched_before = [Switch(1, layer, bits) for layer, bits in (self._fixed_bits or {}).items()]
        for controller, signal in zip(batch.controllers, batch.signal):
            steps = max(len(signal) - 1, 0)
            log = [switch for switch in controller.log if switch.step <= steps]
            record.logs.append(log)
            record.thresholds.append(controller.state.threshold)
            record.bits.append(schedule.mean_bits(switched_before + log, self.weights, high, steps))
            record.bits_with_prefill.append(schedule.mean_bits(switched_before + log, self.weights, high, steps, first))
        return record


def _first_logits(
    steps: Steps, prompts: Sequence[Sequence[int]], chunk: int, last: Callable[..., Tensor] | None = None
) -> Tensor:
    """Logits `[T, V]` of each prompt's next token; `last` runs a prefill and gives its last hidden state."""
    logits = []
    for row, hidden in enumerate(together(steps.model, steps.cache, prompts, chunk)):
        logits.append(hidden[-1:] if last is None else last(steps, row, iter([hidden])))
    return steps.model.head(torch.cat(logits))


def _next_logits(
    steps: Steps, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], token: int
) -> Tensor:
    """Logits `[T, V]` of token `token` of each output after the one before it; of an ended one they mean nothing."""
    device, int32 = steps.model.device, torch.int32
    live = [token < len(output) for output in outputs]
    ids = torch.tensor([output[token - 1] if on else 0 for output, on in zip(outputs, live)], device=device)
    rows = torch.tensor([row if on else -1 for row, on in enumerate(live)], dtype=int32, device=device)
    last_positions = [len(prompt) + token - 1 if on else 0 for prompt, on in zip(prompts, live)]
    positions = torch.tensor(last_positions, dtype=int32, device=device)
    tokens = Tokens(ids, rows, positions, positions, positions + 1)
    return steps.model.head(step(steps.model, steps.cache, tokens))


@torch.inference_mode()
def output_divergences(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    full: Decoder,
    path: Sequence[int],
) -> dict[int, dict[str, float]]:
    """Width to layer to the mean KL divergence in nats a token that the layer alone at that width causes.

    All other layers have the first width of the path; every prompt with its output is one pass of each such model.

    Args:
        model: with copies at the widths of the path.
        prompts: token ids of each sequence.
        outputs: those that follow, at least one of each; the divergence is that of the predictions of these.
        full: the decoder that it is from.
        path: widths from the first one down.
    """
    texts = [[*prompt, *output[:-1]] for prompt, output in zip(prompts, outputs)]
    lengths = list(map(len, outputs))
    reference = _predictions(full, texts, lengths)
    layers = list(copies.weights_of(model))
    divergence: dict[int, dict[str, float]] = {}
    for bits in path[1:]:
        divergence[bits] = {}
        for layer in layers:
            widths = dict.fromkeys(layers, path[0]) | {layer: bits}
            ours = _predictions(copies.static(model, widths), texts, lengths)
            nats = [kl_divergence(theirs, of_copy).mean() for theirs, of_copy in zip(reference, ours)]
            divergence[bits][layer] = float(torch.stack(nats).mean())
    return divergence


def _predictions(model: Decoder, texts: Sequence[Sequence[int]], last: Sequence[int]) -> list[Tensor]:
    """Logits `[N, V]` of the last N positions of each text."""
    hidden = together(model, Cache(model, len(texts)), texts)
    return [model.head(states[-count:]) for states, count in zip(hidden, last)]


def kl_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL divergence in nats, float32 `[T]`, of the second distribution from the first, of logits `[T, V]` each."""
    p, q = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def assembled(make: Mapping[int, Callable[[], Decoder]], config: Config) -> Decoder:
    """One decoder with copies at every width, on the device or on the host, from what makes the decoder at a width."""
    if config.copies == "host":
        return hosted.joined(make, config.layers)
    return copies.joined({bits: decoder() for bits, decoder in make.items()}, config.prefill == "w8a8")


def layer_names(block: int) -> list[str]:
    """The layers of a block as schedules name them, `0.self_attn.q_proj`."""
    return [f"{block}.{layer}" for layer in chain(*weights.LAYERS.values())]


def divergences(
    models: Mapping[int, LowBitModel], config: Config, original: LowBitModel | None = None
) -> dict[int, dict[str, float]]:
    """Width to layer to the divergence of its weights from the original ones, in the schedules' names.

    Without an original it is the model of the first width.
    """
    first, *others = models
    full = block_linears((original or models[first]).model)
    by_width: dict[int, dict[str, float]] = {}
    for bits in others:
        lm = models[bits]
        quantized = block_linears(lm.model)
        by_width[bits] = {
            name.partition("layers.")[2]: order.weight_divergence(
                full[name].weight.detach(), quantized[name].weight.detach(), config
            )
            for name in full
        }
    return by_width
