"""`master`: load the committed any-precision master of a pocket model, without training.

See `repro/models/masters.py`, which writes it.

Block codes, scales, zeros and the index lists of split channels alone are in the file; all else is the model's own.
`master(digest=…) + sliced-w2` reads it at 2 bits.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from repro import models
from repro.core.errors import UserError
from repro.core.files import sha256
from repro.models import masters
from repro.models.lowbit import LowBitModel

VERSION = 1
CALIBRATED = False


@dataclass(frozen=True)
class Config:
    """Which master.

    Attributes:
        digest: the first digits of the file's SHA-256, so that a result belongs to one file; a recipe has to give it.
    """

    digest: str = ""

    def __post_init__(self) -> None:
        if self.digest and (len(self.digest) < 8 or not set(self.digest) <= set("0123456789abcdef")):
            raise UserError(f"master: digest is {self.digest!r}; it must be 8 or more hex digits of the file's SHA-256")


def apply(lm: LowBitModel, calibration: Tensor | None, config: Config) -> None:
    """Give `lm`, a pocket model in full precision, its committed codes; `calibration` is not used.

    Raises:
        UserError: there is no master of this model, it is another one than the digest says, or it is damaged.
    """
    name = Path(getattr(lm.model.config, "name_or_path", "")).name
    path = masters.path(name)
    if not path.is_file():
        raise UserError(f"master: no master of {name or 'this model'} is committed; choose from: {masters.names()}")
    if not config.digest or not sha256(path).startswith(config.digest):
        raise UserError(f"master: {path.name} has the digest {sha256(path)[:8]}, not {config.digest!r}; name that one")
    models.check_fingerprint(name, lm.load(path).get("fingerprint", ""), path)
