"""PMPD's learned scheduler: when a text switches to the low precision (progressive mixed-precision decoding).

One decision a prompt: the keys and values of the last block, averaged over heads, are pooled by learned queries, and a
layer norm and a two-layer perceptron choose one of four points, the numbers of tokens that are decoded at the high
precision. It is trained by `python -m repro.generation.train_pmpd`.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from repro.core.errors import UserError
from repro.engine import head_files
from repro.engine.head_files import HEADS
from repro.engine.prefill import together
from repro.engine.step import Cache, Decoder
from repro.methods.flexquant.schedule import BEHIND, Rule, SwitchingState

POINTS = (0, 85, 170, 255)  # tokens at the high precision: 0, T/3, 2T/3 and T of T = 255
QUERIES, HIDDEN = 4, 64  # not given; small, since 256 prompts train them


class Scheduler(nn.Module):
    """Scores `[4]` of the points from keys and values `[T, D]` of a prompt."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(QUERIES, size) * size**-0.5)
        self.norm = nn.LayerNorm(QUERIES * size)
        self.mlp = nn.Sequential(nn.Linear(QUERIES * size, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, len(POINTS)))

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        shares = (self.query @ keys.mT * keys.shape[-1] ** -0.5).softmax(-1)
        return self.mlp(self.norm((shares @ values).flatten(-2)))


@torch.no_grad()
def features(model: Decoder, prompts: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values float32 `[T, D]` of the last block after each prompt's prefill: means over heads, on the CPU."""
    cache = Cache(model, len(prompts))
    together(model, cache, prompts)
    extracted = []
    for row, prompt in enumerate(prompts):
        means = (part[-1, row, :, : len(prompt)].float().mean(0).cpu() for part in (cache.keys, cache.values))
        extracted.append(tuple(means))
    return extracted


@torch.no_grad()
def chosen(scheduler: Scheduler, model: Decoder, prompts: Sequence[Sequence[int]]) -> list[int]:
    """The point of each prompt: tokens at the high precision, which the model's prefill has."""
    return [POINTS[int(scheduler(*features_of_prompt).argmax())] for features_of_prompt in features(model, prompts)]


def rule_of(point: int) -> Rule:
    """All layers go to their next width after `point` tokens; the rule is asked after the prefill (`window=0`)."""

    def rule(pple: float, step: int, state: SwitchingState) -> list[str]:
        begins = step + BEHIND if step else 1
        return list(dict.fromkeys(move.layer for move in state.ahead)) if begins > point else []

    return rule


# --- files ------------------------------------------------------------------------------------------------------------


def path_of(model: str, high: int, low: int) -> Path:
    """The file of a pocket model's scheduler between two widths."""
    return HEADS / f"{Path(model).name}-pmpd-{high}-{low}.safetensors"


def load(path: Path, size: int, fingerprint: str) -> Scheduler:
    """The scheduler of a model whose heads have `size` numbers.

    Raises:
        UserError: the file is not there, not readable, or belongs to another model.
    """
    tensors = head_files.read(path, "pmpd", "PMPD scheduler", "python -m repro.generation.train_pmpd", fingerprint)
    scheduler = Scheduler(size)
    try:
        scheduler.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except RuntimeError:  # names or shapes
        raise UserError(f"{path}: no PMPD scheduler of heads of {size} numbers; train it again") from None
    return scheduler.eval()
