"""Serving as a cell: its one job, a tiny shape on a CPU, what is shown, refusals, and the spec that asks for it."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from repro.core.errors import NotMeasurable, UserError  # noqa: E402
from repro.engine import scheduling  # noqa: E402
from repro.engine.scheduling import LatencyTable, LatencyTarget, Served, StaticBudget  # noqa: E402
from repro.jobs.target import Target  # noqa: E402
from repro.metrics import serving  # noqa: E402
from repro.metrics.serving import Protocol, Serving  # noqa: E402
from repro.results import stored_rows  # noqa: E402
from repro.specs import scale as scales  # noqa: E402
from repro.specs import tables  # noqa: E402
from repro.stats.quantity import Quantity  # noqa: E402
from repro.store.observations import Series  # noqa: E402
from repro.workflow import runner  # noqa: E402
from repro.workflow.workflow import Workflow  # noqa: E402

TINY = dict(
    model_type="llama", hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, vocab_size=300, max_position_embeddings=2048,
)  # fmt: skip
SHAPE = "Llama-2-7B"


def target(device="cpu"):
    return Target(scales.load(name="pocket").on(device), "pocket-3m", "fp16")


def test_one_job_serves_every_cell_of_a_placement():
    ids = {}
    for policy in serving.POLICIES:
        for percent in serving.PERCENTS:
            for params in (Serving(SHAPE, policy, percent), Serving(SHAPE, policy, percent, "late", 16)):
                (job,) = params.jobs(target("cuda")).values()
                ids.setdefault(percent, set()).add(job.id)
    assert [len(of_percent) for of_percent in ids.values()] == [1, 1, 1] and len(set.union(*ids.values())) == 3
    assert runner.alone(job)
    rule = json.loads(job.inputs)
    assert rule["requests"] == 300
    assert rule["rate"] == 16.0
    assert rule["rank"] == 24
    assert rule["rows"] == 64
    assert rule["percent"] == 60 and rule["policies"] == list(serving.POLICIES)


def test_a_seed_draws_other_arrivals_and_nothing_else():
    at = scales.load(name="pocket").on("cuda")
    params = Serving(SHAPE, "static-64", 38)
    jobs = [params.jobs(Target(at, "pocket-3m", "rtn-w4-pc", seed))["served"] for seed in (0, 1, 2)]
    rules = [json.loads(job.inputs) for job in jobs]
    assert [rule.pop("seed") for rule in rules] == [0, 1, 2] and rules[0] == rules[1] == rules[2]
    assert jobs[0].id == "serving/Llama-2-7B/38.5057cf24", "results of before there were seeds are of this job"


def test_the_spec_asks_for_three_seeds_of_arrivals():
    flow = Workflow(scales.load(name="pocket").on("cuda"))
    cell = next(cell for cell in flow.cells("spear", "3") if isinstance(cell.params, Serving))
    assert [target.seed for target in flow.targets(cell)] == [0, 1, 2] and len(flow.jobs(cell)) == 3
    assert stored_rows.declared(flow, cell)["seeds"] == "0 1 2"
    assert flow.targets(replace(cell, measure="", params=None)) == flow.targets(cell)[:1], "its recipe draws nothing"


def test_a_stored_row_of_one_seed_stands_for_it():
    flow = Workflow.of_results(scales.load(name="pocket"))
    cell = next(
        cell for cell in flow.cells("spear", "3") if isinstance(cell.params, Serving) and cell.params.percent == 60
    )
    shown = stored_rows.find(flow, cell).measurement
    assert shown.status == "ok" and shown.seeds in ("0", "0 1 2")


def test_a_p99_has_an_interval_over_seeds_alone():
    flow = Workflow(scales.load(name="pocket").on("cuda"))
    cell = next(cell for cell in flow.cells("spear", "3") if getattr(cell.params, "show", "") == "itl")
    seeds = [{"itl": Series(np.array([value]), "model")} for value in (10.0, 11.0, 12.0)]
    one, three = (flow.of_series(cell, of).interval() for of in (seeds[:1], seeds))
    assert (one.value, one.lo, one.hi) == (10.0, None, None)
    assert three.value == 11.0 and three.covers.endswith("seeds") and three.df == 2
    assert three.hi - 11.0 == pytest.approx(4.302653 / 3**0.5)


class Simulated:
    """A device whose iterations take what a table says, longer with what is in the cache, and 3 % of noise."""

    def __init__(self, table, seed):
        self.table, self.noise, self.seconds = table, np.random.default_rng(1000 + seed), 0.0

    def now(self):
        return self.seconds

    def skip_to(self, seconds):
        self.seconds = seconds

    def __call__(self, batch):
        context = sum(one.prefilled + len(one.times) for one in batch.decodes)
        noisy = self.table(batch.tokens) * (1 + 0.03 * self.noise.standard_normal())
        self.seconds += 1e-3 * max(noisy + 0.4 + 9e-5 * (context - 8000), 3.0)


def test_seeds_cover_what_blocks_of_one_seed_do_not():
    """The P99 and the mean first token of 60 seeds against intervals of every three of them, and of each alone."""
    table = LatencyTable({1: 3.6, 32: 4.4, 64: 5.5, 128: 7.6, 256: 10.4, 384: 13.2, 512: 16.4}, serving.SIZES)
    runs = []
    for seed in range(60):
        options = vars(Protocol()) | {"seed": seed, "shape": SHAPE, "percent": 38}
        requests, _ = serving.workload(options, 0.605, 2)
        device = Simulated(table, seed)
        served = scheduling.serve(requests, scheduling.Scheduler(StaticBudget(128), 64), device, device)
        runs.append(serving.summarized("s", served, table, 0.605, options))
    for show, of_three in (("itl", 0.9), ("ttft", 0.75)):
        truth = np.mean([run[f"s {show}"].values.mean() for run in runs])
        seeds = [{"x": run[f"s {show}"]} for run in runs]
        threes = [seeds[i : i + 3] for i in range(0, 60, 3)]
        assert covered(threes, truth) >= of_three, show
    assert covered([[{"x": run["s ttft"]}] for run in runs], truth) < 0.75


def covered(quantities, truth):
    """The share of intervals that have the truth."""
    intervals = [Quantity(seeds, lambda mean: mean["x"]).interval() for seeds in quantities]
    return np.mean([one.lo <= truth <= one.hi for one in intervals])


def test_a_cpu_has_no_such_times(tmp_path):
    (job,) = Serving(SHAPE, "static-64", 15).jobs(target()).values()
    with pytest.raises(NotMeasurable, match="times of serving need a GPU"):
        Serving.run(job, {}, tmp_path, {})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (("Llama-9", "static-64", 15), "shape"),
        ((SHAPE, "static-65", 15), "policy"),
        ((SHAPE, "static-64", 16), "percent"),
        ((SHAPE, "static-64", 15, "late", 17), "target of late"),
        ((SHAPE, "static-64", 15, "itl", 16), "target of itl"),
    ],
)
def test_what_there_is_not_is_refused(params, message):
    with pytest.raises(UserError, match=message):
        Serving(*params)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"requests": 301}, "multiple of blocks"), ({"decodes": 64}, "below rows"), ({"rate": 0.0}, "rate"),
     ({"blocks": 1}, "blocks")],
)  # fmt: skip
def test_a_protocol_that_means_nothing_is_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        Protocol(**wrong)


def test_a_policy_is_read_from_its_name():
    table = LatencyTable({8: 2.0, 512: 10.0})
    assert serving.policy("static-128", table, 0.5, [8, 512]) == StaticBudget(128)
    made = serving.policy("spear-22", table, 0.5, [8, 512])
    assert isinstance(made, LatencyTarget) and (made.target, made.most, made.joint) == (11.0, 512, False)
    assert serving.policy("spear-16-joint", table, 0.5, [8, 512]) == replace(made, target=8.0, joint=True)


def test_what_is_shown_of_known_times():
    """Four requests in two blocks; a paper's second is half a second here, so that 22 ms are 11."""
    served = Served(
        first=[0.010, 0.030, 0.020, 0.060],
        gaps=[[0.005, 0.012], [0.005], [], [0.007, 0.009, 0.020]],
        iterations=[(1, 0, 0.004), (2, 6, 0.008)],
    )
    options = {"blocks": 2, "requests": 4, "seed": 0, "shape": SHAPE, "percent": 38}
    table = LatencyTable({1: 2.0, 8: 4.0})
    summary = serving.summarized("spear-22 38", served, table, 0.5, options)
    summary["stretch"] = Series(np.array([0.5]), "model")
    assert summary["spear-22 38 ttft"].values.tolist() == [20.0, 40.0]
    assert summary["spear-22 38 late 22"].values.tolist() == [0.5, 0.5], "1 of 3 gaps, and 1 of 3"
    assert summary["spear-22 38 late 16"].values.tolist() == [0.5, 1.0]
    assert summary["spear-22 38 itl"].values[0] == pytest.approx(np.percentile([5, 12, 5, 7, 9, 20], 99))
    assert summary["spear-22 38 predicted"].values[0] == 0.5
    kept = {"served": type("Kept", (), {"series": summary})()}
    values = {}
    for show, printed in (("itl", 0), ("ttft", 0), ("late", 22), ("late", 16), ("stretch", 0), ("predicted", 0)):
        params = Serving(SHAPE, "spear-22", 38, show, printed)
        mean = {name: series.values.mean() for name, series in params.series(kept, target()).items()}
        values[show, printed] = float(params.value(mean))
    assert values["ttft", 0] == 30.0 and values["stretch", 0] == values["predicted", 0] == 0.5
    assert values["late", 22] == pytest.approx(100 * 2 / 6) and values["late", 16] == pytest.approx(100 * 3 / 6)


