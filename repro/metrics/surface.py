"""The loss around a model along two filter-normalized directions, its weights rounded to some bits (Li et al. 2018).

    L(α, β) = loss of the model with every block linear at Q_b(W + α δ + β η),   α, β from -reach to reach

δ and η are Gaussian, each row (a filter: what makes one output) scaled to the norm of that row of W (Li et al. 2018,
arXiv 1712.09913, section 4). They are drawn once from the protocol's seed, so that all widths share one pair.
Embedding, head and norms stay: they are not quantized. Q_b is Bit-by-Bit's min-max grid (section 3.1), with scales in
float32, whose rounding would add a roughness of its own; 16 bits leave the weights alone.

Roughness is the mean absolute second difference of L along both axes. Where L is smooth it falls with the square of the
step, so it is compared at equal grids, and the reach is short: up to 1, as in Li et al., the bowl's own curvature is
most of it, and that of a model with a low loss in the middle is larger.

Open in the paper, chosen here: model, reach, text, and that weights are rounded after they are moved.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from repro.core.errors import UserError, at_least
from repro.data import corpora
from repro.jobs import compress, on_text, tokens
from repro.jobs.target import Target
from repro.metrics.metric import Metric
from repro.metrics.sensitivity import token_nll
from repro.metrics.similarity import passages
from repro.models.groups.quantizer import GroupGrid, fake_quantize
from repro.models.lowbit import block_linears, in_layer
from repro.models.perplexity import check_context
from repro.store import observations
from repro.store.job import Job
from repro.store.observations import Observations, Series

FULL = 16  # bits of weights that are left alone
TOGETHER = 8  # sequences in one forward pass
Direction = dict[str, Tensor]  # by the layer's name, each of its weight's shape


@dataclass(frozen=True)
class Protocol:
    """`points` x `points` of a square whose sides go from -`reach` to `reach`, on `sequences` of `tokens` of a text."""

    points: int = 11
    reach: float = 0.1
    sequences: int = 8
    tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.points < 3 or self.points % 2 == 0:
            raise UserError(f"points is {self.points}; an odd number, 3 or more, has the model itself in the middle")
        if not 0 < self.reach < np.inf:
            raise UserError(f"reach is {self.reach}; it must be above 0")
        at_least(self, sequences=2, tokens=2, seed=0)


@dataclass(frozen=True)
class Surface(Metric):
    """`roughness`: in nats; `surface`: the losses, row by row of α, for a figure. Weights at `bits`, in groups."""

    VERSION = 1
    DEFAULT = {}
    PROTOCOL = Protocol

    bits: int
    show: Literal["roughness", "surface"] = "roughness"
    group: int = 32
    corpus: str = "wikitext2"
    unit: str = "nats"

    def __post_init__(self) -> None:
        if self.bits != FULL:
            self.grid  # noqa: B018  # refuses other widths and groups

    @property
    def grid(self) -> GroupGrid:
        """The grid of the weights."""
        return GroupGrid(self.bits, self.group)

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job scores one surface; None where the scale says null."""
        protocol = target.scale.protocols["surface"]
        if protocol is None:
            return None
        rule = asdict(protocol) | {"bits": self.bits} | ({"group": self.group} if self.bits != FULL else {})
        options = rule | {"seed": target.seed, "directions": protocol.seed}  # `seed` of a job's options is the recipe's
        return {"surface": on_text.job("surface", target, target.scale.text(self.corpus), {"surface": rule}, options)}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Score every point: a series of the losses of the sequences at each, and one of their means.

        Raises:
            UserError: damaged inputs, a text without enough passages, sequences beyond the context, or a loss that is
                not finite.
        """
        options = job.parsed_options()
        model = compress.load(options, folders.get("weights")).model
        ids, identity = corpora.load_tokens(folders["text"] / tokens.OUTPUTS[0])
        check_context(model, options["tokens"])
        text = passages(ids, options["sequences"], options["tokens"], identity["label"]).to(model.device)
        grid = None if options["bits"] == FULL else GroupGrid(options["bits"], options["group"])
        pair = directions(model, options["directions"])
        losses = surface(model, pair, text, grid, steps(options["points"], options["reach"]))
        if not np.isfinite(losses).all():
            raise UserError("the loss is not finite at some point of the surface; choose a smaller reach")
        extent = f"surface {options['points']}x{options['points']} to {options['reach']:g}"
        group = f"{extent}, {len(text)} x {options['tokens']} tokens of {identity['label']}"
        series = {"loss": Series(losses.mean(2).ravel(), "points", group)}
        series |= {f"at {i} {j}": Series(values, "sequences", group) for (i, j), values in cells_of(losses)}
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The sequences at every point, or for a figure the means."""
        recorded = observed["surface"].series
        if self.show == "surface":
            return {"loss": recorded["loss"]}
        return {name: series for name, series in recorded.items() if name != "loss"}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The roughness of the mean losses, or their mean."""
        if self.show == "surface":
            return mean["loss"]
        side = round(len(mean) ** 0.5)
        flat = np.stack([mean[f"at {i} {j}"] for i, j in np.ndindex(side, side)])
        return roughness(flat.reshape(side, side, *flat.shape[1:]))

    @property
    def reference(self) -> bool:
        """A surface compares with nothing, though it has many series."""
        return False

    @property
    def limits(self) -> tuple[float, float]:
        """A roughness is 0 or more."""
        return (0.0, np.inf)


def cells_of(losses: np.ndarray) -> list[tuple[tuple[int, int], np.ndarray]]:
    """Row and column of each point of `[P, P, sequences]`, and its sequences."""
    return [((i, j), losses[i, j]) for i, j in np.ndindex(losses.shape[:2])]


def steps(points: int, reach: float) -> np.ndarray:
    """The coordinates of one side, exactly 0 in the middle."""
    half = points // 2
    return reach * np.arange(-half, half + 1) / half


@torch.no_grad()
def directions(model: nn.Module, seed: int) -> tuple[Direction, Direction]:
    """Two filter-normalized directions of every block linear; the same draw on every device.

    A row of zeros, whose norm is 0, does not move.
    """
    generator = torch.Generator().manual_seed(seed)
    pair: tuple[Direction, Direction] = ({}, {})
    for direction in pair:
        for name, linear in block_linears(model).items():
            noise = torch.randn(linear.weight.shape, generator=generator).to(linear.weight.device)
            norms = linear.weight.detach().float().norm(dim=1, keepdim=True)
            direction[name] = noise / noise.norm(dim=1, keepdim=True) * norms
    return pair


@torch.no_grad()
def surface(
    model: nn.Module, pair: tuple[Direction, Direction], ids: Tensor, grid: GroupGrid | None, sides: np.ndarray
) -> np.ndarray:
    """Mean loss of each sequence at each point, float64 nats `[P, P, S]`; the model ends as it was.

    Args:
        model: a decoder.
        pair: δ and η by layer.
        ids: token ids int64 `[S, L]` on the model's device.
        grid: of the moved weights; None leaves them as they are.
        sides: α, and β, `[P]`.

    Raises:
        UserError: the group does not divide a layer's inputs; the message names the layer.
    """
    layers = block_linears(model)
    centre = {name: linear.weight.data for name, linear in layers.items()}
    losses = np.empty((len(sides), len(sides), len(ids)))
    model.eval()
    try:
        for i, alpha in enumerate(sides.tolist()):
            for j, beta in enumerate(sides.tolist()):
                for name, linear in layers.items():
                    moved = centre[name].float() + alpha * pair[0][name] + beta * pair[1][name]
                    with in_layer(name):
                        moved = moved if grid is None else fake_quantize(moved, grid)
                    linear.weight.data = moved.to(centre[name].dtype)
                losses[i, j] = np.concatenate([_loss(model, batch) for batch in ids.split(TOGETHER)])
    finally:
        for name, linear in layers.items():
            linear.weight.data = centre[name]
    return losses


def _loss(model: nn.Module, ids: Tensor) -> np.ndarray:
    """Mean negative log likelihood of each sequence, float64 `[S]`."""
    return token_nll(model, model.base_model(ids, use_cache=False).last_hidden_state, ids).mean(1)


def roughness(losses: np.ndarray) -> Any:
    """Mean absolute second difference of `[P, P, …]` along both axes."""
    second_differences = [np.abs(np.diff(losses, 2, axis=axis)) for axis in (0, 1)]
    return sum(differences.sum((0, 1)) for differences in second_differences) / sum(
        differences.shape[0] * differences.shape[1] for differences in second_differences
    )
