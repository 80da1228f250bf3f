"""WikiText's layout: known answers, and that only layout changes."""

import builtins
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.core.errors import UserError
from repro.train import wikitext_layout
from repro.train.wikitext_layout import write

LINES = st.lists(st.text("abcXYZ 019.,'\"-()%$&;:/–éß", min_size=1, max_size=60), min_size=1, max_size=3)


def test_rows_joined_by_blank_lines():
    """As the rows of WikiText under GPTQ's join."""
    assert write("T\np\nq") == "\n\n".join(["", " = T = \n", "", " p \n", " q \n"])
    assert write("T\np") == "\n\n = T = \n\n\n\n\n p \n"
    assert write("T") == "\n\n = T = \n\n\n"


def test_every_third_paragraph_has_a_heading_and_every_fourth_heading_a_subheading():
    """The line breaks between rows are those of WikiText-2: 3, 5 around a heading, 7 between two headings."""
    text = write("T\n" + "\n".join(f"Word{i} more text" for i in range(1, 13)))
    assert re.findall(r"\n (= = .*=) \n", text) == [
        "= = Word3 = =", "= = Word6 = =", "= = Word9 = =", "= = Word12 = =", "= = = more = = ="
    ]  # fmt: skip
    assert " Word2 more text \n\n\n\n\n = = Word3 = = \n\n\n\n\n Word3 more text \n\n\n Word4" in text
    assert " = = Word12 = = \n\n\n\n\n\n\n = = = more = = = \n\n\n\n\n Word12" in text


@pytest.mark.parametrize(
    ("plain", "spaced"),
    [
        (
            "Mr. Smith's 1.5-litre car (a \"state-of-the-art\" one) cost $1,234,567.89 in the U.S., or 60% more;"
            " he didn't pay.",
            "Mr. Smith 's 1 @.@ 5 @-@ litre car ( a \" state @-@ of @-@ the @-@ art \" one ) cost"
            " $ 1 @,@ 234 @,@ 567 @.@ 89 in the U.S. , or 60 % more ; he didn 't pay .",
        ),
        ("It had 1,990. No. 5 came at 12:30 … etc.", "It had 1 @,@ 990 . No. 5 came at 12 : 30 … etc ."),
        ("In 1939–45, e.g. Jan and/or I – well—left...", "In 1939 – 45 , e.g. Jan and / or I – well — left ..."),
        ("A 5 °C day; R&B [sic] at £5,000.", "A 5 ° C day ; R & B [ sic ] at £ 5 @,@ 000 ."),
    ],
)  # fmt: skip
def test_known_paragraphs_are_written_as_wikitext(plain, spaced):
    assert write(f"Post-war\n{plain}") == f"\n\n = Post @-@ war = \n\n\n\n\n {spaced} \n"


@given(LINES)
def test_letters_and_digits_are_unchanged(lines):
    document = "\n".join(lines)
    plain, spaced = (re.sub(r"[\W_]", "", text) for text in (document, write(document)))
    assert plain == spaced


@given(LINES)
def test_every_paragraph_is_a_row(lines):
    filled = [line for line in lines if line.strip()]
    rows = write("\n".join(lines)).split("\n\n")
    assert rows[0] == "" and rows[1].startswith(" = ")
    assert len([row for row in rows if row.strip()]) == max(len(filled), 1)


def test_without_the_library_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def absent(name, *rest, **more):
        if name == "sacremoses":
            raise ImportError
        return real(name, *rest, **more)

    wikitext_layout.tokenizer.cache_clear()
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UserError, match="pip install sacremoses$"):
        write("T\np")
