"""BERTScore of texts under a schedule of precision (FlexQuant, Table 1): read from the texts that `switching` keeps.

The jobs are those of `switching`; an encoder scores their texts where the numbers are read, on a CPU, so that the
machine that decodes needs none. What is scored, with which encoder and in which layer: `repro/data/bert_score.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from repro import models
from repro.data import bert_score
from repro.jobs.target import Target
from repro.metrics import switching
from repro.metrics.metric import Metric
from repro.metrics.switching import Switching
from repro.papers.cell import Cell
from repro.store.job import Job
from repro.store.observations import Observations, Series


@dataclass(frozen=True)
class BertScore(Metric):
    """The F1 of a set's texts with their references, times 100; other fields as of `Switching`."""

    VERSION = 1

    prompts: str
    schedule: str = ""
    quantile: float = 0.0
    control: str = ""
    unit: str = ""

    def __post_init__(self) -> None:
        self._texts()

    def _texts(self) -> Switching:
        """The cell whose texts are scored.

        Raises:
            UserError: what `Switching` refuses.
        """
        fields = self.prompts, self.schedule, self.quantile, self.control
        return Switching("rougeL", *fields)  # type: ignore[arg-type]

    def lacking(self) -> str:
        """Why it cannot be measured here; empty if it can."""
        return bert_score.lacking() or self._texts().lacking()

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """The job that generates the texts."""
        return self._texts().jobs(target)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The score of each prompt's text; none where the set has no references."""
        recorded = observed["texts"].series
        if "rougeL" not in recorded:
            return {}
        tokenizer = models.tokenizer(target.model)
        tested = switching.tested(self.prompts, target.scale.protocols["switching"])
        scores = []
        for number, prompt in enumerate(tested):
            tokens = list(map(int, recorded[f"tokens {number}"].values))
            text = switching.answer(tokenizer, tokens, self.prompts)
            scores.append(bert_score.score(text, prompt.references))
        return {"bertscore": Series(np.asarray(scores), switching.RESAMPLED, recorded["rougeL"].group)}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The mean over prompts."""
        return mean["bertscore"]

    @staticmethod
    def fewest_bits(cell: Cell, peers: Sequence[Cell]) -> Cell | None:
        """The cell of another row, without a schedule, of the fewest bits, which full precision must beat."""
        return switching.fewest_bits(cell, peers)

    @property
    def against(self) -> str:
        """Scores of texts are read as a difference to full precision."""
        return "q - f"

    @property
    def limits(self) -> tuple[float, float]:
        """A score is 0 to 100."""
        return 0.0, 100.0
