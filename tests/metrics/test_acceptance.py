"""The acceptance cell: what it asks, its job on a tiny model, and what its observations say."""

import json
from dataclasses import replace
from itertools import product

import engines
import numpy as np
import pytest
import torch
from transformers import AutoConfig

from repro import models
from repro.__main__ import main
from repro.baselines import rtn
from repro.core.errors import NotMeasurable, UserError
from repro.data import prompts
from repro.engine import drafts, eagle, weights
from repro.engine.core import Core
from repro.engine.decoding import Decoding
from repro.engine.speculating import Speculating
from repro.engine.substitute import draft_of
from repro.jobs.target import Target
from repro.methods import subspec
from repro.metrics import acceptance
from repro.models.lowbit import LowBitModel
from repro.results import measure
from repro.specs import scale as scales
from repro.specs import tables
from repro.stats.quantity import evaluate
from repro.store import observations
from repro.store.observations import Observations, Series
from repro.workflow.workflow import Workflow


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of two prompts on a tiny Llama, with its observations."""
    name = engines.save("llama", tmp_path_factory.mktemp("tiny"))
    settings = {"acceptance": {"prompts": 2, "tokens": 12}}
    target = Target(scales.load(settings, name="pocket").on("cpu"), name, "fp16")
    made = acceptance.Acceptance("mt-bench", depth=6, top_k=2).jobs(target)["prompts"]
    folder = tmp_path_factory.mktemp("job")
    origin = observations.origin(made, {})
    acceptance.Acceptance.run(made, {}, folder, origin)
    return made, observations.load(folder / observations.FILE)


def test_the_job_counts_what_every_prompt_accepts(job):
    made, result = job
    tokens, iterations, repeated = (result.series[name].values for name in ("tokens", "iterations", "repeated"))
    median = result.series["median"].values
    assert len(tokens) == len(iterations) == len(median) == len(repeated) == 2
    params = acceptance.Acceptance("mt-bench", show="median iteration")
    assert params.series({"prompts": result}, None).keys() == {"median"}
    assert params.value({"median": 3.5}) == 3.5
    passes = acceptance.Acceptance("mt-bench", show="draft passes")
    shown = passes.series({"prompts": result}, None)
    assert shown["passes"].values.tolist() == [6.0, 6.0] and passes.limits == (0.0, 48.0)
    for count, many, typical in zip(tokens, iterations, median):
        assert 1 <= typical <= 7 and (many > 2 or typical == count - 1), "without the prefill's token"
    assert (tokens >= 12).all() and (iterations >= 2).all() and (tokens <= 1 + (iterations - 1) * 7).all()
    assert acceptance.Acceptance("mt-bench").value({"tokens": tokens.mean(), "iterations": iterations.mean()}) > 1
    declared = json.loads(made.inputs)
    assert declared["draft"] == vars(subspec.Config(depth=6, top_k=2)) and declared["prompts"] != "mt-bench"


def acceptance_of(folder, name, tokens=12, prompts=2, **params):
    """The observations of a job of a model's first prompts of MT-Bench, or of another set; folders lie in `folder`."""
    settings = {"acceptance": {"prompts": prompts, "tokens": tokens}}
    target = Target(scales.load(settings, name="pocket").on("cpu"), name, "fp16")
    made = acceptance.Acceptance(**{"prompts": "mt-bench"} | params).jobs(target)["prompts"]
    own = folder / made.id.replace("/", "-")
    own.mkdir()
    acceptance.Acceptance.run(made, {}, own, observations.origin(made, {}))
    return observations.load(own / observations.FILE).series


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_without_a_draft_a_pass_gives_a_token_and_the_texts_are_the_same(tmp_path, temperature, monkeypatch):
    """What is decoded with a draft is what is decoded without, greedy or drawn, token for token."""
    texts = []
    monkeypatch.setattr(acceptance, "repeated", lambda tokens: texts.append(tokens) or 0.5)
    name = engines.save("llama", tmp_path / "tiny")
    plain = acceptance_of(tmp_path, name, draft="none", temperature=temperature)
    drafted = acceptance_of(tmp_path, name, depth=6, top_k=2, temperature=temperature)
    assert plain["tokens"].values.tolist() == plain["iterations"].values.tolist() == [12, 12]
    assert plain["median"].values.tolist() == [1, 1] and plain["passes"].values.tolist() == [0, 0]
    assert (drafted["iterations"].values < 12).all()
    assert len(texts) == 4 and texts[:2] == texts[2:] and all(len(tokens) == 12 for tokens in texts)
    params = acceptance.Acceptance("mt-bench", draft="none")
    assert params.config is None and params.limits == (1, 1)
    assert acceptance.Acceptance("mt-bench", draft="none", show="draft passes").limits == (0, 0)


