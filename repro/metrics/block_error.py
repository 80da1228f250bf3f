"""Relative error of each block's output under a recipe, on the same windows as full precision (Bit-by-Bit, Figure 2b).

    e_l = ‖y_l - ŷ_l‖² / ‖y_l‖²,   y_l, ŷ_l the hidden states after block l in full precision and under the recipe

over the tokens of a window. The paper shows it by block and names neither the norm nor the inputs. Blocks read what the
blocks before them gave, so errors add up; with `inputs: full` each reads full precision's inputs, and its error is its
own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from repro import models
from repro.core.errors import UserError
from repro.data import corpora
from repro.jobs import compress, on_text, tokens
from repro.jobs.target import Target
from repro.metrics.metric import Metric
from repro.models import perplexity as scoring
from repro.models.lowbit import blocks
from repro.store import observations
from repro.store.job import Job
from repro.store.observations import Observations, Series

INPUTS = ("quantized", "full")


@dataclass(frozen=True)
class BlockError(Metric):
    """On the windows of `corpus` that the scale measures KL on: the `mean` over blocks; the mean of the `later` half
    over that of the earlier one, a block in the middle being left out; `blocks` in order, for a figure."""  # fmt: skip

    VERSION = 1

    corpus: str = "wikitext2"
    show: Literal["mean", "later", "blocks"] = "mean"
    inputs: Literal["quantized", "full"] = "quantized"
    unit: str = ""

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job measures every block with both inputs; None where the scale measures no KL."""
        protocol = target.scale.protocols["perplexity"]
        if protocol is None or not protocol.kl_windows:
            return None
        rule = {"length": protocol.length, "windows": protocol.kl_windows}
        options = rule | {"label": protocol.label}
        return {"errors": on_text.job("block_error", target, target.scale.text(self.corpus), rule, options)}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Measure every window: per kind of inputs a series a block, and one of the blocks' means.

        Raises:
            UserError: damaged inputs, a corpus without a full window, windows beyond the context, or states that are
                not finite.
        """
        options = job.parsed_options()
        full = models.load(options["model"], options["device"], options["dtype"], options["hub"])
        quantized = compress.load(options, folders.get("weights")).model
        ids, identity = corpora.load_tokens(folders["text"] / tokens.OUTPUTS[0])
        cut = scoring.windows(ids, options["length"], options["windows"])
        scoring.check_context(full, cut.shape[1])
        group = f"{options['label']} on {identity['label']}, first {len(cut)}, blocks"
        series = {}
        for inputs in INPUTS:
            values = errors(full, quantized, cut.to(full.device), inputs == "full")
            series[f"{inputs}/blocks"] = Series(values.mean(0), "layers", group)
            series |= {
                f"{inputs}/{number}": Series(of_block, "windows", group) for number, of_block in enumerate(values.T)
            }
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The windows of every block, or for a figure the blocks' means."""
        recorded = {}
        for name, values in observed["errors"].series.items():
            inputs, _, column = name.partition("/")
            if inputs == self.inputs:
                recorded[column] = values
        if self.show == "blocks":
            return {"blocks": recorded["blocks"]}
        return {name: values for name, values in recorded.items() if name != "blocks"}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The mean over blocks, or that of the later ones over that of the earlier ones."""
        if self.show == "blocks":
            return mean["blocks"]
        by_block = np.stack([mean[str(number)] for number in range(len(mean))])
        half = len(by_block) // 2
        if self.show == "mean" or not half:
            return by_block.mean(0)
        return by_block[-half:].mean(0) / by_block[:half].mean(0)

    @property
    def reference(self) -> bool:
        """True: every number is already a comparison with full precision on the same windows."""
        return True

    @property
    def itself(self) -> float | None:
        """Full precision against itself has no error, and no half of it is larger."""
        return None if self.show == "later" else 0.0

    @property
    def limits(self) -> tuple[float, float]:
        """An error is 0 or more."""
        return (0.0, np.inf)


@torch.no_grad()
def errors(full: nn.Module, quantized: nn.Module, windows: Tensor, alone: bool) -> np.ndarray:
    """e_l of each window, float64 `[W, L]`.

    Args:
        full: the decoder in full precision.
        quantized: the same under a recipe.
        windows: token ids int64 `[W, T]` on their device.
        alone: each block reads full precision's inputs.

    Raises:
        UserError: hidden states that are not finite, named by their block, or models of different depth.
    """
    pairs = list(zip(blocks(full).items(), blocks(quantized).values()))
    if len(blocks(full)) != len(blocks(quantized)):
        raise UserError(f"{len(blocks(full))} blocks in full precision, {len(blocks(quantized))} under the recipe")
    ratios: list[float] = []  # window after window, block after block
    states: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(number: int):  # noqa: ANN202
        def hook(_: nn.Module, args: tuple, out: Any) -> None:
            states[number] = args[0], _states(out)

        return hook

    def feed(number: int):  # noqa: ANN202
        return lambda _, args: (states[number][0], *args[1:]) if alone else None

    def compare(number: int, name: str):  # noqa: ANN202
        def hook(_: nn.Module, args: tuple, out: Any) -> None:
            y = states[number][1].double()
            value = ((_states(out).double() - y).square().sum() / y.square().sum()).item()
            if not np.isfinite(value):
                raise UserError(f"{name}: its output holds NaN or Inf; the model is damaged")
            ratios.append(value)

        return hook

    hooks = []
    try:
        for number, ((name, block), quantized_block) in enumerate(pairs):
            hooks.append(block.register_forward_hook(keep(number)))
            hooks.append(quantized_block.register_forward_pre_hook(feed(number)))
            hooks.append(quantized_block.register_forward_hook(compare(number, name)))
        for window in windows:
            for model in (full, quantized):
                model.eval().base_model(window[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return np.asarray(ratios).reshape(len(windows), len(pairs))


def _states(out: Any) -> Tensor:
    """The hidden states among what a block returns."""
    return out[0] if isinstance(out, tuple) else out
