"""A model under a recipe: codes, scales and zeros of every block linear, made once for all tables."""

from pathlib import Path

from repro import corpora, models, recipe
from repro.errors import UserError
from repro.lowbit import LowBitModel


def compress(
    model: str,
    text: str,
    out: Path,
    start: Path | None = None,
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
        start: the same model under the recipe without its last step, compressed; only that step is applied then.
        calibration: token ids of the calibration corpus; `sequences` crops of `length` are drawn with `seed`.

    Raises:
        UserError: unknown model or recipe, a recipe without steps, calibration that is needed and absent, or a `start`
            of another model or recipe.
    """
    parsed = recipe.parse(text)
    if not parsed.steps:
        raise UserError(f"recipe {text!r} has no step: full precision is not compressed")
    data = None
    if parsed.calibrated and calibration is not None:
        data = corpora.calibration(corpora.load_tokens(calibration)[0], sequences, length, seed)
    steps = parsed.steps
    if start is not None:
        lm, steps = load(model, start, device, dtype, hub, keep_full=True), steps[-1:]
        check_start(parsed, lm, start)
    else:
        lm = LowBitModel(models.load(model, device, dtype, hub))
    for step in steps:
        step.module.apply(lm, data, step.config)
    lm.save(out, {"model": model, "fingerprint": models.fingerprint(model), "recipe": parsed.name})


def check_start(parsed: recipe.Recipe, lm: LowBitModel, start: Path) -> None:
    """Raise unless `lm`, loaded from `start`, is what the last step of a recipe goes on from.

    Raises:
        UserError: it holds another recipe.
    """
    if not parsed.before or lm.meta["recipe"] != parsed.before:
        wanted = parsed.before or "nothing"
        raise UserError(f"{start} holds {lm.meta['recipe']!r}; recipe {parsed.name!r} goes on from {wanted!r}")


def load(model: str, weights: Path | None, device: str, dtype: str, hub: bool, keep_full: bool = False) -> LowBitModel:
    """A model with its compressed weights, or in full precision where there are none.

    Args:
        keep_full: keep the full-precision weights at hand for a step that comes after.

    Raises:
        UserError: the compressed weights belong to another model, or either is damaged.
    """
    lm = LowBitModel(models.load(model, device, dtype, hub))
    if weights is not None and lm.load(weights, keep_full)["fingerprint"] != models.fingerprint(model):
        raise UserError(f"{weights} was made from another model than today's {model}; delete it and run again")
    return lm
