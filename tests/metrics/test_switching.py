"""The kind of cell of texts under a schedule: known answers, controls of equal bits, thresholds from other prompts."""

import itertools
from dataclasses import asdict, replace

import engines
import numpy as np
import pytest
import torch

from repro import models
from repro.__main__ import main
from repro.core.errors import UserError
from repro.data import prompts, text_scores
from repro.engine import weights
from repro.jobs.target import Target
from repro.methods.flexquant import schedule as plan
from repro.metrics import switching
from repro.metrics.switching import Protocol, Switching
from repro.models.lowbit import LowBitModel
from repro.recipes import precision_schedules
from repro.results import measure
from repro.results.measured import Measured
from repro.specs import scale as scales
from repro.stats.quantity import Quantity, compose
from repro.store import observations
from repro.store.job import built_under, distinct
from repro.store.observations import Observations, Series
from repro.workflow import runner
from repro.workflow.workflow import Workflow

QUICK = "flexquant(window=3, layers=2, prompt_tokens=4)"
LOW = "rtn-w4-g64"
SMALL = Protocol(prompts=4, new_tokens=40, context=120, validation=3, together=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random Llama of two blocks under 4-bit RTN, at a scale of few and short texts."""
    name = engines.save("llama", tmp_path_factory.mktemp("switching"))
    small = scales.load(name="pocket").on("cpu")
    few = replace(small.calibration, sequences=8, length=256)  # what `dns` measures its inputs on
    return Target(replace(small, calibration=few, protocols=small.protocols | {"switching": SMALL}), name, LOW)


@pytest.fixture(scope="module")
def built(target, tmp_path_factory):
    """From a question to the observations of its job, which is run where it was not yet."""
    folder = tmp_path_factory.mktemp("build")

    def observed(params, at=target, need=""):
        with built_under(folder):
            (job,) = params.jobs(at).values()
            job = dict(job.needs)[need] if need else job
            for each in distinct([job]):
                if not runner.done(each):
                    runner.run(each)
            return observations.load(job.folder / observations.FILE).series

    return observed


def times(series, prompt):
    """The steps of a prompt's switches; nothing is stored of none."""
    name = f"log {prompt}"
    return series[name].values.tolist() if name in series else []


def shown(series, params):
    """The value of a cell from its observations."""
    kept = params.series({"texts": observations.Observations(series, {})}, None)
    return params.value({name: one.values.mean() for name, one in kept.items()})


def test_full_precision_agrees_with_itself(built, target):
    series = built(Switching("agreement"), target.under("fp16"))
    for show, value in {"agreement": 100, "prefix": 100, "KL": 0, "bits": 16, "bits with prefill": 16}.items():
        assert series[show].values.tolist() == [value] * 4, show
    assert Switching("agreement").itself == 100 and Switching("KL").reference
    assert {len(series[f"tokens {i}"].values) for i in range(4)} == {40}


def test_a_static_width_has_its_bits_and_differs(built):
    static, switched = built(Switching("agreement")), built(Switching("agreement", schedule=QUICK))
    assert static["bits"].values.tolist() == [4] * 4 and static["switches"].values.tolist() == [0] * 4
    assert (static["KL"].values > 0).all() and (static["prefix"].values < 100).all()
    assert (switched["KL"].values < static["KL"].values).all()


def test_repetitions_are_counted_and_drawn_by_token():
    """Of 30 tokens the last 12 are those of the beginning: 5 of them end eight that were there before."""
    text = [*range(18), *range(12)]
    assert [i for i, again in enumerate(switching.repeated(text)) if again] == [25, 26, 27, 28, 29]
    texts = {f"tokens {i}": Series(np.asarray(one, float), "tokens") for i, one in enumerate((text, list(range(30))))}
    share = switching._curve(texts, "repeated", spread=False)
    assert len(share) == 10 and share[0] == 0 and share[-1] == pytest.approx(100 * 5 / 20 / 2)
    params = Switching("repeated by token")
    assert params.series({"texts": Observations(texts, {})}, None)[params.show].values.tolist() == share.tolist()


def test_what_is_stored_beside_the_codes_counts_as_bits(built, target):
    """One in fifty weights in 16 bits with 16 more for its column, and where each row begins."""
    at = target.under("dns(w4, g64, share=0.02)")
    series, full = built(Switching("bits"), at), built(Switching("bits"), target.under("rtn-w4-g64"))
    beside = series["bits"].values[0] - full["bits"].values[0]
    assert full["bits"].values.tolist() == [4] * 4 and 0.02 * 32 < beside < 0.02 * 32 + 1
    assert series["bits along"].values[0] == series["bits with prefill"].values[0] == series["bits"].values[0]
    assert 0 < series["KL"].values.mean() < full["KL"].values.mean() and series["prefix"].values.max() <= 100


def test_a_schedule_that_never_switches_is_full_precision(built):
    series = built(Switching("agreement", schedule="flexquant(threshold=1.0)"))
    assert series["agreement"].values.tolist() == [100] * 4 and series["KL"].values == pytest.approx([0] * 4, abs=1e-9)
    assert series["bits"].values.tolist() == [16] * 4 and "log 0" not in series


def test_scores_and_bits_are_those_of_the_tokens_and_the_log(built, target):
    params = Switching("agreement", schedule=QUICK)
    series, full = built(params), built(params, target.under("fp16"))
    tokenizer = models.tokenizer(target.model)
    for i in range(4):
        ours, theirs = (list(map(int, one[f"tokens {i}"].values)) for one in (series, full))
        text, reference = (tokenizer.decode(each, skip_special_tokens=True) for each in (ours, theirs))
        assert series["agreement"].values[i] == pytest.approx(text_scores.rouge_l(text, [reference]))
        assert series["prefix"].values[i] == pytest.approx(100 * text_scores.common_prefix(ours, theirs) / 40)
        assert len(times(series, i)) == series["switches"].values[i]
        assert series["KL"].values[i] == pytest.approx(series[f"kl {i}"].values.mean())
    assert max(series["switches"].values) > 4 and min(series["bits"].values) < 14
    assert (series["bits with prefill"].values >= series["bits"].values).all()
    group = {series[name].group for name in ("agreement", "KL", "bits")}
    assert len(group) == 1 and series["KL"].group == full["KL"].group  # paired, prompt by prompt


@pytest.mark.parametrize("control", ["uniform", "random_times", "reversed", "oracle"])
def test_a_control_has_the_mean_bits_of_what_it_stands_against(built, control):
    params, other = Switching("bits", schedule=QUICK), QUICK
    if control in ("reversed", "oracle"):
        other, control = f"flexquant(window=3, layers=2, prompt_tokens=4, order={control})", "other_order"
    measured, controlled = built(params), built(replace(params, control=control, schedule=other))
    for name in ("bits", "bits along"):
        assert controlled[name].values == pytest.approx(measured[name].values, abs=0.35), name
    made = [times(controlled, i) for i in range(4)]
    assert control == "other_order" or made != [times(measured, i) for i in range(4)]
    assert min(itertools.chain.from_iterable(made), default=plan.EARLIEST) >= plan.EARLIEST


def test_a_quantile_of_the_window_means_on_other_prompts_is_the_threshold(built, target):
    params = Switching("threshold", schedule=QUICK, quantile=0.6)
    series = built(params)
    job = dict(params.jobs(target)["texts"].needs)["validation"]
    tested, validated = (
        switching._prompts(one) for one in (job.parsed_options() | {"validating": False}, job.parsed_options())
    )
    assert len(tested) == 4 and len(validated) == 3 and not {p.id for p in tested} & {p.id for p in validated}
    every = prompts.load("longwriter-en", 7)
    assert [p.id for p in tested + validated] == [p.id for p in every]
    means = []
    for name, one in built(params, need="validation").items():
        if name.startswith("PPLE "):
            means += [one.values[i : i + 3].mean() for i in range(1, len(one.values) - 2)]
    assert series["threshold"].values == pytest.approx([np.quantile(means, 0.6)] * 4, rel=1e-6)


def test_references_are_scored_where_a_set_has_them(built, target):
    series = built(Switching("rougeL", prompts="gsm8k", schedule=QUICK))
    assert len(series["rougeL"].values) == 4 and 0 <= shown(series, Switching("bleu")) <= 100
    assert shown(series, Switching("rougeL")) == pytest.approx(series["rougeL"].values.mean())
    assert shown(series, Switching("similarity")) == pytest.approx(series["similarity"].values.mean())
    assert 0 < shown(series, Switching("similarity")) < 100
    assert not Switching("rougeL").series({"texts": observations.Observations(built(Switching("agreement")), {})}, None)


def test_similarity_is_that_of_full_precisions_hidden_states(target):
    """Against Transformers' last hidden states of each text alone; a text of no token has none."""
    lm, tokenizer = LowBitModel(models.load(target.model)), models.tokenizer(target.model)
    full = weights.decoder(lm, 64, torch.device("cpu"), torch.float32)
    text, references = "Once upon a time", ["There was a time", "Once upon"]

    @torch.no_grad()
    def states(words):
        ids = torch.tensor([tokenizer(words)["input_ids"]])
        return lm.model.base_model(ids).last_hidden_state[0].numpy()

    wanted = max(text_scores.matched_f1(states(text), states(one)) for one in references)
    assert switching._similarity(full, tokenizer, text, references) == pytest.approx(wanted, rel=1e-4)
    assert switching._similarity(full, tokenizer, text, [text]) == pytest.approx(100)


def test_jobs_declare_what_decides_them(target):
    """Another schedule, quantile, control or prompt set is another job; full precision has one for all schedules."""
    different = [
        Switching("bits", schedule=QUICK),
        Switching("bits", schedule="flexquant"),
        Switching("bits", schedule=QUICK, quantile=0.5),
        Switching("bits", schedule=QUICK, control="uniform"),
        Switching("bits", prompts="gsm8k", schedule=QUICK),
        Switching("bits"),
    ]
    made = [params.jobs(target)["texts"] for params in different]
    assert len({job.id for job in made}) == len(different)
    full = {params.jobs(target.under("fp16"))["texts"].id for params in different}
    assert len(full) == 2  # a prompt set each
    assert set(dict(made[3].needs)) == {"full", "w8", "w4", "signal"} and set(dict(made[5].needs)) == {"full", "w4"}
    fewer = different[0].jobs(replace_protocol(target, replace(SMALL, prompts=3)))
    assert fewer["texts"].id != made[0].id
    assert different[0].jobs(replace_protocol(target, None)) is None
    assert asdict(SMALL)["prompts"] == 4


def replace_protocol(target, protocol):
    """The target at a scale with another protocol."""
    return replace(target, scale=replace(target.scale, protocols=target.scale.protocols | {"switching": protocol}))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Switching("bits", control="uniform"), "a control or a quantile belongs to a schedule"),
        (lambda: Switching("bits", schedule="flexquant(copies=host)"), "leave copies=host out"),
        (lambda: Switching("bits", schedule="flexquant", quantile=1.0), "quantile is 1.0; it must be a share"),
        (
            lambda: Switching("bits", schedule="flexquant(threshold=2.0)", quantile=0.5),
            "leave threshold out of the schedule",
        ),
        (lambda: Switching("bits", prompts="longwrite"), "unknown prompt set 'longwrite'; did you mean 'longwriter'?"),
        (lambda: Switching("bits", schedule="pmpd"), "unknown precision 'pmpd'"),
        (lambda: Protocol(new_tokens=2048), "a context of 2048 has room for fewer"),
        (lambda: Protocol(together=65), "at most 64 are decoded together"),
    ],
)
def test_what_means_nothing_is_a_sentence(make, message):
    with pytest.raises(UserError) as error:
        make()
    assert message in str(error.value)


