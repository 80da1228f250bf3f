"""GPTQ (Frantar et al. 2023, arXiv 2210.17323), Algorithm 1.

Columns are quantized one after the other; the error of each is spread over the columns that are still free so that the
layer's output on the calibration inputs changes least. With H = (2/N) Σ x xᵀ and F the free columns (equation 2),

    δ_F = -(w_q - quant(w_q)) / [H_F⁻¹]_qq · (H_F⁻¹)_q:

All rows share H (section 4, step 1), and the rows of H_F⁻¹ that are needed are, up to a factor, those of the upper
Cholesky factor of H⁻¹ (step 3), so that one factorization suffices. Updates are applied at once inside a block of
columns and once per block to all later columns (step 2).

A group's grid is fitted when its first column is reached, on the weights as of the last such block update, as in the
authors' code: with groups shorter than `blocksize`, the later groups of a block are fitted before the errors of this
block are propagated to them.

Dead columns, whose inputs were 0 on every calibration token so that H_ii = 0, are treated before anything else: H_ii
becomes 1 and the column's weights become 0. Only then
 1. grids are fitted, so a dead column's weights never widen one. (The authors' code fits a per-row grid, without
    groups, before it zeroes them; the two differ only where a dead column holds the row's minimum or maximum.)
 2. act_order sorts: a dead column ranks by its H_ii of 1, not last, and may share a group with live columns.
 3. H is damped: the ones count in the mean of diag(H).
As the rest of its row of H is 0, a dead column neither takes nor passes on error, and its codes dequantize to 0.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from repro.baselines import grid
from repro.core.errors import UserError
from repro.models.activations import watching
from repro.models.lowbit import LowBitModel, block_inputs, blocks, in_layer
from repro.models.quantized import QuantizedWeight

VERSION = 1
CALIBRATED = True
COST = 2.0  # relative to RTN, for scheduling alone


@dataclass(frozen=True)
class Config(grid.Grid):
    """The grid and the solver. percdamp and blocksize are those of section 4, the switches are of the authors' code.

    Attributes:
        percdamp: share of the mean of diag(H) that is added to it; a dead column counts as 1.
        blocksize: columns between two updates of all later columns (B in Algorithm 1).
        act_order: take columns in the order of falling diag(H); a dead column ranks as 1.
        static_groups: fit all groups beforehand, in the original column order; no group index is then stored.
        true_sequential: inside a block, too, each layer sees inputs made by the quantized layers before it.
    """

    percdamp: float = 0.01
    blocksize: int = 128
    act_order: bool = False
    static_groups: bool = False
    true_sequential: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.percdamp < 0:
            raise UserError(f"percdamp is {self.percdamp}; it must be a share of the mean of diag(H), 0 or more")
        if self.blocksize < 1:
            raise UserError(f"blocksize is {self.blocksize}; it must be a number of columns, 1 or more")


def inverse_factor(H: Tensor, percdamp: float) -> Tensor:
    """Upper Cholesky factor of (H + λI)⁻¹, `[K, K]`, with λ = percdamp · mean(diag H); section 4, step 3.

    Raises:
        UserError: the damped H is not positive definite in float32.
    """
    damped = H + percdamp * H.diagonal().mean() * torch.eye(len(H), device=H.device)
    with contextlib.suppress(torch.linalg.LinAlgError):
        factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
        if torch.isfinite(factor).all():
            return factor
    raise UserError(
        f"the {len(H)}x{len(H)} Hessian is not positive definite with percdamp {percdamp}: "
        "its inputs are too few or too much alike; calibrate on more tokens or raise percdamp"
    )


def gptq(weight: Tensor, hessian: Tensor, config: Config) -> QuantizedWeight:
    """Quantize `weight` `[N, K]` for inputs with `hessian` `[K, K]` (Algorithm 1); neither is changed.

    Columns with a zero on the Hessian's diagonal dequantize to 0; the module's docstring has the order.

    Raises:
        UserError: the group does not divide K, weight or Hessian hold NaN or Inf, or the damped Hessian is not positive
            definite.
        ValueError: `hessian` is not `[K, K]`.
    """
    W = grid.check(weight, config).clone()
    H = hessian.float().clone()
    K = W.shape[1]
    if H.shape != (K, K):
        raise ValueError(f"hessian is {tuple(H.shape)}, expected {(K, K)}")
    if not torch.isfinite(H).all():
        raise UserError(f"the {K}x{K} Hessian holds NaN or Inf: an activation overflowed on the calibration tokens")

    dead = H.diagonal() == 0
    H.diagonal()[dead] = 1
    W[:, dead] = 0

    group = config.group or K
    static = config.static_groups or group == K
    scale, zero = grid.fit(grid.split(W, config), config)
    order = H.diagonal().argsort(descending=True, stable=True) if config.act_order else torch.arange(K, device=W.device)
    W, H = W[:, order], H[order][:, order]
    column_group = (order if static else torch.arange(K)).div(group, rounding_mode="floor").tolist()
    Hinv = inverse_factor(H, config.percdamp)

    Q = torch.empty_like(W, dtype=torch.uint8)
    for i1 in range(0, K, config.blocksize):
        i2 = min(i1 + config.blocksize, K)
        W1, E = W[:, i1:i2].clone(), torch.empty_like(W[:, i1:i2])
        for i in range(i1, i2):
            g = column_group[i]
            j = i - i1
            if not static and i % group == 0:
                scale[:, g], zero[:, g] = grid.fit(W[:, i : i + group], config)
            w = W1[:, j : j + 1]
            s = scale[:, g]
            z = zero[:, g]
            Q[:, i : i + 1] = q = grid.quantize(w, s, z, config.bits)
            E[:, j : j + 1] = e = (w - grid.dequantize(q, s, z)) / Hinv[i, i]
            W1[:, j:] -= e @ Hinv[i : i + 1, i:i2]
        W[:, i2:] -= E @ Hinv[i1:i2, i2:]

    back = order.argsort()
    index = back.div(group, rounding_mode="floor").int() if config.act_order and not static else None
    return grid.pack(Q[:, back], scale, zero, config, index)


@torch.no_grad()
def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Quantize every block linear of `lm`, block after block, on inputs from already quantized blocks (section 5).

    Args:
        lm: any decoder of Hugging Face form; edited.
        calibration: int64 token ids `[sequences, length]`.
        config: grid and solver.

    Raises:
        UserError: there is no calibration, or a layer cannot be quantized; the message names it.
    """
    in_order(lm, calibration, config, "gptq", quantize_family)


