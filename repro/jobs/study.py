"""One part of a study: variants of a method on one quantized model, made and scored in one process.

Only per-window scores are kept: a study has hundreds of variants, and what it asks is how they differ.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from repro import corpora, models, perplexity, provenance, recipe
from repro.errors import UserError
from repro.jobs.compress import check_start, load
from repro.lowbit import LowBitModel


def study(
    model: str,
    weights: Path,
    recipes: Sequence[str],
    tokens: Path,
    out: Path,
    length: int = 2048,
    windows: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    hub: bool = False,
    code: str = "",
) -> None:
    """Score full precision, the quantized model in `weights`, and that model under the last step of each recipe.

    A variant that refuses its configuration is noted with its reason, not scored.

    Args:
        weights: the compressed model of the recipe that all `recipes` go on from.
        tokens: token ids of the corpus.
        out: Parquet file of per-window scores with a column `recipe`.
        code: hash of the code that decides the scores, for the record.

    Raises:
        UserError: recipes that do not go on from `weights`, damaged inputs, NaN in the logits.
    """
    ids, identity = corpora.load_tokens(tokens)
    cut = perplexity.windows(ids, length, windows)
    full = LowBitModel(models.load(model, device, dtype, hub))
    frames, shares = [perplexity.score(full.model, cut).assign(recipe="fp16")], {}
    base = load(model, weights, device, dtype, hub, keep_full=True)
    frames.append(perplexity.score(base.model, cut).assign(recipe=base.meta["recipe"]))
    refused: dict[str, str] = {}
    seen: dict[tuple, object] = {}
    four_bits = sum(weight.codes.numel() for weight in base.weights.values()) * 4
    for text in tqdm(recipes, "study", mininterval=10):
        parsed, lm = recipe.parse(text), copy.deepcopy(base)
        check_start(parsed, base, weights)
        step = parsed.steps[-1]
        try:
            step.module.apply(lm, None, step.config, seen)
        except UserError as error:  # a budget too small for any rank, say: the cell says so, the others go on
            refused[parsed.name] = str(error)
            continue
        frames.append(perplexity.score(lm.model, cut).assign(recipe=parsed.name))
        shares[parsed.name] = lm.extra_bits[step.name] / four_bits
    rule = perplexity.Protocol(length=length, max_windows=windows)
    meta = {
        "protocol": rule.label.replace("2048", str(length)) + (f" w{windows}" if windows else ""),
        "shares": json.dumps(shares),
        "refused": json.dumps(refused),
        "dtype": dtype,
        **provenance.origin(device, code),
    }
    perplexity.save_frame(out, pd.concat(frames, ignore_index=True), meta | identity, "recipe")