def test_a_window_longer_than_the_texts_is_a_sentence(built):
    with pytest.raises(UserError, match="a window of 50 tokens is longer than every validation text"):
        built(Switching("bits", schedule="flexquant(window=50)", quantile=0.5))


def test_a_schedule_is_written_as_it_is_read():
    for text in (QUICK, "flexquant", "flexquant(path=[4, 3], threshold=2.5, order=random, seed=7)"):
        config = precision_schedules.read(text)
        assert precision_schedules.read(precision_schedules.write(config)) == config


def test_run_says_which_package_a_table_lacks(monkeypatch, capsys):
    monkeypatch.setitem(text_scores.PACKAGES, "rougeL", "a_package_that_is_not_here")
    assert main(["run", "flexquant/table2", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "switching/" not in printed.out
    assert "flexquant/table2: not run: " in printed.err and "a_package_that_is_not_here" in printed.err


# --- at chance --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gain, status", [(5.0, "ok"), (0.2, "at_chance"), (-5.0, "at_chance")])
def test_a_quality_cell_is_at_chance_where_full_precision_is_no_better_than_the_fewest_bits(monkeypatch, gain, status):
    """Rows of Table 1 with made-up scores a prompt; agreement, which compares by itself, is never at chance."""
    flow = Workflow(scales.load(name="pocket"))
    scores = np.random.default_rng(0).normal(20, 2, 50)
    of = {"fp16": scores + gain, "gptq-w2-g128-sym": scores + np.random.default_rng(1).normal(0, 1, 50)}

    def made(flow, cell):
        blank = measure._blank(flow, cell)
        if cell.recipe not in of:
            return Measured(cell, blank)
        return Measured(cell, replace(blank, status="ok", value=1.0, source="fresh"), lambda: quantity(cell))

    def quantity(cell):
        assert not cell.params.schedule or cell.recipe == "fp16"
        return Quantity([{"s": observations.Series(of[cell.recipe], "sequences", "g")}], lambda mean: mean["s"])

    monkeypatch.setattr(measure, "_by_itself", made)
    cells = [c for c in flow.cells("flexquant", "1") if c.model == "Vicuna-7B" and c.recipe in of]
    result = {(c.row, c.col): measure.measurement_of(flow, c).status for c in cells}
    for row in ("Baseline-l", "FlexQuant", "FP16 (ours)", "PMPD static, 85 tokens"):
        assert result[row, "CNN/DM Rouge-L"] == result[row, "IWSLT BLEU"] == status
        assert result[row, "agreement, CNN/DM"] == result[row, "CNN/DM Bits"] == "ok"
    del of["fp16"]  # not measured yet: nothing says that it is at chance
    left = next(c for c in cells if (c.row, c.col) == ("FlexQuant", "CNN/DM Rouge-L"))
    assert measure.measurement_of(flow, left).status == "ok"


def test_the_fewest_bits_are_those_of_a_static_row():
    cells = Workflow(scales.load(name="pocket")).cells("flexquant", "1")
    high = next(c for c in cells if (c.row, c.col, c.model) == ("Baseline-h", "CNN/DM Rouge-L", "Vicuna-7B"))
    peers = [c for c in cells if c.cell_key[1:] == high.cell_key[1:]]
    assert Switching.fewest_bits(high, peers).row == "Baseline-l"
    beside = next(c for c in cells if c.col == "KL, CNN/DM")
    assert Switching.fewest_bits(beside, cells) is None


def test_numbers_of_prompts_have_a_paired_interval(built, target):
    """Of a cell, of BLEU over all texts together, and of a difference of two schedules on the same prompts."""
    quantities = {}
    for name, schedule in (("a", QUICK), ("b", "")):
        needs = {"texts": observations.Observations(built(Switching("KL", schedule=schedule)), {})}
        params = Switching("KL", schedule=schedule)
        quantities[name] = Quantity([params.series(needs, target)], lambda mean: mean["KL"], compares=True)
        alone = quantities[name].interval()
        assert alone.lo < alone.value < alone.hi and alone.n == 4
    gap = compose("b - a", quantities).interval()
    assert gap.lo < gap.value < gap.hi
    same = compose("a - c", {"a": quantities["a"], "c": quantities["a"]}).interval()
    assert same.lo == same.hi == 0