def test_passes_and_tokens_without_a_draft_are_counted_apart(tmp_path, monkeypatch):
    """A pass that gives no token lowers the length: it is no constant."""
    name = engines.save("llama", tmp_path / "tiny")
    run = Decoding.run

    def with_idle_passes(self, steps, chunk):
        self.seconds += [0.1] * 4
        yield from run(self, steps, chunk)

    monkeypatch.setattr(Decoding, "run", with_idle_passes)
    kept = acceptance_of(tmp_path, name, draft="none")
    assert kept["tokens"].values.tolist() == [12, 12] and kept["iterations"].values.tolist() == [16, 16]


def test_a_long_prompt_gets_fewer_tokens_and_one_beyond_the_context_none(tmp_path, monkeypatch):
    """The context includes the prompt, with a draft and without; numbers, and so seeds, stay those of the set."""
    name = engines.save("llama", tmp_path / "tiny")
    context = AutoConfig.from_pretrained(name).max_position_embeddings
    tokenizer = models.tokenizer(name, False)
    word = " the"
    per_word = len(tokenizer(word * 9)["input_ids"]) - len(tokenizer(word * 8)["input_ids"])
    before = len(tokenizer(word)["input_ids"]) - per_word

    def prompt(size):
        text = word * ((size - before) // per_word)
        assert len(tokenizer(text)["input_ids"]) == size
        return prompts.Prompt(str(size), text, (text,), (), None)

    loaded = [prompt(size) for size in (context + 40, 40, context - 1, context - 5, context - 2)]
    monkeypatch.setattr(acceptance.prompts, "load", lambda name, count: loaded)
    seeds = []
    generate = Speculating.generate
    monkeypatch.setattr(
        Speculating,
        "generate",
        lambda self, *args, seed, **how: seeds.append(seed) or generate(self, *args, seed=seed, **how),
    )
    result = acceptance_of(tmp_path, name, prompts=5, draft="none", temperature=0.6)
    assert result["tokens"].values.tolist() == [12, 5, 2] and seeds == [1, 3, 4]
    assert result["tokens"].group == "mt-bench, first 5, 12 tokens, T 0.6, within the context (3 of 5 prompts)"
    drafted = acceptance_of(tmp_path, name, prompts=5, depth=3, top_k=2, temperature=0.6)
    assert (drafted["tokens"].values >= [12, 5, 2]).all() and seeds[3:] == [1, 3, 4]
    loaded[:] = [prompt(context), prompt(context - 1)]
    with pytest.raises(NotMeasurable, match=f"the shortest of 2 prompts has {context - 1:,} tokens") as caught:
        acceptance_of(tmp_path, name, draft="none")
    assert caught.value.status == "too_long"


def test_a_mean_of_several_sets_is_composed_of_their_cells():
    """Plain, as the paper's: not of all prompts together; what is accepted of each set is enough."""
    several = acceptance.Acceptance("mt-bench + gsm8k + alpaca", temperature=0.6, top_k=3)
    for name, (recipe, measure_of_set) in several.operands().items():
        kind = measure_of_set.pop("kind")
        params = acceptance.Acceptance(**measure_of_set)
        assert (kind, recipe) == ("acceptance", None)
        assert params == acceptance.Acceptance(name.replace("_", "-"), temperature=0.6, top_k=3)
    assert evaluate(several.quantity, {"mt_bench": 2.0, "gsm8k": 3.0, "alpaca": 10.0}) == 5
    assert acceptance.Acceptance("gsm8k").operands() == {}
    flow = Workflow(scales.load(name="pocket"), stored=True)
    cells = {(c.row, c.col): c for c in flow.cells("subspec", "1") if c.model == "Qwen2.5-7B-Instruct"}
    row = "EAGLE-2 [T=0, 8GB]"
    mean = cells[row, "Mean tau"]
    parts = flow.operands(mean)
    assert [part.params.prompts for part in parts.values()] == ["mt-bench", "humaneval", "gsm8k", "alpaca", "cnn-dm"]
    for part in parts.values():
        assert part.recipe == mean.recipe == "fp16" and part.params.draft == "eagle2"
    stored = [
        measure.measurement_of(flow, cells[row, f"{name} tau"]).value for name in ("MT-Bench", "HumanEval", "GSM8K")
    ]
    three = replace(mean, params=replace(mean.params, prompts="mt-bench + humaneval + gsm8k"))
    assert measure.measurement_of(flow, three).value == pytest.approx(sum(stored) / 3, abs=1e-9)
    faster = flow.operands(cells[row, "Mean speedup"])
    assert faster["a"].params == mean.params and faster["n"].params.draft == "none" and not faster["n"].params.prefetch


def test_a_mean_lacks_what_one_of_its_sets_lacks(monkeypatch):
    monkeypatch.delenv("REPRO_DATA", raising=False)
    assert "alpaca" in acceptance.Acceptance("gsm8k + alpaca").lacking()
    assert not acceptance.Acceptance("gsm8k + mt-bench").lacking()


def test_prompts_are_the_authors_draw_and_hash_into_the_job(job):
    made, result = job
    assert result.series["tokens"].group == "mt-bench, first 2, 12 tokens, T 0"
    assert json.loads(made.inputs)["prompts"] == prompts.identifier("mt-bench")


def test_other_drafts_temperatures_and_sets_are_other_jobs():
    target = Target(scales.load(name="pocket"), "pocket-3m", "fp16")
    all_params = [
        acceptance.Acceptance("mt-bench"),
        acceptance.Acceptance("gsm8k"),
        acceptance.Acceptance("mt-bench", temperature=0.6),
        acceptance.Acceptance("mt-bench", bits=3),
        acceptance.Acceptance("mt-bench", depth=32),
        acceptance.Acceptance("mt-bench", top_k=4),
        acceptance.Acceptance("mt-bench", draft_temperature=1.0),
        acceptance.Acceptance("mt-bench", draft="self"),
        acceptance.Acceptance("mt-bench", draft="small", draft_model="Qwen2.5-1.5B"),
        acceptance.Acceptance("mt-bench", draft="specexec", draft_model="Llama-3.2-1B", budget=64),
        acceptance.Acceptance("mt-bench", draft="specexec", draft_model="Llama-3.2-1B", budget=128),
    ]
    assert len({params.jobs(target)["prompts"].id for params in all_params}) == len(all_params)
    named = acceptance.Acceptance("mt-bench", draft_temperature=0.2)  # the default, in words
    assert named.jobs(target)["prompts"].id == all_params[0].jobs(target)["prompts"].id
    shown = acceptance.Acceptance("mt-bench", show="repeated 4-grams", unit="fraction")
    assert shown.jobs(target)["prompts"].id == all_params[0].jobs(target)["prompts"].id


def test_a_build_measures_the_beginnings_of_the_first_prompts():
    whole = scales.load(name="pocket")
    few = whole.brief().protocols["acceptance"]
    assert (few.prompts, few.tokens) == (3, 64) and whole.protocols["acceptance"].tokens == 256
    shorter = scales.load({"acceptance": {"prompts": 2, "tokens": 9}}, name="pocket").brief().protocols["acceptance"]
    assert (shorter.prompts, shorter.tokens) == (2, 9)
    assert [p.id for p in prompts.load("mt-bench", 3)] == [p.id for p in prompts.load("mt-bench", 40)][:3]


def test_a_repeated_text_is_counted():
    assert acceptance.repeated([1, 2, 3]) == 0
    assert acceptance.repeated(list(range(10))) == 0
    assert acceptance.repeated([1, 2, 3, 4] * 3) == pytest.approx(1 - 4 / 9)


def test_the_less_repetitive_half_leaves_out_what_repeats_most():
    values = {"tokens": [10.0, 20, 30, 40, 50], "iterations": [5.0, 4, 3, 2, 1], "repeated": [0.1, 0.9, 0.2, 0.8, 0.3]}
    result = {"prompts": Observations({k: Series(np.array(v), "items", "g") for k, v in values.items()}, {})}
    half = acceptance.Acceptance("gsm8k", show="less repetitive half").series(result, None)
    assert half["tokens"].values.tolist() == [10, 30, 50] and half["iterations"].values.tolist() == [5, 3, 1]
    whole = acceptance.Acceptance("gsm8k").series(result, None)
    mean = {name: one.values.mean() for name, one in whole.items()}
    assert acceptance.Acceptance("gsm8k").value(mean) == 150 / 15


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prompts": "mtbench"}, "unknown prompt set 'mtbench'"),
        ({"prompts": "gsm8k", "temperature": -1.0}, "temperature is -1"),
        ({"prompts": "gsm8k", "depth": -3}, "depth is -3"),
        ({"prompts": "gsm8k", "draft": "small"}, "draft small needs a draft_model"),
        (
            {"prompts": "gsm8k", "draft_model": "Llama-3.2-1B"},
            "draft subspec is made of the target",
        ),
        ({"prompts": "gsm8k + mtbench"}, "unknown prompt set 'mtbench'"),
        ({"prompts": "gsm8k + gsm8k"}, "prompts 'gsm8k \\+ gsm8k': a set is named twice"),
        ({"prompts": "gsm8k", "draft": "none", "depth": 4}, "draft none has no option 'depth'"),
        (
            {"prompts": "gsm8k", "draft": "none", "draft_temperature": 0.2},
            "draft none has no option 'draft_temperature'",
        ),
        ({"prompts": "gsm8k", "budget": 64}, "draft subspec has no option 'budget'; options: bits, top_k, depth"),
    ],
)
def test_bad_asks_are_one_sentence(options, message):
    with pytest.raises(UserError, match=message):
        acceptance.Acceptance(**options)


