"""Write a plain document the way GPTQ's protocol shows WikiText-2 to a model.

WikiText's rows are titles (` = Title = \\n`), paragraphs and empty rows; GPTQ joins the rows of the data set with blank
lines. The words are split by the Moses tokenizer with its aggressive hyphen splitting (`state @-@ of`), and the commas
and points inside numbers are marked (`1 @,@ 234 @.@ 5`). Checked against the validation and test rows: dashes, quotes,
apostrophes (`it 's`), brackets, `%`, `$` and slashes are what Moses makes of them.

WikiText-2 has a section heading (` = = Career = = `) before about every third paragraph, in a row of its own between
empty rows, and the corpus has lost its headings. Without any, a model that was trained on this layout pays 3.5 to 7.9
nats for the fourth to seventh line break of a row, 1.04 of the 1.25 nats of its mean `\\n` (pocket-3m). So every third
paragraph gets its first word as a heading, and at every fourth heading its second word as a subheading.

Source: Merity et al., arXiv 1609.07843, section 4.1; IST-DASLab/gptq, `datautils.get_wikitext2`.
"""

import re
from functools import cache
from typing import TYPE_CHECKING

from repro.core.errors import UserError

if TYPE_CHECKING:
    from sacremoses import MosesTokenizer

HEADING_EVERY = 3  # paragraphs; WikiText-2 test: 129 of 264 row ends stand before or after a heading
SUBHEADING_EVERY = 4  # headings; there 14 of 129 such row ends have two headings in a row
_IN_NUMBER = re.compile(r"(?<=\d)([,.])(?=\d)")


@cache
def tokenizer() -> "MosesTokenizer":
    """The English Moses tokenizer of the optional library.

    Raises:
        UserError: sacremoses is not installed.
    """
    try:
        from sacremoses import MosesTokenizer
    except ImportError:
        raise UserError("WikiText's layout is written with the sacremoses library; pip install sacremoses") from None
    return MosesTokenizer(lang="en")


def write(document: str) -> str:
    """The document as GPTQ's protocol makes it of WikiText-2: rows joined by blank lines.

    Args:
        document: the title in the first line, then one paragraph per line; blank lines are skipped.

    Raises:
        UserError: sacremoses is not installed.
    """
    title, *paragraphs = [_tokenize(line) for line in document.split("\n") if line.strip()] or [""]
    rows = ["", f" = {title} = \n", ""]
    for i, paragraph in enumerate(paragraphs, start=1):
        if i % HEADING_EVERY == 0:
            first, second = [*paragraph.split()[:2], "", ""][:2]
            rows += ["", f" = = {first} = = \n", ""]
            if i % (HEADING_EVERY * SUBHEADING_EVERY) == 0:
                rows += ["", f" = = = {second or first} = = = \n", ""]
        rows.append(f" {paragraph} \n")
    return "\n\n".join(rows)


def _tokenize(line: str) -> str:
    text = tokenizer().tokenize(line, aggressive_dash_splits=True, escape=False, return_str=True)
    return _IN_NUMBER.sub(r" @\1@ ", text)
