"""What quantizing one layer alone does to the model: CKA damage, and skip-one loss (SPEAR, Figure 4 and appendix C.1).

Every other layer stays in full precision. On sequences sampled from the full-precision model damage is 1 - CKA of the
last hidden states (equations 6 and 7); on passages of a corpus the loss is what the mean negative log likelihood of a
token grows by, in nats. Open in the paper, chosen here: which loss, on which text; passages are spread evenly.

With hidden states X of full precision and Y, columns centred, and the share of sequence i in the products that CKA is
made of, C_xy = Σ_i X_iᵀY_i and e_xy(i) = <C_xy, X_iᵀY_i> / ‖C_xy‖², likewise e_xx and e_yy, the derivative of CKA by
the weight of sequence i is CKA·(2 e_xy(i) - e_xx(i) - e_yy(i)). Kept of S sequences is

    v_i = 1 - CKA - S·CKA·(2 e_xy(i) - e_xx(i) - e_yy(i))

whose mean is the damage on all of them, and whose mean over a resample is that on the resample to first order (the
infinitesimal jackknife: Jaeckel 1972; Efron 1982, The Jackknife, the Bootstrap and Other Resampling Plans, chapter 6).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from repro import models
from repro.core.errors import UserError
from repro.data import corpora
from repro.jobs import compress, tokens
from repro.jobs.target import Target
from repro.metrics import perplexity
from repro.metrics.metric import Metric
from repro.metrics.similarity import passages
from repro.models.lowbit import LowBitModel, blocks
from repro.models.perplexity import check_context
from repro.models.sampling import sample
from repro.recipes import recipe
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

TOGETHER, SCORED = 16, 4  # sequences in one forward pass, and those whose logits are held at a time
TOP = 0.3  # share of the layers that are called the most damaged (appendix C.3)


@dataclass(frozen=True)
class Protocol:
    """As many sampled `sequences` for the damage (appendix C.1: 64) as passages for the loss, of `tokens` each."""

    sequences: int = 64
    tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("sequences", "tokens"):
            if getattr(self, name) < 2:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 2 or more")


@dataclass(frozen=True)
class Sensitivity(Metric):
    """What is shown of the layers.

    `damage`, `loss`: of every layer, for a figure; as a number their mean. `rho`: Spearman's rank correlation of the
    two. `tail`: percent of all loss that the 30 % of layers with the most loss have.
    """

    VERSION = 1
    DEFAULT = {}
    PROTOCOL = Protocol

    show: Literal["damage", "loss", "rho", "tail"]
    corpus: str = "wikitext2"
    unit: str = ""

    def jobs(self, target: Target) -> dict[str, Job]:
        """One job quantizes layer after layer; full precision has none.

        What was quantized after a step that rescales the model (AWQ) does not fit the model's own weights, so that such
        a recipe is applied anew.

        Raises:
            UserError: a recipe that attaches something to layers, or one that is calibrated on the text of the loss.
        """
        if not target.recipe.steps:
            return {}
        if any(step.attaches for step in target.recipe.steps):
            raise UserError(f"sensitivity: {target.recipe.name} attaches a compensator; name a quantizer alone")
        perplexity.Perplexity(self.corpus).jobs(target)  # refuses a text that the recipe is calibrated on
        text = target.scale.text(self.corpus)
        protocol = target.scale.protocols["sensitivity"]
        compressed = compress.job(target)
        rule = {"sequences": protocol.sequences, "tokens": protocol.tokens}
        rescaled = any(step.rescales for step in target.recipe.steps)
        needs = {"text": tokens.job(target, text)} | (dict(compressed.needs) if rescaled else {"weights": compressed})
        inputs = target.inputs() | rule | {"text": corpora.identifier(text, target.scale.hub)}
        inputs |= {"calibration": compressed.parsed_inputs().get("calibration")}
        options = target.options() | rule | {"calibration": compressed.parsed_options().get("calibration")}
        return {"layers": make("sensitivity", target.label, inputs, options, needs, target.steps)}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Measure damage and loss of every quantized layer, by sequence and by passage.

        Raises:
            UserError: damaged inputs, or a corpus without enough tokens.
        """
        options = job.parsed_options()
        count, length = options["sequences"], options["tokens"]
        lm = _quantized(options, folders)
        check_context(lm.model, length)
        full = lm.full_precision()
        ids, identity = corpora.load_tokens(folders["text"] / tokens.OUTPUTS[0])
        text = passages(ids, count, length, identity["label"])
        source = models.load(
            options["model"], options["device"], options["dtype"], options["hub"]
        )  # AWQ's rounds differently
        sampled = sample(source, count, length, seed=0)
        groups = (
            f"{count} sampled sequences of {length} tokens",
            f"{count} passages of {length} tokens of {identity['label']}",
        )
        weights = {name: lm.model.get_submodule(name).weight.data for name in lm.weights}
        measures = zip(("damage", "loss"), each_alone(full, weights, sampled, text.to(sampled)), groups, strict=True)
        series = {}
        for name, layers, group in measures:
            series |= {f"{name} {i}": Series(values, "sequences", group) for i, values in enumerate(layers)}
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The mean of every layer for a figure; for a number every layer by sequence."""
        if "layers" not in observed:
            return {}
        recorded = observed["layers"].series
        if self.show in ("damage", "loss"):
            return {
                self.show: Series(
                    np.asarray([series.values.mean() for series in by_layer(recorded, self.show)]), "layers"
                )
            }
        return {key: series for key, series in recorded.items() if self.show == "rho" or key.startswith("loss ")}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The mean over layers, the rank correlation, or the tail's share in percent."""
        if self.show in ("damage", "loss"):
            return mean[self.show]
        loss = np.stack(by_layer(mean, "loss"))
        if self.show == "rho":
            return spearman(np.stack(by_layer(mean, "damage")), loss)
        worst = np.sort(loss, axis=0)[-top(len(loss), TOP) :]
        return 100 * worst.sum(0) / loss.sum(0)

    @property
    def limits(self) -> tuple[float, float]:
        """Of a correlation; the tail may be all of the loss and more, where other layers lower it."""
        return (-1.0, 1.0) if self.show == "rho" else (-math.inf, math.inf)

    @property
    def reference(self) -> bool:
        """True: it is itself a comparison with full precision."""
        return True

    @property
    def itself(self) -> float | None:
        """Full precision damages nothing."""
        return None if self.show in ("rho", "tail") else 0.0


