"""The command line starts at once: help, a typo and `show` import nothing that takes time."""

import dataclasses
import errno
import json
import os
import sys
from typing import get_type_hints

import dag
import pytest

from repro import cli
from repro.__main__ import main, run
from repro.cli import measure
from repro.core.errors import UserError
from repro.core.files import ROOT
from repro.metrics import KINDS

SLOW = {"torch", "transformers", "pandas", "scipy", "numpy", "pyarrow", "matplotlib", "snakemake", "triton", "lm_eval"}
TABLE = "**a title**\n\n| a | b |\n| --- | ---: |\n| 1 | 2 |\n"
SCRIPT = """
import json, sys
from repro.__main__ import main
try:
    code = main(sys.argv[2:])
except SystemExit as stop:  # argparse, after --help
    code = stop.code
with open(sys.argv[1], "w") as file:
    json.dump([code, sorted(sys.modules)], file)
"""


def loaded(tmp_path, *words) -> tuple[int, set[str], dag.Done]:
    """Exit code of a command, what it has imported of `SLOW`, and what it said."""
    noted = tmp_path / "modules.json"
    done = dag.run([sys.executable, "-c", SCRIPT, noted, *words], tmp_path, ROOT, SCALE="")
    assert done.code == 0, done.text
    code, modules = json.loads(noted.read_text())
    assert len(modules) < 400 or SLOW & set(modules), f"{len(modules)} modules"
    return code, SLOW & set(modules), done