def test_a_set_that_is_not_here_says_what_is_missing(monkeypatch):
    monkeypatch.delenv("REPRO_DATA", raising=False)
    assert "REPRO_DATA" in acceptance.Acceptance("alpaca").lacking() and not acceptance.Acceptance("gsm8k").lacking()


def test_the_draft_leaves_the_target_as_it_is(tmp_path):
    """The decoder that verifies is the one that the engine would decode with."""
    lm = LowBitModel(models.load(engines.save("qwen2", tmp_path), "cpu"))
    target = weights.decoder(lm, 64, torch.device("cpu"), torch.float32)
    before = Core("it", target).logits([5, 6, 7])
    draft = draft_of(lm, target, subspec.Config())
    assert torch.equal(Core("it", target).logits([5, 6, 7]), before)
    assert not torch.allclose(Core("it", draft).logits([5, 6, 7]), before, atol=1e-3)


def test_the_declared_inputs_of_a_subspec_draft_are_those_of_the_stored_results():
    target = Target(scales.load(name="pocket"), "pocket-10m", "fp16")
    declared = json.loads(acceptance.Acceptance("gsm8k").jobs(target)["prompts"].inputs)
    assert "draft_model" not in declared and declared["draft"] == vars(subspec.Config())


def test_the_stored_results_stand_where_a_prompt_set_is_not(monkeypatch):
    """Options that came later are no input of the cells that do not set them; a stored length needs no prompts."""
    monkeypatch.delenv("REPRO_DATA", raising=False)
    flow = Workflow(scales.load(name="pocket"), stored=True)
    cells = [c for c in flow.cells("subspec", "1") if c.row.startswith("SubSpec") and c.stand_in and c.measure]
    taus = [c for c in cells if c.measure == "acceptance" and c.col in ("MT-Bench tau", "Alpaca tau", "CNN/DM tau")]
    result = {cell.cell_key: measure.measurement_of(flow, cell) for cell in taus}
    assert {(row[1], one.status) for row, one in result.items()} == {
        ("MT-Bench tau", "ok"),
        ("Alpaca tau", "ok"),
        ("CNN/DM tau", "ok"),
    }


