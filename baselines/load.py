"""`load`: read what an earlier recipe stored of the same model; nothing is computed.

`python -m repro perplexity FOLDER` and `generate --model FOLDER` are this step on the model that was compressed; with a
recipe as well they go on from it: `--recipe sliced-w4` reads a master at fewer bits. The file may also be one that this
repository has: `load(file=masters/pocket-3m.safetensors)` is the trained any-precision master of pocket-3m.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from repro import models
from repro.core.errors import UserError
from repro.core.files import sha256
from repro.models.lowbit import LowBitModel

VERSION = 1
CALIBRATED = False
DIGITS = 16  # of a file's SHA-256, that name it


@dataclass(frozen=True)
class Config:
    """Which weights.

    Attributes:
        file: of codes, scales, zeros and whatever else a recipe stores: a path, or one below `repro/pocket/`.
        digest: the first digits of the file's SHA-256, so that a result belongs to one file; empty is not checked.
        full: keep the weights of full precision at hand for a step that comes after; not of a model that was rescaled.
    """

    file: str = ""
    digest: str = ""
    full: bool = False


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Give `lm`, the model that was compressed, what is stored; `calibration` is not used.

    Raises:
        UserError: no such file, another one than its digest says, a damaged one, or one of another model.
    """
    ours = models.POCKET / config.file
    path = ours if ours.is_file() else Path(config.file)
    if not path.is_file():
        raise UserError(f"load(file={config.file}): not a file; name one that compress wrote")
    if not sha256(path).startswith(config.digest):
        raise UserError(f"{path}: another file than the one of digest {config.digest}; name the file again")
    made_of = lm.load(path, keep_full=config.full).get("fingerprint", "")
    name = getattr(lm.model.config, "name_or_path", "")
    if name and Path(name).is_dir():  # else on the hub, where a revision belongs to the name
        models.check_fingerprint(name, made_of, path)
