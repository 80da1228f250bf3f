"""A model under a recipe: codes, scales and zeros of every block linear, made once for all tables."""

from pathlib import Path

from repro import corpora, models, recipe
from repro.errors import UserError
from repro.lowbit import LowBitModel


def compress(
    model: str,
    text: str,
    out: Path,
    calibration: Path | None = None,
    sequences: int = 0,
    length: int = 0,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    hub: bool = False,
) -> None:
    """Apply the steps of recipe `text` to `model` in order and write the compressed model to `out`.

    Args:
        calibration: token ids of the calibration corpus; `sequences` crops of `length` are drawn with `seed`.

    Raises:
        UserError: unknown model or recipe, a recipe without steps, or calibration that is needed and absent.
    """
    parsed = recipe.parse(text)
    if not parsed.steps:
        raise UserError(f"recipe {text!r} has no step: full precision is not compressed")
    data = None
    if parsed.calibrated and calibration is not None:
        data = corpora.calibration(corpora.load_tokens(calibration)[0], sequences, length, seed)
    lm = LowBitModel(models.load(model, device, dtype, hub))
    for step in parsed.steps:
        step.module.apply(lm, data, step.config)
    lm.save(out, {"model": model, "fingerprint": models.fingerprint(model), "recipe": parsed.name})


def load(model: str, weights: Path | None, device: str, dtype: str, hub: bool) -> LowBitModel:
    """A model with its compressed weights, or in full precision where there are none.

    Raises:
        UserError: the compressed weights belong to another model, or either is damaged.
    """
    lm = LowBitModel(models.load(model, device, dtype, hub))
    if weights is not None:
        meta = lm.load(weights)
        if meta["fingerprint"] != models.fingerprint(model):
            raise UserError(f"{weights} was made from another model than today's {model}; delete it and run again")
    return lm