AT_ONCE = {
    "help": (("--help",), 0, "accept"),
    "no verb": ((), 0, "accept"),
    "version": (("--version",), 0, "lowbit-repro"),
    "a verb's help": (("generate", "--help"), 0, "--top-k"),
    "a typo of a verb": (("mkae", "all"), 2, "did you mean 'make'"),
    "a typo of an option": (("make", "all", "--coers", "2"), 2, "--coers 2"),
    "a typo of a target": (("make", "tables/spear/tabel1.tex"), 2, "did you mean 'tables/spear/table1.tex'"),
    "a typo of a job's target": (("run", "spear/tabel1"), 2, "did you mean 'spear/table1'"),
    "help of a kind of cell": (("perplexity", "--help"), 0, "--show {perplexity,kl,top1}"),
    "a typo of a scale": (("make", "all", "--scale", "pocket-"), 2, "unknown scale 'pocket-'; did you mean 'pocket"),
    "a typo of a kind's scale": (("zeroshot", "pocket-3m", "--scale", "gpo"), 2, "did you mean 'gpu'"),
    "show": (("show", "spear/table1"), 0, "a title"),
    "show of a typo": (("show", "spear/tabel1"), 2, "did you mean 'spear/table1'"),
    "show of a typo without a paper": (("show", "tabel1"), 2, "unknown table 'tabel1'; did you mean 'table1'"),
    "show of a paper": (("show", "spear"), 2, "spear is a paper; name one of its tables, such as spear/table1"),
    "show of a page": (("show", "docs/spear.md"), 2, "a page is no table"),
    "show of a figure": (("show", "spear/figure13"), 2, "is a figure; make figures/spear/figure13.svg draws it"),
    "show of a figure of our own": (("show", "leaderboard"), 2, "leaderboard is a figure"),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_it_starts_at_once(tmp_path, name):
    words, code, message = AT_ONCE[name]
    (tmp_path / "tables" / "spear").mkdir(parents=True)
    (tmp_path / "tables" / "spear" / "table1.md").write_text(TABLE)
    result, slow, done = loaded(tmp_path, *words)
    assert result == code and message in done.text and slow == set()


def test_what_takes_time_would_be_seen(tmp_path):
    _, slow, _ = loaded(tmp_path, "list")
    assert {"torch", "numpy"} <= slow and "pandas" not in slow, "a quarter of a second, which only who scores pays"


def test_every_verb_has_a_file_and_every_kind_with_jobs_is_a_verb():
    shared = {"__init__", "options", "measure"}
    assert {path.stem for path in cli.HERE.glob("*.py")} - shared == set(cli.VERBS)
    assert set(cli.kinds()) == {name for name, metric in KINDS.items() if metric.run}
    assert not set(cli.kinds()) & set(cli.VERBS)
    for name, path in cli.kinds().items():
        first = sys.modules[KINDS[name].__module__].__doc__.partition("\n")[0]
        assert cli.summary(path) == first and cli.verbs()[name] == first


def test_a_scale_that_the_environment_names_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALE", "gpo")
    with pytest.raises(UserError, match="^unknown scale 'gpo'; did you mean 'gpu'"):
        run("coverage", [])


@pytest.mark.parametrize("kind", sorted(cli.kinds()))
def test_a_kinds_options_are_the_fields_of_its_params(kind):
    """They are read from its source, where the types of fields are plain."""
    hints = get_type_hints(KINDS[kind])
    known = [
        measure.Field(field.name, hints[field.name], field.default is dataclasses.MISSING)
        for field in dataclasses.fields(KINDS[kind])
    ]
    assert measure.params_fields(cli.kinds()[kind]) == known


@pytest.mark.parametrize("verb", sorted(cli.verbs()))
def test_every_verb_lists_its_options(capsys, verb):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert f"python -m repro {verb}" in printed
    assert " ".join(cli.verbs()[verb].split()) in " ".join(printed.split())


def test_a_file_without_jobs_says_so(tmp_path, capsys):
    """As `run --missing --save` writes where nothing is missing."""
    path = tmp_path / "jobs.json"
    path.write_text("[]")
    assert main(["run", str(path)]) == 0
    assert capsys.readouterr().out == f"no job to run for {path}\n"


@pytest.mark.parametrize(
    "number, message",
    [
        (errno.EACCES, "/x/model.safetensors: Permission denied; give this user the right to it, or name another"),
        (errno.ENOSPC, "/x/model.safetensors: No space left on device; make room, or name one on another file system"),
        (errno.EROFS, "/x/model.safetensors: Read-only file system; name one on a file system that can be written"),
    ],
)
def test_a_file_that_may_not_be_used_is_a_sentence(number, message, monkeypatch, capsys):
    """Wherever in a verb it is met; tests run as a user who may read everything."""

    def refused(verb, words):
        raise OSError(number, os.strerror(number), "/x/model.safetensors")

    monkeypatch.setattr("repro.__main__.run", refused)
    assert main(["list"]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_other_errors_of_the_system_are_not_blamed_on_the_user(monkeypatch):
    def broken(verb, words):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/x")

    monkeypatch.setattr("repro.__main__.run", broken)
    with pytest.raises(OSError, match="Input/output"):
        main(["list"])


def test_a_page_of_a_table_or_of_figures_is_built_with_its_papers(monkeypatch, capsys):
    """They are no targets of their own; what is written is said, as it is of a table."""
    from repro.__main__ import main
    from repro.make import build

    built = []
    monkeypatch.setattr(build, "build", lambda targets, cores, scale: built.append(targets) or 0)
    assert main(["make", "docs/spear/figures.md", "docs/spear/table3.md", "docs/flexquant.md"]) == 0
    assert built == [["docs/spear.md", "docs/flexquant.md"]]
    assert capsys.readouterr().out == (
        "written: docs/spear.md  docs/spear/\nwritten: docs/flexquant.md  docs/flexquant/\n"
    )
    assert main(["make", "figures/spear/figure13.svg"]) == 0
    paths = "  ".join(f"figures/spear/figure13.{form}" for form in ("svg", "pdf", "csv", "md"))
    assert capsys.readouterr().out == f"written: {paths}\n"
    assert main(["make", "docs/spear/table99.md"]) == 2
    assert "unknown target 'docs/spear/table99.md'; did you mean 'docs/spear.md'" in capsys.readouterr().err
