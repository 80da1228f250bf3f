"""Scales: all that are shipped load, a base is filled in, and nothing unknown passes."""

import dataclasses
import re

import pytest
import yaml

from repro import models, papers
from repro.core.errors import UserError
from repro.core.files import ROOT
from repro.data.corpora import CORPORA
from repro.metrics import perplexity
from repro.results import stored_rows
from repro.specs import scale, scale_files
from repro.specs.scale import Calibration, hub_models, load, names
from repro.workflow.workflow import Workflow

LABELS = set()
for _paper in papers.PAPERS:
    for _number in papers.tables(_paper):
        LABELS |= {cell.model for cell in papers.printed(_paper, _number)}
DRAFTS = {cell.row.partition(" [")[0] for cell in papers.printed("subspec", "1")}  # its rows are named by the draft


@pytest.fixture(autouse=True)
def no_scale_in_the_environment(monkeypatch):
    monkeypatch.delenv("SCALE", raising=False)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A folder of scales of the test's own, `pocket` among them; call it with name=keys to add some."""
    for module in (scale, scale_files):
        monkeypatch.setattr(module, "HOME", tmp_path)
    (tmp_path / "config").mkdir()

    def add(**scales):
        for name, keys in scales.items():
            text = keys if isinstance(keys, str) else yaml.safe_dump({"name": name} | keys, sort_keys=False)
            (tmp_path / "config" / f"{name.replace('_', '-')}.yaml").write_text(text)

    add(pocket=yaml.safe_load((ROOT / "config" / "pocket.yaml").read_text()))
    return add


def test_what_is_shipped():
    assert set(names()) >= {"pocket", "gpu", "paper"}
    assert not set(scale_files.NO_SCALES) & set(names())


@pytest.mark.parametrize("name", names())
def test_every_shipped_scale_loads_and_names_only_what_there_is(name):
    p = load(None, name)
    assert p.name == name and p.about
    assert set(p.models) <= LABELS | DRAFTS, "a label that no paper prints"
    assert {*p.corpora.values(), p.calibration.corpus} <= set(CORPORA)
    assert set(p.corpora) == {"wikitext2", "c4"}
    for text in {*p.corpora.values(), p.calibration.corpus}:
        assert p.hub or CORPORA[text].reader != "hub"
    for model in p.models:
        assert (models.folder(p.stand_in(model)) is None) == p.hub
    assert p.calibration.length <= 2048 and p.protocols["perplexity"].length == 2048 and p.threads == 1
    assert load(p.as_config()) == p


def test_hub_models_are_pinned_once_by_a_whole_commit():
    pins, aliases = hub_models()
    ids = [pin.partition("@")[0] for pin in pins.values()]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[0-9a-f]{40}", pin.partition("@")[2]) for pin in pins.values())
    assert set(pins) | set(aliases) <= LABELS and set(aliases.values()) <= set(pins) and not set(aliases) & set(pins)
    p = load(None, "paper")
    for other, label in aliases.items():
        assert p.stand_in(other) == p.stand_in(label) == pins[label], "the papers' spellings are one model"
    assert p.stand_in("Llama-5-1B") is None
    with pytest.raises(UserError, match="^config/hub.yaml: unknown model 'Llama-5-1B'"):
        scale.pin("Llama-5-1B")


def test_a_stand_in_is_never_repeated_in_a_table():
    p = load(None, "pocket")
    for paper in papers.PAPERS:
        for number in papers.tables(paper):
            shown = {cell.model for cell in papers.printed(paper, number)}
            used = [p.stand_in(m) for m in shown if p.stand_in(m)]
            assert len(used) == len(set(used)), (paper, number)


def test_grade_says_what_a_stand_in_is_worth():
    assert {name: load(None, name).grade for name in ("pocket", "gpu", "paper")} == {
        "pocket": "C", "gpu": "A", "paper": "A",
    }  # fmt: skip


def test_the_name_wins_over_the_environment_and_that_over_pocket(monkeypatch):
    assert load().name == "pocket"
    monkeypatch.setenv("SCALE", "gpu")
    assert load().name == "gpu"
    assert load(None, "pocket").name == "pocket"
    monkeypatch.setenv("SCALE", "")
    assert load().name == "pocket"
    monkeypatch.setenv("SCALE", "gpv")
    with pytest.raises(UserError, match="^unknown scale 'gpv'; did you mean 'gpu'?"):
        load()


@pytest.mark.parametrize("name", ["pocket-models", "hub", "../config/pocket", "pocket.yaml", "nosuch"])
def test_an_unknown_scale(name):
    with pytest.raises(UserError, match="^unknown scale"):
        load(None, name)


def test_any_device_is_the_one_that_is_here(monkeypatch):
    p = load(None, "pocket")
    for there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(scale, "has_cuda", lambda there=there: there)
        assert p.device == "any" and p.here().device == device and p.on("cuda").here().device == "cuda"
        flow = Workflow(p, stored=False)
        cell = next(
            c for c in flow.cells("spear", "1") if (c.row, c.col, c.stand_in) == ("RTN pc", "Wiki", "pocket-3m")
        )
        assert {job.parsed_options()["device"] for job in stored_rows.jobs(flow, cell)} == {device}
        declared = flow.inputs(cell)
        assert "device" not in str(declared) and "threads" not in str(declared), "a result stands on every device"


