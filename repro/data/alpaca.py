"""`alpaca-part`: 1,807 of the 52k Alpaca records as one text, from the folder in REPRO_DATA; TEAL calibrates on Alpaca.

A record's instruction, input and output stand under one another, records are joined by a blank line. TEAL takes the
data set's own `text`, which puts one prompt template around each record; it is left out here. The records are CC BY-NC:
they are read where they lie and are no part of this repository.
"""

import json

from repro.core.errors import UserError
from repro.data import corpora, sources
from repro.data.corpora import Corpus

FIELDS = ("instruction", "input", "output")


def documents(corpus: Corpus) -> list[str]:
    """The text of every record.

    Raises:
        UserError: the file is not there, or holds no such records.
    """
    content = sources.read(corpus.source, f"corpus {corpus.name!r}", "name another calibration text")
    try:
        records = json.loads(content)
        texts = []
        for record in records:
            fields = [record[field].strip() for field in FIELDS]
            texts.append("\n".join(filter(None, fields)))
        return texts
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{corpus.source}: not readable as corpus {corpus.name!r} ({error!r}); copy it again") from None


corpora.READERS["alpaca"] = documents
corpora.CORPORA["alpaca-part"] = Corpus(
    name="alpaca-part",
    description="1,807 of the 52k Alpaca records, without a prompt template; for calibration",
    source="alpaca/alpaca_data_1807.json",
    licence="CC BY-NC 4.0 (Alpaca)",
    joining="\n\n",
    split="part",
    reader="alpaca",
    sha256="ce41900ad45cbfe007bff23df807b09abc401422e9661f3e72e29795deab7e39",
)
