"""Profiles: all that are shipped load, a base is filled in, and nothing unknown passes."""

import dataclasses
import re

import pytest
import yaml

from repro import models, papers, profile
from repro.corpora import CORPORA
from repro.errors import UserError
from repro.files import ROOT
from repro.profile import Calibration, Perplexity, load, names

LABELS = {cell.model for p in papers.PAPERS for n in papers.tables(p) for cell in papers.printed(p, n)}


@pytest.fixture(autouse=True)
def no_profile_in_the_environment(monkeypatch):
    monkeypatch.delenv("PROFILE", raising=False)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A folder of profiles of the test's own, `pocket` among them; call it with name=keys to add some."""
    monkeypatch.setattr(profile, "ROOT", tmp_path)
    (tmp_path / "config").mkdir()

    def add(**profiles):
        for name, keys in profiles.items():
            text = keys if isinstance(keys, str) else yaml.safe_dump(keys, sort_keys=False)
            (tmp_path / "config" / f"{name.replace('_', '-')}.yaml").write_text(text)

    add(pocket=yaml.safe_load((ROOT / "config" / "pocket.yaml").read_text()))
    return add


def test_what_is_shipped():
    assert set(names()) >= {"pocket", "pocket-real", "pocket-full", "gpu", "paper"}
    assert "pocket-models" not in names()


@pytest.mark.parametrize("name", names())
def test_every_shipped_profile_loads_and_names_only_what_there_is(name):
    p = load(None, name)
    assert p.name == name and p.about
    assert set(p.models) <= LABELS, "a label that no paper prints"
    assert {*p.corpora.values(), p.calibration.corpus} <= set(CORPORA)
    assert set(p.corpora) == {"wikitext2", "c4"}
    for text in {*p.corpora.values(), p.calibration.corpus}:
        assert p.hub or CORPORA[text].needs != "hub"
    for model in p.models.values():
        assert (models.folder(model) is None) == p.hub
    assert p.calibration.length <= 2048 and p.perplexity.length == 2048 and p.threads == 1


@pytest.mark.parametrize("name", ["gpu", "paper"])
def test_hub_models_are_pinned_by_a_whole_commit(name):
    by_id = {}
    for model in load(None, name).models.values():
        hub_id, _, revision = model.partition("@")
        assert re.fullmatch("[0-9a-f]{40}", revision), model
        by_id.setdefault(hub_id, set()).add(revision)
    assert all(len(found) == 1 for found in by_id.values())


def test_a_stand_in_is_never_repeated_in_a_table():
    p = load(None, "pocket")
    for paper in papers.PAPERS:
        for number in papers.tables(paper):
            used = [p.models[m] for m in {cell.model for cell in papers.printed(paper, number)} if m in p.models]
            assert len(used) == len(set(used)), (paper, number)


def test_grade_says_what_a_stand_in_is_worth():
    assert {name: load(None, name).grade for name in ("pocket", "pocket-real", "pocket-full", "gpu", "paper")} == {
        "pocket": "C", "pocket-real": "C", "pocket-full": "C", "gpu": "A", "paper": "A",
    }  # fmt: skip


def test_the_name_wins_over_the_environment_and_that_over_pocket(monkeypatch):
    assert load().name == "pocket"
    monkeypatch.setenv("PROFILE", "gpu")
    assert load().name == "gpu"
    assert load(None, "pocket-real").name == "pocket-real"
    monkeypatch.setenv("PROFILE", "")
    assert load().name == "pocket"
    monkeypatch.setenv("PROFILE", "gpv")
    with pytest.raises(UserError, match="^unknown profile 'gpv': did you mean 'gpu'?"):
        load()


@pytest.mark.parametrize("name", ["pocket-models", "../config/pocket", "pocket.yaml", "nosuch"])
def test_an_unknown_profile(name):
    with pytest.raises(UserError, match="^unknown profile"):
        load(None, name)


def test_a_base_gives_what_is_not_said(config):
    config(mine={"base": "pocket", "name": "mine", "perplexity": {"windows": 2}}, next={"base": "mine", "threads": 2})
    pocket, mine, following = load(None, "pocket"), load(None, "mine"), load(None, "next")
    assert mine == dataclasses.replace(pocket, name="mine", perplexity=Perplexity(windows=2))
    assert following == dataclasses.replace(mine, threads=2)


def test_a_base_is_filled_in_for_a_configfile_too(config):
    text = {"base": "pocket", "name": "mine", "calibration": {"corpus": "c4", "sequences": 1, "length": 8}}
    made = load(text)
    assert made.calibration == Calibration("c4", 1, 8, 0)
    assert made.models == load(None, "pocket").models
    assert text["base"] == "pocket"


@pytest.mark.parametrize("name", names())
def test_every_shipped_profile_is_the_same_by_configfile(name):
    assert load(yaml.safe_load((ROOT / "config" / f"{name}.yaml").read_text())) == load(None, name)


def test_a_configfile_wins_over_name_and_environment(config, monkeypatch):
    monkeypatch.setenv("PROFILE", "nosuch")
    assert load({"base": "pocket", "name": "mine"}, "nosuch either").name == "mine"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"name": "mine"}, "config/mine.yaml: key 'about' is missing"),
        ({"base": "pocket", "thread": 2}, "config/mine.yaml: unknown key 'thread': did you mean 'threads'?"),
        ({"base": "pocket", "threads": "two"}, "config/mine.yaml: threads: expected int, got str 'two'"),
        ({"base": "pocket", "device": "gpu"}, "config/mine.yaml: device: unknown value 'gpu'"),
        ({"base": "pocket", "grade": "D"}, "config/mine.yaml: grade: unknown value 'D'"),
        ({"base": "pocket", "zeroshot": {"limits": 3}}, "config/mine.yaml: zeroshot: unknown key 'limits'"),
        ({"base": "pocket", "models": {"7B": None}}, "config/mine.yaml: models.7B: expected str, got NoneType"),
        ({"base": "pocket", "calibration": {"corpus": "c4"}}, "config/mine.yaml: calibration: key 'sequences'"),
        ({"base": "mine"}, "config/mine.yaml: base: unknown profile 'mine'"),
        ({"base": "pocekt"}, "config/mine.yaml: base: unknown profile 'pocekt': did you mean 'pocket'?"),
        ({"base": "other"}, "config/other.yaml: base: unknown profile 'mine'"),
        ({"base": ["pocket"]}, "config/mine.yaml: base: unknown profile"),
        ("- a\n", "config/mine.yaml: not a profile; expected a mapping with keys of Profile"),
        ("", "config/mine.yaml: not a profile"),
        ("a: [", "mine.yaml: not valid YAML"),
    ],
)
def test_what_is_wrong_in_a_profile_is_named(config, keys, sentence):
    config(mine=keys, other={"base": "mine", "name": "other"})
    with pytest.raises(UserError) as error:
        load(None, "mine")
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_what_is_wrong_in_a_configfile_is_named(config):
    with pytest.raises(
        UserError, match="^the profile given by --configfile: unknown key 'modles': did you mean 'models'"
    ):
        load({"base": "pocket", "modles": {}})
    with pytest.raises(UserError, match="^the profile given by --configfile: base: unknown profile 'gpu'"):
        load({"base": "gpu"})