def test_what_a_build_measures_itself_is_short_and_trains_as_long():
    p = load(None, "pocket")
    brief = p.brief()
    assert (brief.protocols["perplexity"].windows, brief.protocols["perplexity"].kl_windows) == (8, 8)
    assert brief.protocols["zeroshot"].limit == brief.protocols["exam"].items == 100 and brief.seeds == 1
    assert brief.calibration == p.calibration and brief.calibration_texts == p.calibration_texts
    small = load({"perplexity": {"windows": 3, "kl_windows": 2}, "zeroshot": {"limit": 7}})
    assert small.brief().protocols["perplexity"] == small.protocols["perplexity"], "no more than the scale asks for"
    assert small.brief().protocols["zeroshot"].limit == small.protocols["zeroshot"].limit


def test_a_base_gives_what_is_not_said(config):
    config(mine={"base": "pocket", "name": "mine", "perplexity": {"windows": 2}}, next={"base": "mine", "threads": 2})
    pocket, mine, following = load(None, "pocket"), load(None, "mine"), load(None, "next")
    protocols = pocket.protocols | {"perplexity": perplexity.Protocol(windows=2)}
    assert mine == dataclasses.replace(pocket, name="mine", protocols=protocols)
    assert following == dataclasses.replace(mine, name="next", threads=2)


def test_a_base_is_filled_in_for_a_configfile_too(config):
    text = {"base": "pocket", "name": "mine", "calibration": {"corpus": "c4-local", "sequences": 1, "length": 8}}
    made = load(text)
    assert made.calibration == Calibration("c4-local", 1, 8, 0)
    assert made.models == load(None, "pocket").models
    assert text["base"] == "pocket"


@pytest.mark.parametrize("name", names())
def test_every_shipped_scale_is_the_same_by_configfile(name):
    assert load(yaml.safe_load((ROOT / "config" / f"{name}.yaml").read_text())) == load(None, name)


def test_a_configfile_wins_over_name_and_environment(config, monkeypatch):
    monkeypatch.setenv("SCALE", "nosuch")
    assert load({"base": "pocket", "name": "mine"}, "nosuch either").name == "mine"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"name": "mine"}, "config/mine.yaml: key 'about' is missing"),
        ({"base": "pocket", "thread": 2}, "config/mine.yaml: unknown key 'thread'; did you mean 'threads'?"),
        ({"base": "pocket", "threads": "two"}, "config/mine.yaml: threads: expected int, got str 'two'"),
        ({"base": "pocket", "device": "gpu"}, "config/mine.yaml: device: unknown value 'gpu'"),
        ({"base": "pocket", "grade": "D"}, "config/mine.yaml: grade: unknown value 'D'"),
        ({"base": "pocket", "zeroshot": {"limits": 3}}, "config/mine.yaml: zeroshot: unknown key 'limits'"),
        ({"base": "pocket", "models": {"7B": None}}, "config/mine.yaml: models.7B: expected str, got NoneType"),
        ({"base": "pocket", "calibration": {"corpus": "c4-local"}}, "config/mine.yaml: calibration: key 'sequences'"),
        ({"base": "mine"}, "config/mine.yaml: base: unknown scale 'mine'"),
        ({"base": "pocekt"}, "config/mine.yaml: base: unknown scale 'pocekt'; did you mean 'pocket'?"),
        ({"base": "other"}, "config/other.yaml: base: unknown scale 'mine'"),
        ({"base": ["pocket"]}, "config/mine.yaml: base: unknown scale"),
        ("- a\n", "config/mine.yaml: not a scale; expected a mapping with keys of Scale"),
        ("", "config/mine.yaml: not a scale"),
        ("a: [", "mine.yaml: not valid YAML"),
        ({"name": "other"}, "config/mine.yaml: its name is 'other'; a scale is named like its file, 'mine'"),
        ("about: x", "config/mine.yaml: key 'name' is missing; a scale is named like its file, 'mine'"),
        ({"base": "pocket", "threads": 0}, "scale mine: threads is 0; it must be 1 or more"),
        ({"base": "pocket", "protocols": {}}, "config/mine.yaml: unknown key 'protocols'"),
    ],
)
def test_what_is_wrong_in_a_scale_is_named(config, keys, sentence):
    config(mine=keys, other={"base": "mine", "name": "other"})
    with pytest.raises(UserError) as error:
        load(None, "mine")
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_what_is_wrong_in_a_configfile_is_named(config):
    with pytest.raises(
        UserError, match="^the scale given by --configfile: unknown key 'modles'; did you mean 'models'"
    ):
        load({"base": "pocket", "name": "mine", "modles": {}})
    with pytest.raises(UserError, match="^the scale given by --configfile: base: unknown scale 'gpu'"):
        load({"base": "gpu", "name": "mine"})


@pytest.mark.parametrize("slip", ["Llama-3.2-1b", "Llama3.2-1B-", "Llama-9.2-1B", "Mistral-7b"])
def test_a_model_that_is_spelled_nearly_as_a_printed_one_is_refused(slip):
    """Its stand-in would be shown nowhere, and nothing would be said."""
    with pytest.raises(UserError, match=f"models: unknown model '{slip}'; did you mean '(Llama|Mistral)"):
        load({"models": {slip: "pocket-3m"}})


@pytest.mark.parametrize("own", ["mine", "our-tiny", "Qwen2.5-1.5B", "Llama-3.2-1B"])
def test_names_of_ones_own_and_of_shapes_are_free(own):
    assert load({"models": {own: "pocket-3m"}}).models[own] == "pocket-3m"


def test_a_name_in_a_spec_of_ones_own_is_free(tmp_path, monkeypatch):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "own.yaml").write_text("models: [Llama-3.2-1C]")
    at = load()
    with pytest.raises(UserError, match="unknown model"):
        scale._check_spelling({"Llama-3.2-1C": "pocket-3m"}, "here")
    monkeypatch.setattr(scale, "HOME", tmp_path)
    scale._check_spelling({**at.models, "Llama-3.2-1C": "pocket-3m"}, "here")
