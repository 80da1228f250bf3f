"""The README's list of files from a spec to LaTeX: at most 12, each there."""

import re

from repro.files import ROOT


def test_from_spec_to_latex_there_are_at_most_twelve_files():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\d+\. `([^`]+)`", text.split("From a spec to LaTeX")[1], re.MULTILINE)
    assert 8 <= len(listed) <= 12
    assert [name for name in listed if not (ROOT / name).is_file()] == []
