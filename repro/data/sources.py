"""The data files of texts and tasks: looked up in this repository, then in the folder that REPRO_DATA names.

A file is known by its path in that folder, such as `zeroshot/boolq.jsonl`. What the repository carries is listed, with
source, licence and hash, in `repro/data/texts/manifest.yaml`. Which copy is read decides nothing: both are the same
bytes, and what a text or a task is called by is checked against a hash of its own.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from repro.core.errors import UserError
from repro.core.files import unpacked
from repro.core.strict import build, load_yaml

TEXTS = Path(__file__).with_name("texts")
MANIFEST = TEXTS / "manifest.yaml"


@dataclass(frozen=True)
class Embedded:
    """A data file that the repository carries.

    Attributes:
        name: its path under the folder of REPRO_DATA.
        sha256, bytes: of the file as that folder would have it.
        source: the repository and commit that it was read from.
        licence: of the text.
        packing: how the repository has it: `bz2` is smaller for most texts, `xz` for what repeats far apart; empty for
            a file that is packed already.
    """

    name: str
    sha256: str
    bytes: int
    source: str
    licence: str
    packing: str

    @property
    def path(self) -> Path:
        """The packed file in the repository."""
        return TEXTS / (f"{self.name}.{self.packing}" if self.packing else self.name)


def _entries() -> dict[str, Embedded]:
    """The files of the manifest by name."""
    entries = {}
    for name, entry in load_yaml(MANIFEST).items():
        entries[name] = build(Embedded, {"name": name, **entry}, f"repro/data/texts/{MANIFEST.name}: {name}")
    return entries


EMBEDDED = _entries()


def data_folder() -> Path | None:
    """The folder that REPRO_DATA names; None where it is not set."""
    named = os.environ.get("REPRO_DATA")
    return Path(named) if named else None


def carried(name: str, sha256: str = "") -> bool:
    """Whether the repository carries a data file; with `sha256` only if it is the very file of that hash."""
    entry = EMBEDDED.get(name)
    return entry is not None and sha256 in ("", entry.sha256)


def available(name: str, sha256: str = "") -> bool:
    """Whether a data file can be read here, from the repository or from the folder of REPRO_DATA."""
    folder = data_folder()
    return carried(name, sha256) or (folder is not None and (folder / name).is_file())


def embedded(name: str) -> bytes:
    """A data file that the repository carries, checked against the manifest.

    Raises:
        UserError: the copy in the repository is missing, cut or changed.
    """
    entry = EMBEDDED[name]
    try:
        content = unpacked(entry.path) if entry.packing else entry.path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{entry.path}: this file of the repository is missing; check it out again") from None
    except OSError as error:
        raise UserError(f"{entry.path}: not readable ({error.strerror}); check it out again") from None
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise UserError(f"{entry.path}: not the file that {MANIFEST.name} lists; check both out again")
    return content


def read(name: str, user: str, otherwise: str = "", sha256: str = "", folder: Path | None = None) -> bytes:
    """The bytes of a data file, from the repository or else from a folder.

    Args:
        name: its path in the data folder.
        user: what needs it, such as `corpus 'held-out'`, for the sentence where it is missing.
        otherwise: what can be done instead of naming a folder that has it, for the same sentence.
        sha256: the file's hash, where its user knows it; another copy in the repository is then not the one.
        folder: the data folder; None is the one of REPRO_DATA.

    Raises:
        UserError: the file is in neither place, or the repository's copy is damaged.
    """
    if carried(name, sha256):
        return embedded(name)
    folder = folder or data_folder()
    path = None if folder is None else folder / name
    if path is None or not path.is_file():
        looked = "REPRO_DATA is not set" if folder is None else f"not in REPRO_DATA={folder}"
        ways = f"set REPRO_DATA to a folder that has {name}" + (f", or {otherwise}" if otherwise else "")
        raise UserError(f"{user}: no such file {name}: it is not part of this repository and {looked}; {ways}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: not readable ({error.strerror}), and {user} needs it; copy it again") from None