def test_stored_texts_are_the_same_with_every_draft():
    """The share of repeated 4-grams is that of the texts: equal with each draft and without, greedy or drawn."""
    flow = Workflow(scales.load(name="pocket"), stored=True)
    shares = {}
    for cell in flow.cells("subspec", "1"):
        if cell.stand_in and cell.metric == "repeated 4-grams":
            shares.setdefault(cell.params.temperature, []).append(measure.measurement_of(flow, cell).value)
    assert {temperature: len(values) for temperature, values in shares.items()} == {0.0: 4, 0.6: 4}
    assert all(len(set(values)) == 1 for values in shares.values())


def test_a_set_that_is_not_here_is_no_job(monkeypatch):
    monkeypatch.delenv("REPRO_DATA", raising=False)
    flow = Workflow(scales.load(name="pocket"), stored=False)
    rows = [c for c in flow.cells("subspec", "1") if c.stand_in and c.row.startswith("EAGLE-2")]
    cells = [c for c in rows if c.measure == "acceptance"]
    alpaca = [c for c in cells if c.col == "Alpaca tau"]
    assert alpaca
    assert all(map(flow.jobs, alpaca))
    assert not flow.every_job(alpaca)
    assert not measure.missing(flow, alpaca)
    assert flow.every_job([c for c in cells if c.col == "GSM8K tau"])
    assert "REPRO_DATA" in flow.lacking(alpaca[0])


