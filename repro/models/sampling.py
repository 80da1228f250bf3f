"""Sequences sampled from a model itself: the embedded text of the default scale, and self-sampled calibration.

python -m repro sample        # writes repro/pocket/text/*.txt.xz anew; frozen by SHA256SUMS
"""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from repro import models
from repro.files import atomic, write_text

if TYPE_CHECKING:  # importing it takes seconds, and recipes only name what needs it
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# name: sequences, tokens each (BOS included), seed
EMBEDDED = {"pocket-sample": (64, 2048, 1), "pocket-sample-calib": (64, 1024, 2)}
SOURCE = "pocket-10m"


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
    rows, ended, cache = [ids], torch.zeros(count, dtype=torch.bool, device=model.device), None
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


def texts(ids: torch.Tensor, tokenizer: PreTrainedTokenizerFast, eos: int) -> list[str]:
    """Decode each row up to its first EOS, character by character as it was sampled; empty rows are dropped."""
    out = []
    for row in ids.tolist():
        body = row[1 : row.index(eos, 1)] if eos in row[1:] else row[1:]
        text = tokenizer.decode(body, clean_up_tokenization_spaces=False)
        if text.strip():
            out.append(text)
    return out


def freeze(name: str, documents: list[str], folder: Path) -> str:
    """Write one embedded corpus (`name.txt.xz`, documents between blank lines) and its line in SHA256SUMS."""
    body = ("\n\n".join(documents) + "\n").encode()
    with atomic(folder / f"{name}.txt.xz") as temporary:
        temporary.write_bytes(lzma.compress(body, preset=9))
    digest = hashlib.sha256(body).hexdigest()
    sums = folder / "SHA256SUMS"
    lines = [s for s in (sums.read_text().splitlines() if sums.exists() else []) if not s.endswith(f"  {name}.txt")]
    write_text(sums, "\n".join(sorted([*lines, f"{digest}  {name}.txt"])) + "\n")
    return digest


def freeze_embedded(device: str = "cpu", folder: Path = models.POCKET / "text") -> None:
    """Sample the embedded corpora from the largest pocket model and write them to `folder`."""
    model, tokenizer = models.load(SOURCE, device), models.tokenizer(SOURCE)
    for name, (count, length, seed) in EMBEDDED.items():
        ids = sample(model, count, length, seed, stop_at_eos=True)
        freeze(name, texts(ids, tokenizer, model.config.eos_token_id), folder)
