"""The share of its inputs that a layer really takes as zero, by matrix, on the first windows of a scored text."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from repro.data import corpora
from repro.jobs import compress, on_text, tokens
from repro.jobs.target import Target
from repro.methods.spqt.sparse_inputs import SparseLinear
from repro.metrics.metric import Metric
from repro.models import perplexity as scoring
from repro.models.hooks import each_input
from repro.models.lowbit import LowBitModel, block_linears
from repro.store import observations
from repro.store.job import Job
from repro.store.observations import Observations, Series


@dataclass(frozen=True)
class Sparsity(Metric):
    """Percent of the inputs at sparse positions, over all layers of the blocks by their parameters; `of` names one
    matrix of each block, such as `q_proj`. On the windows of `corpus` that the scale measures KL on."""  # fmt: skip

    VERSION = 1

    corpus: str
    of: str = ""
    unit: str = "%"

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job counts every matrix; none where the scale measures no KL."""
        protocol = target.scale.protocols["perplexity"]
        if protocol is None or not protocol.kl_windows:
            return None
        rule = {"length": protocol.length, "windows": protocol.kl_windows}
        text = target.scale.text(self.corpus)
        options = rule | {"label": protocol.label}
        return {"zeros": on_text.job("sparsity", target, text, rule, options)}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Count on every window; two series a kind of matrix, its blocks in order: share of zeros, and parameters.

        Raises:
            UserError: damaged inputs, or a corpus without a full window.
        """
        options = job.parsed_options()
        lm = compress.load(options, folders.get("weights"))
        ids, identity = corpora.load_tokens(folders["text"] / tokens.OUTPUTS[0])
        cut = scoring.windows(ids, options["length"], options["windows"])
        group = f"{options['label']} on {identity['label']}, first {len(cut)}, zeros"
        by_kind: dict[str, list[tuple[float, int]]] = {}
        for name, share in zeros(lm, cut).items():
            size = lm.model.get_submodule(name).weight.numel()
            by_kind.setdefault(name.rpartition(".")[2], []).append((share, size))
        series = {}
        for kind, values in by_kind.items():
            for key, column in zip(("zeros", "parameters"), np.asarray(values, dtype=float).T):
                series[f"{key}/{kind}"] = Series(column, "layers", group)
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The zeros of each asked matrix, weighted by its parameters, and the parameters."""
        recorded = observed["zeros"].series
        kinds = [name.partition("/")[2] for name in recorded if name.startswith("zeros/")]
        kinds = [kind for kind in kinds if self.of in ("", kind)]
        if not kinds:
            return {}
        sizes = np.concatenate([recorded[f"parameters/{kind}"].values for kind in kinds])
        shares = np.concatenate([recorded[f"zeros/{kind}"].values for kind in kinds])
        group = recorded[f"zeros/{kinds[0]}"].group
        return {"zeros": Series(shares * sizes, "layers", group), "parameters": Series(sizes, "layers", group)}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """Percent."""
        return 100 * mean["zeros"] / mean["parameters"]


@torch.inference_mode()
def zeros(lm: LowBitModel, windows: torch.Tensor) -> dict[str, float]:
    """The share of zeros among the inputs that each layer multiplies, at the positions that are sparse where some are.

    Args:
        lm: a model under a recipe; hooks on its layers are removed again.
        windows: int64 `[W, L]`.

    Returns:
        Name of each quantized layer (of each block linear where none is) to its share.
    """
    counts = {name: [0, 0] for name in (lm.weights or lm.attachments or block_linears(lm.model))}
    layers = {name: lm.model.get_submodule(name) for name in counts}
    inner = {name: layer.linear if isinstance(layer, SparseLinear) else layer for name, layer in layers.items()}

    def count(name: str, x: torch.Tensor) -> None:
        first = layers[name].first(x.shape[-2]) if isinstance(layers[name], SparseLinear) else 0
        part = x[..., first:, :]
        counts[name][0] += int((part == 0).sum())
        counts[name][1] += part.numel()

    scoring.check_context(lm.model, windows.shape[1])
    with each_input(inner, count):
        for window in windows.to(lm.model.device):
            lm.model.base_model(window[None], use_cache=False)
    return {name: zero / total for name, (zero, total) in counts.items()}