def test_table_1_asks_for_the_papers_draft_in_every_row():
    cells = [c for c in tables.cells("subspec", "1") if c.measure == "acceptance" and c.metric == "accept_length"]
    drafted = [c for c in cells if not c.row.startswith("None")]
    params = {
        (c.row.split()[0], c.params.temperature, c.params.draft, c.params.draft_model, c.params.config) for c in drafted
    }
    assert {c.params.draft for c in cells if c not in drafted} == {"none"}
    small = {
        (name, t, "small", name, drafts.Small(6, 32, 1.0))
        for name, t in product(("Qwen2.5-1.5B", "Llama-3.2-1B", "Qwen2.5-7B"), (0.0, 0.6))
    }
    ours = {("SubSpec", t, "subspec", "", subspec.Config()) for t in (0.0, 0.6)}
    assert params == small | ours | {("EAGLE-2", t, "eagle2", "", eagle.Eagle2(60, 6, 10)) for t in (0.0, 0.6)}
    sets = ["mt-bench", "humaneval", "gsm8k", "alpaca", "cnn-dm"]
    assert {c.params.prompts for c in cells} == {*sets, " + ".join(sets)}


def test_table_4_sweeps_the_budget_and_table_7_the_target():
    four = [c for c in tables.cells("subspec", "4") if c.metric == "accept_length"]
    assert [c.params.config.budget for c in four] == [64, 128, 256, 512, 1024]
    assert {c.params.draft for c in four} == {"specexec"}
    seven = [c for c in tables.cells("subspec", "7") if c.metric == "accept_length"]
    assert [c.recipe for c in seven] == ["fp16", "rtn-w8-g128"]
    six = [c for c in tables.cells("subspec", "6") if c.metric == "accept_length" and c.measure]
    assert {c.params.prompts for c in six} == {"aime24", "math500"}