def test_a_tiny_shape_is_served_under_every_policy(monkeypatch):
    """On a CPU, by the function of the job: the factor that stretches time is of the table, whatever the machine."""
    monkeypatch.setitem(serving.SHAPES, "tiny", TINY)
    protocol = Protocol(requests=6, blocks=3, rows=4, decodes=2, context=8, repeats=1, rate=400.0)
    options = vars(protocol) | {"shape": "tiny", "rank": 3, "sizes": [8, 64, 512], "percent": 60}
    options["policies"] = ["static-64", "spear-22", "spear-16-joint"]
    made = []
    monkeypatch.setattr(serving.arrivals, "lengths", lambda: tuple((n, 3) for n in (5, 90, 30, 11, 70, 2)))
    real = serving.LatencyTable.__init__
    monkeypatch.setattr(
        serving.LatencyTable, "__init__", lambda self, *rest: (real(self, *rest), made.append(self)) and None
    )
    series = serving.measured(options, torch.device("cpu"))
    assert len(made) == 2 and made[0].sizes == [8, 64, 512]
    assert series["stretch"].values[0] == pytest.approx(made[0](256) / 17.2), "of 38 %, whatever is served"
    names = {f"{name} 60" for name in options["policies"]}
    shown = ("itl", "ttft", "gaps", "predicted", "late 22", "late 16")
    assert set(series) == {"stretch"} | {f"{name} {show}" for name, show in itertools.product(names, shown)}
    for name in names:
        assert series[f"{name} gaps"].values.tolist() == [2.0, 2.0, 2.0]
        assert series[f"{name} itl"].values[0] > 0 and (series[f"{name} ttft"].values > 0).all()


def test_the_rate_is_stretched_with_the_targets():
    options = vars(Protocol(requests=20)) | {"seed": 1}
    (slow, prompts), (fast, same) = (serving.workload(options, stretch, 300) for stretch in (1.0, 0.5))
    assert [one.arrival for one in slow] == pytest.approx([2 * one.arrival for one in fast])
    assert prompts == same and all(len(prompts[one.number]) == one.prompt_tokens for one in slow)


def test_the_spec_asks_for_every_printed_cell_once():
    flow = Workflow(scales.load(name="pocket").on("cuda"))
    cells = flow.cells("spear", "3")
    in_spec = [cell.params for cell in cells if isinstance(cell.params, Serving)]
    for metric, show in (("p99_itl_ms", "itl"), ("ttft_ms", "ttft")):
        rows = {cell.row for cell in cells if cell.metric == metric and cell.params.show == show}
        assert len(rows) == 6 + 2
    assert sum(cell.metric in ("p99_itl_ms", "ttft_ms") for cell in cells) == 36 + 12
    every = set(itertools.product(serving.POLICIES, serving.PERCENTS))
    assert {(params.policy, params.percent) for params in in_spec} == every
    assert tables.table("spear", "3").claims[0].claim == "spear C009"