def in_order(
    lm: LowBitModel, calibration: Tensor | None, config: Config, step: str, quantize: Callable[..., None]
) -> None:
    """The order of `apply` for a step of that name, whose `quantize` is called as `quantize_family` is."""
    if calibration is None or not calibration.numel():
        raise UserError(f"{step} needs calibration tokens, there are none; name a calibration corpus in the recipe")
    hidden, kwargs = block_inputs(lm.model, calibration)
    last = len(kwargs) - 1  # behind it nothing is read
    stack = tqdm(blocks(lm.model).items(), step, leave=False)
    for index, ((prefix, block), kw) in enumerate(zip(stack, kwargs, strict=True)):
        families = same_input(block, hidden[0], kw)
        for stage in [[family] for family in families] if config.true_sequential else [families]:
            for family, H in zip(stage, hessians(block, stage, hidden, kw), strict=True):
                quantize(lm, [f"{prefix}.{name}" for name in family], H, config)
        if index < last:
            for i, h in enumerate(hidden):
                hidden[i] = block(h, **kw)


def same_input(block: nn.Module, hidden: Tensor, kwargs: dict) -> list[list[str]]:
    """Names of a block's linears in the order they run, those that read the same tensor (q, k, v; gate, up) together.

    Raises:
        UserError: a linear of the block did not run, so that it cannot be calibrated.
    """
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    with watching(linears, 1, sizes=False) as stats:
        block(hidden, **kwargs)
    if idle := sorted(set(linears) - set(stats)):
        raise UserError(f"no calibration token reached {', '.join(idle)}; calibrate on more text")
    readers: dict[int, list[str]] = {}
    for name, inputs in stats.items():
        readers.setdefault(id(inputs), []).append(name)
    return list(readers.values())


def hessians(block: nn.Module, families: list[list[str]], hidden: list[Tensor], kwargs: dict) -> list[Tensor]:
    """H = (2/N) Σ x xᵀ of each family of linears, float32 `[K, K]`; N counts calibration sequences, not tokens."""
    names = [family[0] for family in families]
    layers = {name: block.get_submodule(name) for name in names}
    with watching(layers, len(hidden), ["second_moment"], sizes=False) as stats:
        for h in hidden:
            block(h, **kwargs)
    return [stats.pop(name).second_moment.mul_(2 * hidden[0].shape[1]).float() for name in names]


def quantize_family(lm: LowBitModel, names: list[str], H: Tensor, config: Config) -> None:
    """Quantize linears with the same inputs as one tall weight: rows are independent, and H is factored once."""
    stacked = grid.stack(names, [lm.model.get_submodule(name).weight.data for name in names], config)
    with in_layer(", ".join(names)):
        tall = gptq(stacked, H, config)
    lm.set_weights(names, tall)
