"""The pocket models' card: perplexity at 512 and 2048, by position, and what rounding costs, on named corpora."""

import json
from pathlib import Path

import numpy as np

from repro import corpora, models, perplexity, recipe
from repro.errors import UserError
from repro.files import write_text
from repro.lowbit import LowBitModel

TEXTS = ("held-out", "wikitext2", "c4-local")
ROUNDINGS = ("rtn-w8-pc", "rtn-w4-pc", "rtn-w3-pc", "rtn-w2-pc", "rtn-w4-g128", "rtn-w3-g128", "rtn-w2-g128")
WINDOWS = {512: 400, 2048: 100}
EDGES = (1, 256, 512, 768, 1024, 1280, 1536, 1792, 2048)


def measure(name: str, device: str = "cpu") -> dict:
    """Every number of one model's card that is measured on text; `ratio` is perplexity over full precision."""
    model, tokenizer = models.load(name, device), models.tokenizer(name)
    facts: dict = {"model": name, "perplexity": {}, "rounding_on_held_out": {}}
    ids = {text: corpora.token_ids(text, tokenizer) for text in TEXTS}
    for text in TEXTS:
        for length, limit in WINDOWS.items():
            frame = perplexity.score(model, perplexity.windows(ids[text], length, limit))
            facts["perplexity"][f"{text}@{length}"] = round(perplexity.perplexity(frame), 3)
    long = perplexity.windows(ids["held-out"], 2048, WINDOWS[2048])
    by = perplexity.by_position(model, long, EDGES)
    facts["held_out_by_position"] = {
        f"{a}-{b}": round(float(np.exp(n)), 2) for a, b, _, n in by.itertuples(index=False)
    }
    short = perplexity.windows(ids["held-out"], 512, WINDOWS[512])
    for text in ROUNDINGS:
        lm = LowBitModel(models.load(name, device))
        step = recipe.parse(text).steps[0]
        step.module.apply(lm, None, step.config)
        ratio = perplexity.perplexity(perplexity.score(lm.model, short)) / facts["perplexity"]["held-out@512"]
        facts["rounding_on_held_out"][text] = round(ratio, 3)
    return facts


def card(out: Path, device: str = "cpu") -> None:
    """Measure every pocket model that has no file in `out` yet.

    Raises:
        UserError: the data folder is not there.
    """
    for text in TEXTS:
        corpora.text(text)
    for name in models.pocket_names():
        path = out / f"{name}.json"
        if not path.is_file():
            write_text(path, json.dumps(measure(name, device), indent=1) + "\n")
    if not models.pocket_names():
        raise UserError(f"{models.POCKET}: no pocket model there; check the repository out again")
