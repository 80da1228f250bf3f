"""Sequences sampled from a model itself, for calibration on its own text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

if TYPE_CHECKING:  # importing it takes seconds, and recipes only name what needs it
    from transformers import PreTrainedModel


@torch.no_grad()
def sample(
    model: PreTrainedModel, count: int, length: int, seed: int, temperature: float = 1.0, stop_at_eos: bool = False
) -> torch.Tensor:
    """Sample `count` sequences from BOS alone by plain ancestral sampling (no top-k, no top-p).

    Args:
        length: tokens per sequence, BOS included.
        stop_at_eos: fill a row with EOS after its first EOS, else let the model go on.

    Returns:
        int64 `[count, length]` on the model's device.
    """
    bos, eos = model.config.bos_token_id, model.config.eos_token_id
    generator = torch.Generator(model.device).manual_seed(seed)
    ids = torch.full((count, 1), bos, device=model.device)
    rows = [ids]
    ended = torch.zeros(count, dtype=torch.bool, device=model.device)
    cache = None
    for _ in tqdm(range(length - 1), desc="sample", mininterval=10):
        out = model(input_ids=rows[-1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        probabilities = torch.softmax(out.logits[:, -1].float() / temperature, -1)
        following = torch.multinomial(probabilities, 1, generator=generator)
        if stop_at_eos:
            following[ended] = eos
            ended |= following[:, 0] == eos
        rows.append(following)
        if stop_at_eos and ended.all():
            break
    return torch.cat(rows, 1)
