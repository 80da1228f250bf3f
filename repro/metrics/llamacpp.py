"""Perplexity as llama.cpp's own program measures it: chunks of 512, each begins with BOS, the second halves count.

The text is tokenized in one call and cut into chunks of `context` tokens, the tail is dropped. Where the tokenizer adds
a BOS, one replaces the first token of every chunk. Positions i = context/2 … context - 2 predict the token after them:

    PPL = exp(mean of -log p(x_{i+1} | x_0 … x_i) over all chunks and these i)

Numbers do not compare with `perplexity`, whose windows are scored from their second token on.

Source: ggml-org/llama.cpp, `tools/perplexity`, without its options for strides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from repro import models
from repro.core.errors import at_least
from repro.data import corpora
from repro.jobs import compress, on_text, tokens
from repro.jobs.target import Target
from repro.metrics import perplexity
from repro.metrics.metric import Metric
from repro.metrics.sensitivity import token_nll
from repro.models.perplexity import check_context, windows
from repro.store import observations
from repro.store.job import Job
from repro.store.observations import Observations, Series

TOGETHER = 4  # chunks in one forward pass


@dataclass(frozen=True)
class Protocol:
    """Chunks of `context` tokens, the first `chunks` of them (null: all)."""

    context: int = 512
    chunks: int | None = None

    def __post_init__(self) -> None:
        at_least(self, context=4, chunks=1)

    @property
    def label(self) -> str:
        """The name that stands in results: `llamacpp-v1`, and what differs from that program's defaults."""
        context = "" if self.context == 512 else f" c{self.context}"
        return f"llamacpp-v{LlamaCpp.VERSION}{context}" + (f" first {self.chunks}" if self.chunks else "")


@dataclass(frozen=True)
class LlamaCpp(Metric):
    """The paper's corpus, which the scale maps to a text, or a corpus by its own name; `wikitext2-raw` is the file that
    llama.cpp's numbers are quoted on."""  # fmt: skip

    DEFAULT = {}
    VERSION = 1  # goes up whenever the numbers may change
    PROTOCOL = Protocol

    corpus: str
    unit: str = "ppl"

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job scores a text; None where the scale has no such protocol."""
        scale = target.scale
        protocol = target.scale.protocols["llamacpp"]
        if protocol is None:
            return None
        text = scale.text(self.corpus)
        perplexity.job(target, [text], perplexity.Protocol())  # refuses a text that the recipe is calibrated on
        rule = {"context": protocol.context, "chunks": protocol.chunks}
        inputs, options = rule | {"version": self.VERSION}, rule | {"label": protocol.label}
        return {"scores": on_text.job("llamacpp", target, text, inputs, options)}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Score the text.

        Raises:
            UserError: damaged inputs, a text without a full chunk, chunks beyond the context, a value that is not
                finite.
        """
        options = job.parsed_options()
        lm = compress.load(options, folders.get("weights"))
        ids, identity = corpora.load_tokens(folders["text"] / tokens.OUTPUTS[0])
        cut = windows(ids, options["context"], options["chunks"])
        nll = score(lm.model, cut, added_bos(models.tokenizer(options["model"], options["hub"])))
        series = {"nll": Series(nll, "windows", f"{options['label']} on {identity['label']}")}
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The chunks."""
        return {"nll": observed["scores"].series["nll"]}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """Perplexity."""
        return np.exp(mean["nll"])

    @property
    def against(self) -> str:
        """Read as a ratio to full precision."""
        return "q / f"


def added_bos(tokenizer: Any) -> int | None:
    """The BOS that a Hugging Face tokenizer puts before a text, None where it adds none."""
    first = tokenizer("")["input_ids"][:1]
    return first[0] if first and first[0] == tokenizer.bos_token_id else None


@torch.no_grad()
def score(model: nn.Module, chunks: Tensor, bos: int | None) -> np.ndarray:
    """Mean negative log likelihood of each chunk's second half, float64 `[C]`, in nats.

    Args:
        model: a Hugging Face causal LM.
        chunks: int64 `[C, L]`; of these ids the last L - 1 - L/2 are scored, in every chunk as many.
        bos: what replaces the first id of every chunk, None for nothing.

    Raises:
        UserError: chunks longer than the model's context.
    """
    length = chunks.shape[1]
    nll = []
    check_context(model, length)
    for batch in chunks.to(model.device).split(TOGETHER):
        if bos is not None:
            batch = torch.cat([torch.full_like(batch[:, :1], bos), batch[:, 1:]], 1)
        hidden = model.eval().base_model(input_ids=batch, use_cache=False).last_hidden_state
        nll.append(token_nll(model, hidden, batch)[:, length // 2 :].mean(1))
    return np.concatenate(nll)
