"""`saved`: load what `python -m repro compress MODEL --text FILE --out FOLDER` stored; nothing is computed.

`python -m repro perplexity FOLDER` and `generate --model FOLDER` are this step on the model that was compressed; with a
recipe as well they go on from it: `--recipe sliced-w4` reads a master at fewer bits.
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
FILE = "model.safetensors"  # codes, scales, zeros and whatever else a recipe stores, in the folder
DIGITS = 16  # of a file's SHA-256, that name it


@dataclass(frozen=True)
class Config:
    """Which weights.

    Attributes:
        folder: where they lie.
        digest: the first digits of the file's SHA-256, so that a result belongs to one file; empty is not checked.
        full: keep the weights of full precision at hand for a step that comes after; not of a model that was rescaled.
    """

    folder: str = ""
    digest: str = ""
    full: bool = False


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Give `lm`, the model that was compressed, what is stored; `calibration` is not used.

    Raises:
        UserError: no such file, another one than its digest says, a damaged one, or one of another model.
    """
    path = Path(config.folder) / FILE
    if not config.folder or not path.is_file():
        raise UserError(f"saved(folder={config.folder}): {path} is not there; name a folder that compress --text wrote")
    if not sha256(path).startswith(config.digest):
        raise UserError(f"{path}: another file than the one of digest {config.digest}; name the folder again")
    made_of = lm.load(path, keep_full=config.full).get("fingerprint", "")
    name = getattr(lm.model.config, "name_or_path", "")
    if name and Path(name).is_dir():  # else on the hub, where a revision belongs to the name
        models.check_fingerprint(name, made_of, path)
