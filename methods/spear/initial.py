"""Initial values of the compensators; the paper only says that the gate starts close to γ = 1 (section 3.1).

With E = W - Ŵ and G = E[x xᵀ] = S Sᵀ of the layer's inputs, the rank-r correction with the least E‖(E - BA)x‖² is

    E S = U D Vᵀ,    A = V_rᵀ S⁻¹,    B = U_r D_r

in which the latent coordinates z = Ax are uncorrelated and of mean square 1, a scale at which the gate can tell tokens
apart. With S = I it is the best approximation of the weight alone, here with A = √D_r V_rᵀ and B = U_r √D_r.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from repro.core.errors import UserError
from repro.methods.spear.compensator import Compensator
from repro.methods.spear.config import Config
from repro.models.activations import statistics
from repro.models.lowbit import LowBitModel, in_layer

DAMPING = 1e-4  # share of the mean of diag(G) that is added to it


def start(lm: LowBitModel, ranks: Mapping[str, int], ids: Tensor, config: Config) -> dict[str, Compensator]:
    """Initial compensators by layer; γ is exactly 1.

    Args:
        lm: a model after a quantizing step, with nothing attached yet.
        ranks: of the layers that get one.
        ids: int64 token ids `[sequences, length]`, on which G is measured.
        config: `init`, `gate`, `hidden`, `alpha` and `seed` are used.

    Raises:
        UserError: a rank is above its layer's, or a layer's inputs are all zero.
    """
    whitened = config.init == "whitened"
    inputs = statistics(lm.model, list(ranks), ids, ["second_moment"]) if whitened else {}
    generator = torch.Generator().manual_seed(config.seed)
    ecs = {}

    def uniform(*shape: int) -> Tensor:  # as wide as nn.Linear's
        return (2 * torch.rand(*shape, generator=generator) - 1) / math.sqrt(shape[-1])

    for name, r in ranks.items():
        W = lm.model.get_submodule(name).weight.data
        d_out, d_in = W.shape
        if r > min(d_out, d_in):
            raise UserError(f"{name}: rank {r} for a {d_out}x{d_in} layer")
        if config.init == "zero":
            A, B = uniform(r, d_in), torch.zeros(d_out, r)
        else:
            with in_layer(name):
                A, B = truncated(error(lm, name), r, inputs[name].second_moment if whitened else None)
        tensors = {"A": A, "B": B / config.alpha}
        h = config.hidden * r
        if config.gate:
            tensors |= {"W1": uniform(h, r), "b1": torch.zeros(h), "W2": torch.zeros(r, h), "b2": torch.zeros(r)}
        tensors = {key: tensor.to(W.device, torch.float32).contiguous() for key, tensor in tensors.items()}
        ecs[name] = Compensator(tensors, config.alpha)
    return ecs


def removed_error(lm: LowBitModel, name: str, r: int) -> float:
    """Squared error of the weight of layer `name` that its best correction of rank `r + 1` removes and of `r` does not.

    That is D² at index `r` of W - Ŵ = U D Vᵀ; 0 where `r` is the layer's full rank. Inputs do not weigh it.

    Raises:
        UserError: the error is not finite.
    """
    with in_layer(name):
        return float(torch.linalg.svdvals(error(lm, name).double())[r : r + 1].square().sum())


def error(lm: LowBitModel, name: str) -> Tensor:
    """E = W - Ŵ of a quantized layer, float32 `[d_out, d_in]`.

    Raises:
        UserError: it is not finite.
    """
    E = lm.full[name].float() - lm.model.get_submodule(name).weight.data.float()
    if not torch.isfinite(E).all():
        raise UserError("the quantization error holds NaN or Inf; the model or its quantization is damaged")
    return E


def truncated(E: Tensor, r: int, G: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A `[r, d_in]` and B `[d_out, r]` with the least E‖(E - BA)x‖² for inputs of second moment `G`, by default I."""
    if G is None:
        U, D, V = torch.linalg.svd(E, full_matrices=False)
        root = D[:r].sqrt()
        return root[:, None] * V[:r], U[:, :r] * root
    if not G.any():
        raise UserError("its inputs are all zero on the sequences that damage is measured on; give it other sequences")
    S = torch.linalg.cholesky(G + DAMPING * G.diagonal().mean() * torch.eye(len(G), device=G.device))
    U, D, V = torch.linalg.svd(E.double() @ S, full_matrices=False)
    return torch.linalg.solve_triangular(S, V[:r], upper=False, left=False), U[:, :r] * D[:r]
