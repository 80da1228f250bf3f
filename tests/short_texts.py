"""Three short real texts that tests measure and calibrate on, as corpora of their own.

They are the beginnings of texts that `repro/data/texts/manifest.yaml` lists with their licences: WikiText-2's
validation split, the C4 sample, the held-out text. `register` makes them corpora of this process, `add_to` those of a
copy of the checkout.
"""

import bz2
import hashlib
from pathlib import Path

from repro.core.files import unpacked
from repro.data import corpora

FOLDER = Path(__file__).with_name("texts")
LICENCES = {
    "tiny-wikitext": "CC BY-SA 3.0 (Wikipedia)",
    "tiny-c4-docs": "ODC-BY (C4)",
    "tiny-held-out": "CC BY-SA 3.0, CC BY 4.0, public domain",
}


def _facts(name: str) -> dict[str, str]:
    """What an entry of corpora.yaml says of a text."""
    return {"description": "of the tests", "licence": LICENCES[name], "joining": "", "split": "tests"}


def _content(name: str) -> bytes:
    return unpacked(FOLDER / f"{name}.txt.bz2")


def register() -> None:
    """Make the texts corpora of this process, and of those that are forked from it."""
    corpora.READERS["tests"] = lambda corpus: [_content(corpus.source).decode()]
    for name in LICENCES:
        sha256 = hashlib.sha256(_content(name)).hexdigest()
        corpora.CORPORA[name] = corpora.Corpus(name, source=name, reader="tests", sha256=sha256, **_facts(name))


def add_to(checkout: Path) -> None:
    """Make the texts corpora of a copy of the checkout, as files that it carries."""
    data = checkout / "repro" / "data"
    entries, files = "", ""
    for name in LICENCES:
        file, content = f"{name}.txt", _content(name)
        sha256 = hashlib.sha256(content).hexdigest()
        facts = _facts(name) | {"source": file, "reader": "mirror", "sha256": sha256}
        entries += f"{name}:\n" + "".join(f'  {key}: "{value}"\n' for key, value in facts.items())
        files += f"{file}:\n  sha256: {sha256}\n  bytes: {len(content)}\n  packing: bz2\n"
        files += f'  source: tests\n  licence: "{LICENCES[name]}"\n'
        (data / "texts" / f"{file}.bz2").write_bytes(bz2.compress(content))
    for path, lines in ((data / "corpora.yaml", entries), (data / "texts" / "manifest.yaml", files)):
        with open(path, "a", encoding="utf-8") as file:
            file.write(lines)