def test_a_scale_without_the_draft_model_has_no_job():
    target = Target(scales.load(name="pocket"), "pocket-10m", "fp16")
    assert acceptance.Acceptance("gsm8k", draft="small", draft_model="Qwen2.5-3B").jobs(target) is None


@pytest.mark.parametrize("draft", [{"draft": "small"}, {"draft": "specexec", "budget": 12}])
def test_a_job_drafts_with_a_model_of_its_own(tmp_path, draft):
    settings = {"acceptance": {"prompts": 1, "tokens": 6}}
    target = Target(scales.load(settings, name="pocket").on("cpu"), "pocket-5m", "fp16")
    made = acceptance.Acceptance("gsm8k", draft_model="Llama-3.2-1B", **draft).jobs(target)["prompts"]
    assert made.parsed_options()["draft_model"] == "pocket-3m"
    acceptance.Acceptance.run(made, {}, tmp_path, observations.origin(made, {}))
    kept = observations.load(tmp_path / observations.FILE).series
    assert 1 < kept["tokens"].values[0] / kept["iterations"].values[0]


def test_an_8_bit_target_drafts_with_its_own_weights(tmp_path):
    lm = LowBitModel(models.load("pocket-3m", "cpu"))
    rtn.apply(lm, None, rtn.Config(bits=8, group=128))
    target = weights.decoder(lm, 128, torch.device("cpu"), torch.float32)
    draft = draft_of(lm, target, subspec.Config())
    error = (draft.blocks[0].down.weight - target.blocks[0].down.weight).abs().mean()
    assert 0 < error < 0.1 * target.blocks[0].down.weight.abs().mean()


def test_a_model_accepts_more_of_itself_than_of_its_substitutes(tmp_path):
    target = Target(
        scales.load({"acceptance": {"prompts": 1, "tokens": 14}}, name="pocket").on("cpu"), "pocket-3m", "fp16"
    )
    lengths = {}
    for draft in ("self", "subspec"):
        job = acceptance.Acceptance("mt-bench", draft=draft, depth=6, top_k=1, bits=2).jobs(target)["prompts"]
        (tmp_path / draft).mkdir()
        acceptance.Acceptance.run(job, {}, tmp_path / draft, observations.origin(job, {}))
        kept = observations.load(tmp_path / draft / observations.FILE).series
        lengths[draft] = kept["tokens"].values[0] / kept["iterations"].values[0]
    assert lengths["self"] == 15 / 3 > lengths["subspec"]  # the prefill and two whole paths of 6 with their bonus


def test_table_5_asks_for_six_draft_temperatures_of_four_drafts():
    cells = [c for c in tables.cells("subspec", "5") if c.measure == "acceptance"]
    settings = {(c.params.draft, c.params.config.temperature) for c in cells}
    assert settings == set(product(("self", "subspec", "small", "eagle2"), (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)))
    assert {c.params.prompts for c in cells} == {"mt-bench"}


def test_the_command_reads_numbers(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["acceptance", "pocket-3m", "--prompts", "gsm8k", "--temperature"]
    assert main([*words, "warm"]) == 2
    assert "'warm' is not a number of 0 or more" in capsys.readouterr().err
    small = ["--depth", "3", "--top_k", "2", "--config", "acceptance={prompts: 2, tokens: 4}"]
    assert main([*words, "0.5", *small]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("tokens")


def test_intervals_end_at_one_token_and_at_a_whole_path():
    assert acceptance.Acceptance("mt-bench").limits == (1, 49)
    assert acceptance.Acceptance("mt-bench", depth=32).limits == (1, 33)
    assert acceptance.Acceptance("mt-bench", show="repeated 4-grams").limits == (0, 1)
