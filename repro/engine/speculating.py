"""An engine that decodes with a draft: a `Core` for one sequence at a time."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from repro.core.errors import UserError
from repro.engine.core import Core
from repro.engine.decoding import Decoding, Sampling
from repro.engine.drafted import Drafted
from repro.engine.drafts import Apart, drafter_of
from repro.engine.eagle import Eagle2, EagleDrafter
from repro.engine.output import Stats, TextPiece
from repro.engine.speculate import Drafter, Tree
from repro.engine.step import Decoder
from repro.methods import subspec


@dataclass(frozen=True)
class DraftedStats(Stats):
    """Stats of a generation with a draft; `ms_p50` and `ms_p99` are those of an iteration.

    Attributes:
        iterations: passes of the target, the prefill included.
        acceptance_length: tokens of an iteration in the mean, by the paper's counting (`Drafted.lengths`).
    """

    iterations: int = 0
    acceptance_length: float = math.nan

    @property
    def lengths(self) -> str:
        """The acceptance length as a part of a line; empty without a draft."""
        if not self.iterations:
            return ""
        return f" | acceptance length {self.acceptance_length:.2f} over {self.iterations} iterations"

    def __str__(self) -> str:
        counted = f"{self.prompt_tokens} + {self.new_tokens} tokens | prefill {self.prefill_s:.3f} s"
        return f"{counted} | {self.speed}{self.lengths}"


class Speculating(Core):
    """A target with a draft that shares its cache; without a draft it is a `Core`.

    Attributes:
        draft: the draft's configuration, None without one.
        phases: whether the host waits between draft and verification, so that their seconds are told apart.
        batch: the last generation, with its acceptance lengths and seconds where it had a draft.
    """

    RATED = False  # an iteration reads two models and gives several tokens

    def __init__(self, name: str, target: Decoder, drafting: Decoder | None, draft: Any, hub: bool = False) -> None:
        """`draft` is the configuration of SubSpec's draft, or of one with a model of its own (`drafts.py`)."""
        super().__init__(name, target, hub)
        self.draft, self.phases = draft, False
        self.batch: Decoding | None = None
        self._drafting, self._drafters = drafting, {}
        self._pool = torch.cuda.graph_pool_handle() if target.device.type == "cuda" else (0, 0)
        if draft:
            self.context -= draft.room
            for temperature in {draft.temperature, draft.sampled_temperature}:
                self._drafters[temperature] = self._drafter(temperature)

    def _drafter(self, temperature: float) -> Drafter:
        if isinstance(self.draft, Eagle2):
            return EagleDrafter(self._drafting, self.draft, temperature)
        if not isinstance(self.draft, subspec.Config) or isinstance(self.draft, Apart):
            return drafter_of(self.draft, self._drafting, temperature)
        tree = Tree(self.draft.top_k, self.draft.depth, temperature, self.model.device)
        return Drafter(self._drafting, self.cache, tree)

    def generate(
        self, prompts: str | Sequence[str | Sequence[int]], max_new_tokens: int | None = None, **options: Any
    ) -> Iterator[TextPiece]:
        """As `Core.generate`; with a draft several prompts are decoded one after another."""
        if isinstance(prompts, str) or self.draft is None or len(prompts) < 2:
            return super().generate(prompts, max_new_tokens, **options)
        seeds = options.pop("seed", 0)
        seeds = [seeds + i for i in range(len(prompts))] if isinstance(seeds, int) else list(seeds)
        for prompt in prompts:  # all are checked before any is decoded
            self._decoding([self._ids(prompt)], max_new_tokens, Sampling(), 0)
        if len(seeds) != len(prompts):
            raise UserError(f"seed: {len(seeds)} for {len(prompts)} prompts; give one, or one for each, 0 or more")
        return self._one_by_one(prompts, max_new_tokens, seeds, options)

    def _one_by_one(
        self, prompts: Sequence[str | Sequence[int]], new: int | None, seeds: list[int], options: dict[str, Any]
    ) -> Iterator[TextPiece]:
        for prompt, seed in zip(prompts, seeds):
            yield from super().generate([prompt], new, seed=seed, **options)

    def _decoding(
        self, ids: list[list[int]], new: int | None, sampling: Sampling, seed: int | Sequence[int], scored: bool = False
    ) -> Decoding:
        batch = super()._decoding(ids, new, sampling, seed, scored)
        if self.draft is None:
            return batch
        greedy = sampling.temperature == 0
        drafter = self._drafters[self.draft.temperature if greedy else self.draft.sampled_temperature]
        return Drafted(batch, drafter, self.phases)

    def _run(self, batch: Decoding) -> Iterator[list[tuple[int, int, float]]]:
        if isinstance(batch, Drafted):
            batch.drafter.capture(self._pool)
        self.batch, turn = batch, None
        try:
            for piece in super()._run(batch):
                turn = self._turn
                yield piece
        finally:
            if turn is self._turn:
                self.stats = self._ended(batch)

    def _ended(self, batch: Decoding) -> DraftedStats:
        """The stats of the generation that has just ended."""
        fields = {name: getattr(self.stats, name) for name in Stats.__dataclass_fields__}
        if not isinstance(batch, Drafted):
            return DraftedStats(**fields)
        lengths = batch.lengths
        return DraftedStats(**fields, iterations=len(lengths), acceptance_length=sum(lengths) / len(lengths))