def _quantized(options: Mapping[str, Any], folders: Mapping[str, Path]) -> LowBitModel:
    """The quantized model with its full-precision weights at hand."""
    if "weights" in folders:
        return compress.load(options, folders["weights"], keep_full=True)
    lm = LowBitModel(models.load(options["model"], options["device"], options["dtype"], options["hub"]))
    compress.apply_steps(lm, recipe.parse(options["recipe"]).steps, options["calibration"], folders)
    return lm


@torch.no_grad()
def each_alone(
    full: nn.Module, quantized: Mapping[str, Tensor], sampled: Tensor, text: Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Damage by sampled sequence `[layers, S]` and loss by passage `[layers, S]`, one layer quantized at a time.

    Args:
        full: the full-precision decoder; restored afterwards.
        quantized: the dequantized weight of each layer by module path, in model order.
        sampled: int64 token ids `[S, L]`.
        text: likewise.
    """
    ids = torch.cat([sampled, text])
    number = {name: i for i, name in enumerate(blocks(full))}
    states = _block_inputs(full, ids)

    def measured(block_index: int) -> tuple[Tensor, np.ndarray]:
        hidden = last_hidden(full, ids, block_index, states[block_index])
        return centred(hidden[: len(sampled)]), token_nll(full, hidden[len(sampled) :], text).mean(1)

    X, plain = measured(0)
    of_X = product(X, X)
    damage, loss = [], []
    for name, weight in tqdm(quantized.items(), "sensitivity", leave=False, mininterval=10):
        block_index = next(i for block, i in number.items() if name.startswith(f"{block}."))
        parameter = full.get_submodule(name).weight
        full_weight, parameter.data = parameter.data, weight
        Y, more = measured(block_index)
        parameter.data = full_weight
        damage.append(damages(X, of_X, Y))
        loss.append(more - plain)
    return np.stack(damage), np.stack(loss)


def _block_inputs(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The inputs of every block of a decoder for ids `[S, L]`, `[S, L, d]` each."""
    stack = list(blocks(model).values())
    states: list[list[Tensor]] = [[] for _ in stack]
    hooks = [
        block.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        for block, seen in zip(stack, states)
    ]
    try:
        for batch in ids.split(TOGETHER):
            model.base_model(batch, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(seen) for seen in states]


def last_hidden(model: nn.Module, ids: Tensor, block_index: int, state: Tensor) -> Tensor:
    """Last hidden states `[S, L, d]` of ids `[S, L]` if block `block_index` reads `state`; earlier ones do not run."""
    earlier = list(blocks(model).values())[:block_index]
    hidden = []
    try:
        for batch, batch_state in zip(ids.split(TOGETHER), state.split(TOGETHER)):
            for block in earlier:
                block.forward = lambda *_, batch_state=batch_state, **__: batch_state
            hidden.append(model.base_model(batch, use_cache=False).last_hidden_state)
    finally:
        for block in earlier:
            vars(block).pop("forward", None)
    return torch.cat(hidden)


def token_nll(model: nn.Module, hidden: Tensor, ids: Tensor) -> np.ndarray:
    """Negative log likelihood of ids `[S, L]` after the first, float64 `[S, L - 1]`, from last hidden states."""
    losses = []
    for states, batch in zip(hidden.split(SCORED), ids.split(SCORED)):
        logits = model.get_output_embeddings()(states[:, :-1]).float()
        losses.append(F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").double())
    return torch.cat(losses).cpu().numpy()


def centred(H: Tensor) -> Tensor:
    """Hidden states `[S, T, d]` less their mean, float64."""
    return H.double() - H.double().mean((0, 1))


def product(P: Tensor, Q: Tensor) -> tuple[float, Tensor]:
    """‖PᵀQ‖² of centred states `[S, T, d]`, and the share of each sequence in it, `[S]`."""
    flat_P, flat_Q = P.flatten(0, 1), Q.flatten(0, 1)
    by_item = ((flat_P @ (flat_P.T @ flat_Q)) * flat_Q).view(len(P), -1).sum(1)
    return by_item.sum().item(), by_item / by_item.sum()


def damages(X: Tensor, of_X: tuple[float, Tensor], Y: Tensor) -> np.ndarray:
    """The v_i of each sequence, float64 `[S]`, from centred states `[S, T, d]` and `product(X, X)`; mean 1 - CKA."""
    xy, e_xy = product(X, Y)
    xx, e_xx = of_X
    yy, e_yy = product(Y, Y)
    if xx == 0 or yy == 0:
        return np.full(len(X), float(xx != yy))
    cka = xy / math.sqrt(xx * yy)
    return (1 - cka - len(X) * cka * (2 * e_xy - e_xx - e_yy)).cpu().numpy()


# --- what is shown ----------------------------------------------------------------------------------------------------


def by_layer(series: Mapping[str, Any], name: str) -> list[Any]:
    """The series of every layer, or their means, in model order: those whose names begin with `name`."""
    return [values for key, values in series.items() if key.rpartition(" ")[0] == name]


def top(layers: int, share: float) -> int:
    """How many of the layers a share of them is, rounded, at least 1."""
    return max(1, math.floor(share * layers + 0.5))


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation over the first axis, `[layers]` or `[layers, k]`; equal values share a rank."""
    import pandas as pd

    a, b = (pd.DataFrame(values.reshape(len(values), -1)).rank().to_numpy().reshape(values.shape) for values in (x, y))
    a, b = a - a.mean(0), b - b.mean(0)
    return (a * b).sum(0) / np.sqrt((a * a).sum(0) * (b * b).sum(0))
