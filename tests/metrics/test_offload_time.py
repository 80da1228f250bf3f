"""Times of offloading as a cell: its jobs, its arithmetic, a tiny shape on the CPU, tokens a second of a table."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import llama_config

from repro import papers
from repro.core.errors import NotMeasurable, UserError
from repro.engine import budget, drafts, eagle, shapes
from repro.jobs.target import Target
from repro.methods import subspec
from repro.metrics import KINDS, acceptance, offload_time
from repro.metrics.offload_time import OffloadTime
from repro.specs import scale as scales
from repro.specs import tables
from repro.stats.quantity import Quantity, evaluate
from repro.store import observations
from repro.store.observations import Series
from repro.workflow import runner
from repro.workflow.workflow import Workflow

SHAPE = llama_config()
CPU = torch.device("cpu")


@pytest.fixture
def tiny(monkeypatch):
    """A tiny shape."""
    monkeypatch.setitem(shapes.SHAPES, "tiny", SHAPE)


def target(**protocol):
    """A stand-in at scale pocket on the CPU."""
    settings = {"offload_time": protocol} if protocol else {}
    return Target(scales.load(settings, name="pocket").on("cpu"), "pocket-3m", "fp16")


def test_a_job_declares_what_is_timed_and_no_model():
    all_params = [
        OffloadTime("Qwen2.5-7B", "8GiB"),
        OffloadTime("Llama-3.1-8B", "8GiB"),
        OffloadTime("Qwen2.5-7B", "9GiB"),
        OffloadTime("Qwen2.5-7B", "8GiB", depth=32),
        OffloadTime("Qwen2.5-7B", "8GiB", prefetch=False),
        OffloadTime("Qwen2.5-7B", "8GiB", draft="none"),
        OffloadTime("Qwen2.5-7B", "8GiB", draft="alone"),
    ]
    jobs = [params.jobs(target())["times"] for params in all_params]
    assert len({job.id for job in jobs}) == len(all_params)
    declared = json.loads(jobs[0].inputs)
    assert declared["draft"] == vars(subspec.Config()) and declared["memory"] == 2**33 and "model" not in declared
    for same in (
        OffloadTime("Qwen2.5-7B", "8192MiB"),
        OffloadTime("Qwen2.5-7B", "8GiB", show="GB"),
        OffloadTime("Qwen2.5-7B", "8GiB", bus=22),
    ):
        assert same.jobs(target())["times"].id == jobs[0].id
    own = [
        OffloadTime("Qwen2.5-7B", "8GiB", draft="small", draft_model=name) for name in ("Qwen2.5-1.5B", "Llama-3.2-1B")
    ]
    own.append(OffloadTime("Qwen2.5-7B", "8GiB", draft="eagle2"))
    made = [json.loads(params.jobs(target())["times"].inputs) for params in own]
    assert [one["draft_model"] for one in made] == ["Qwen2.5-1.5B", "Llama-3.2-1B", ""]
    assert made[0]["draft"] == vars(drafts.Small()) and made[2]["draft"] == vars(eagle.Eagle2())
    own = [
        OffloadTime("Qwen2.5-7B", "8GiB", draft="specexec", draft_model="Llama-3.2-1B", budget=nodes)
        for nodes in (0, 64, 512)
    ]
    made = [params.jobs(target())["times"] for params in own]
    assert made[0].id == made[2].id != made[1].id
    assert json.loads(made[1].inputs)["draft"] == vars(drafts.SpecExec(budget=64))
    assert json.loads(made[1].inputs)["draft_model"] == "Llama-3.2-1B"


def test_a_job_has_its_gpu_to_itself():
    at = target()
    on_gpu = replace(at, scale=at.scale.on("cuda"))
    params = OffloadTime("Qwen2.5-7B", "8GiB")
    assert runner.alone(params.jobs(on_gpu)["times"])
    assert not runner.alone(params.jobs(at)["times"])
    assert {name for name, kind in KINDS.items() if kind.TIMES} == {
        "decode",
        "offload_time",
        "parallel_decode",
        "serving",
        "shape_decode",
        "timeline",
    }


def test_without_a_gpu_the_result_is_unsupported(tmp_path):
    job = OffloadTime("Qwen2.5-7B", "8GiB").jobs(target())["times"]
    with pytest.raises(NotMeasurable, match="need a GPU") as caught:
        offload_time.OffloadTime.run(job, {}, tmp_path, observations.origin(job, {}))
    assert caught.value.status == "unsupported"


def job_options(params):
    """The options of a small job."""
    return params.jobs(target(context=96, warm=1, timed=3))["times"].parsed_options()


def least(draft, grid=None):
    """A budget that leaves blocks of the tiny shape on the host."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**SHAPE)
    if draft in offload_time.OWN:
        own = drafts.SpecExec(budget=9) if draft == "specexec" else offload_time.OWN[draft](depth=4)
        beside = shapes.own_draft_bytes(config, own, None if draft == "eagle2" else config, 96, torch.float32)
        slots = 96 + own.room
        return str(beside + sum(budget.EngineMemory(config, slots, torch.float32).parts(1).values()))
    config_of_draft = drafts.Whole if draft == "whole" else subspec.Config
    memory = budget.EngineMemory(config, 96, torch.float32, config_of_draft(depth=4), target=grid)
    second = memory.cache_bytes + sum(budget.block_sizes(config, torch.float32)) if draft == "apart" else 0
    return str(sum(memory.parts(1).values()) + second)


DRAFTS = [
    ("subspec", True),
    ("apart", True),
    ("whole", True),
    ("none", False),
    ("alone", False),
    ("small", True),
    ("specexec", True),
    ("eagle2", True),
]


@pytest.mark.parametrize("draft, phases", DRAFTS)
def test_iterations_and_phases_are_timed(tiny, draft, phases):
    torch.manual_seed(0)  # no draft is accepted, so that a token is an iteration
    tree = {"budget": 9} if draft == "specexec" else {"depth": 4}
    params = OffloadTime(
        "tiny", least(draft), draft=draft, draft_model="tiny" if draft in offload_time.MODELS else "", **tree
    )
    result = offload_time.times(job_options(params), CPU, torch.float32)
    assert len(result["iteration"]) == 3 and min(result["iteration"]) > 0
    if draft == "alone":
        assert set(result) == {"iteration"}
        return
    assert len(result["verify"]) == 3 and result["streamed"][0] > 0 and result["streamed"][0] % result["block"][0] == 0
    assert (len(result["draft"]) == 3 and min(result["draft"]) > 0) if phases else result["draft"] == [0.0]
    if draft == "specexec":
        assert result["passes"] == [2, 2, 2]  # the root, then the best of its children, which have no better ones
    elif phases:
        assert result["passes"] == [4, 4, 4]


def test_the_last_token_of_a_model_without_a_draft_is_no_step(tiny, monkeypatch):
    """Its step was launched with the token before, and was over where copies block the host: it has no time left."""
    tokens = []

    def of_known_seconds(engine, new):
        tokens.append(new)
        seconds = [0.5, *(0.1 + 0.01 * i for i in range(new - 2)), 0.0001]
        return SimpleNamespace(seconds=seconds, draft_s=seconds, verify_s=seconds, passes=[4] * new)

    monkeypatch.setattr(offload_time, "timed", of_known_seconds)
    options = job_options(OffloadTime("tiny", least("none"), draft="none", prefetch=False))
    plain = offload_time.times(options, CPU, torch.float32)
    assert tokens == [5] and plain["iteration"] == plain["verify"] == pytest.approx([0.1, 0.11, 0.12])
    drafted = offload_time.times(job_options(OffloadTime("tiny", least("subspec"), depth=4)), CPU, torch.float32)
    assert tokens[1:] == [4, 4] and drafted["iteration"] == pytest.approx([0.1, 0.11, 0.0001])


def test_an_8_bit_target_streams_fewer_bytes(tiny):
    """Codes of a byte, and a scale and a zero point of 16 bits for 128 of them; float32 has four bytes a weight."""
    torch.manual_seed(0)
    result = {}
    for bits in (16, 8):
        memory = least("subspec", offload_time.EIGHT if bits == 8 else None)
        params = OffloadTime("tiny", memory, depth=4, target_bits=bits)
        result[bits] = offload_time.times(job_options(params), CPU, torch.float32)
        assert len(result[bits]["iteration"]) == 3
    assert result[8]["block"][0] == pytest.approx(result[16]["block"][0] / 4 * (1 + 4 / 128))
    assert 0 < result[8]["streamed"][0] < result[16]["streamed"][0] / 2


def test_where_nothing_streams_subspec_has_no_draft(tiny):
    """A small model drafts all the same."""
    with pytest.raises(
        NotMeasurable, match="hold all of tiny: no block has a substitute, so that SubSpec's draft is the"
    ):
        offload_time.times(job_options(OffloadTime("tiny", "1GiB", draft="subspec", depth=4)), CPU, torch.float32)
    torch.manual_seed(0)
    params = OffloadTime("tiny", "1GiB", draft="small", draft_model="tiny", depth=4)
    result = offload_time.times(job_options(params), CPU, torch.float32)
    assert result["streamed"] == [0.0] and len(result["iteration"]) == 3


def test_a_whole_draft_has_a_substitute_of_every_block_also_where_nothing_streams(tiny):
    """Figure 2b: the target is on the device, and its draft is not the target; they share the cache and the rest."""
    torch.manual_seed(0)
    options = job_options(OffloadTime("tiny", "1GiB", draft="whole", depth=4))
    result = offload_time.times(options, CPU, torch.float32)
    assert result["streamed"] == [0.0] and result["passes"] == [4, 4, 4] and min(result["draft"]) > 0
    engine, plan = offload_time.engine_of(options, CPU, torch.float32)
    assert plan.resident == (0, 1, 2, 3) and engine.draft == drafts.Whole(depth=4)
    for own, target_block in zip(engine._drafting.blocks, engine.model.blocks):
        for product in ("qkv", "out", "gate_up", "down"):
            assert getattr(own, product) is not getattr(target_block, product)
        assert own.input_norm is target_block.input_norm
    assert engine._drafters[0.2].cache is engine.cache and engine._drafting.embedding is engine.model.embedding
    declared = json.loads(OffloadTime("Qwen2.5-7B", "40GiB", draft="whole", depth=32).jobs(target())["times"].inputs)
    assert declared["of"] == "whole" and declared["draft"] == vars(subspec.Config(depth=32))


def test_a_whole_draft_takes_memory_for_every_block_and_part_of_them_may_stream(tiny):
    from transformers import AutoConfig

    config = AutoConfig.for_model(**SHAPE)
    whole, usual = (
        budget.EngineMemory(config, 96, torch.bfloat16, of(depth=4)) for of in (drafts.Whole, subspec.Config)
    )
    one = budget.substitute_bytes(config, subspec.Config())
    for resident in range(5):
        assert whole.parts(resident)["draft"] == 4 * one and usual.parts(resident)["draft"] == (4 - resident) * one
        lasting = sum(whole.lasting_sizes(resident)) - sum(usual.lasting_sizes(resident))
        assert lasting == resident * one
    engine, plan = offload_time.engine_of(
        job_options(OffloadTime("tiny", least("whole"), draft="whole", depth=4)), CPU, torch.float32
    )
    assert 0 < len(plan.resident) < 4
    assert not any(own.down is it.down for own, it in zip(engine._drafting.blocks, engine.model.blocks))


def test_a_row_without_a_draft_is_a_time_of_its_shape_and_needs_no_stand_in():
    """SubSpec's Tables 1 and 6: synchronous copies at the model's own shape under its limit; no other row is that."""
    flow = Workflow(scales.load(name="pocket").on("cuda"), stored=False)
    shapes = {"Llama-3.1-8B-Instruct": "Llama-3.1-8B", "DeepSeek-R1-Distill-Qwen-14B": "Qwen2.5-14B"}
    shapes["QwQ-32B"] = "Qwen2.5-32B"
    limits = {"Llama-3.1-8B": "8GiB", "Qwen2.5-14B": "12GiB", "Qwen2.5-32B": "24GiB"}
    seen = set()
    for cell in [*flow.cells("subspec", "1"), *flow.cells("subspec", "6")]:
        if cell.model not in shapes or cell.metric != "tokens_per_s" or not cell.measure:
            continue
        if not cell.row.startswith("None"):
            assert not cell.stand_in and not flow.jobs(cell), cell.row
            continue
        shape = shapes[cell.model]
        timed = OffloadTime(shape, limits[shape], draft="none", prefetch=False)
        assert {name: part.params for name, part in flow.operands(cell).items()} == {"t": timed}
        assert evaluate(cell.params.quantity, {"t": 250.0}) == 4
        assert cell.stand_in == f"shape/{shape}" and flow.grade(cell) == "B" and flow.jobs(cell)
        seen.add((cell.model, cell.row, cell.col))
    assert len(seen) == 2 * 6 + 2 + 2


def test_figure_2b_draws_subspec_with_substitutes_of_every_block():
    flow = Workflow(scales.load(name="pocket").on("cpu"))
    points = [cell for cell in flow.cells("subspec", "2b", "figure") if cell.row == "SubSpec"]
    assert len(points) == 6
    for point in points:
        parts = {name: part.params for name, part in flow.operands(point).items()}
        assert (parts["a"].draft, parts["t"].draft, parts["n"].draft) == ("subspec", "whole", "none")
        assert vars(parts["t"].config) == vars(parts["a"].config) and parts["t"].memory == "40GiB"


def kept(**values):
    """Observations of a job."""
    series = {name: Series(np.asarray(each, dtype=float), "items", "g") for name, each in values.items()}
    return {"times": observations.Observations(series, {})}


def value(params, **values):
    """The value of an ask from observations."""
    result = params.series(kept(**values), target())
    return params.value({name: one.values.mean() for name, one in result.items()})


MEASURED = {
    "iteration": [0.3, 0.5], "draft": [0.1, 0.1], "verify": [0.3, 0.3], "streamed": [11e9], "block": [1e9],
    "bus": [50e9], "peak": [8e9], "passes": [4, 6],
}  # fmt: skip


def test_what_is_shown_of_known_times():
    def shown(show, **more):
        return value(OffloadTime("Qwen2.5-7B", "8GiB", show=show, **more), **MEASURED)

    assert shown("ms an iteration") == pytest.approx(400)
    assert shown("ms drafting") == pytest.approx(100) and shown("ms verifying") == pytest.approx(300)
    assert shown("share drafting") == pytest.approx(0.25) and shown("GB") == pytest.approx(8)
    assert shown("ms a draft pass") == pytest.approx(100 / 5)


def test_another_rate_of_the_bus_moves_what_is_waited_for():
    """10 of 11 GB are waited for: 0.2 s at 50 GB/s, 0.5 s at 20."""
    assert value(OffloadTime("Qwen2.5-7B", "8GiB", bus=50), **MEASURED) == pytest.approx(400)
    assert value(OffloadTime("Qwen2.5-7B", "8GiB", bus=20), **MEASURED) == pytest.approx(700)
    plain = value(OffloadTime("Qwen2.5-7B", "8GiB", draft="none", bus=20), **MEASURED)  # and all 11 without a draft
    assert plain == pytest.approx(400 + 11 / 20 * 1e3 - 11 / 50 * 1e3)


@pytest.mark.parametrize(
    "how, ends", [({"bus": 20.0}, True), ({"show": "GB"}, False), ({"show": "share drafting"}, True)]
)
def test_what_a_run_says_once_has_no_spread(how, ends):
    """The interval is that of the iterations; peak memory has none."""
    result = OffloadTime("Qwen2.5-7B", "8GiB", **how).series(kept(**MEASURED | {"verify": [0.3, 0.4]}), target())
    interval = Quantity([result], lambda mean: OffloadTime("Qwen2.5-7B", "8GiB", **how).value(mean)).interval()
    assert math.isfinite(interval.value) and (interval.lo is not None and interval.lo < interval.value) is ends


def test_a_table_on_the_tiny_model_has_tokens_a_second_from_lengths_and_times(tiny, tmp_path, monkeypatch):
    """Table 2's last rows from their jobs to the page's numbers, with a tiny shape's times."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(acceptance.prompts, "load", lambda name, count, real=acceptance.prompts.load: real(name, 1))
    budgets = {"acceptance": {"prompts": 1, "tokens": 4}, "offload_time": {"context": 96, "warm": 1, "timed": 2}}
    at = scales.load({**budgets, "models": {"Qwen2.5-7B-Instruct": "pocket-3m"}}, name="pocket").on("cpu")
    flow = Workflow(at)
    flow.stored_only = False
    cells = [c for c in flow.cells("subspec", "2") if c.row == "+ Async data transfer"]
    seconds = {"subspec": [0.5, 0.3], "none": [0.1, 0.1]}

    def times(options, device, dtype):
        iteration = seconds["subspec" if options["draft"] else "none"]
        return {"iteration": iteration, "draft": iteration, "verify": iteration, "peak": [1.0]}

    monkeypatch.setattr(offload_time, "times", times)
    monkeypatch.setattr(offload_time, "refuse_without_gpu", lambda device: None)
    for job in flow.every_job(cells):
        job.folder.mkdir(parents=True, exist_ok=True)
        if job.kind in ("acceptance", "offload_time"):
            KINDS[job.kind].run(job, {}, job.folder, observations.origin(job, {}))
    result = {c.metric: flow.quantity(c) for c in cells}
    assert None not in result.values() and set(result) == {"accept_length", "tokens_per_s", "speedup"}
    lengths = _value(result["accept_length"])
    assert _value(result["tokens_per_s"]) == pytest.approx(lengths / 0.4)
    assert _value(result["speedup"]) == pytest.approx(lengths * 0.1 / 0.4)


def test_specexec_takes_a_verification_and_the_passes_of_the_stand_in():
    """Table 4's arithmetic, and where its operands come from."""
    flow = Workflow(scales.load(name="pocket").on("cpu"))
    cells = {(c.row, c.col): c for c in flow.cells("subspec", "4")}
    cell = cells["SpecExec budget 256", "tokens/s"]
    assert evaluate(cell.params.quantity, {"a": 6.0, "n": 10.0, "v": 200.0, "p": 4.0}) == pytest.approx(6 / 0.24)
    parts = {name: part.params for name, part in flow.operands(cell).items()}
    assert parts["a"].config == parts["n"].config == drafts.SpecExec(budget=256)
    timed = OffloadTime(
        "Llama-3.1-8B", "8GiB", draft="specexec", draft_model="Llama-3.2-1B", budget=256, show="ms verifying"
    )
    assert parts["v"] == timed and parts["p"] == replace(timed, show="ms a draft pass")
    assert parts["n"].show == "draft passes"
    assert cells["SpecExec budget 256", "VRAM (GB)"].params == replace(timed, show="GB", unit="GB")


@pytest.mark.parametrize("slope, off", [(3.0, 0.0), (2.0, 0.1)])
def test_the_time_model_is_the_least_squares_line_of_three_depths(slope, off):
    """The spec's arithmetic against numpy's fit; a depth that is not on the line lies off it by as much."""
    flow = Workflow(scales.load(name="pocket").on("cpu"))
    ratios = {c.col: c for c in flow.cells("subspec", "depths") if c.metric == "model over measured"}
    rng = np.random.default_rng(0)
    ms = {depth: 200 + slope * depth + rng.normal() for depth in (4, 16, 48)}
    line = np.polynomial.Polynomial.fit(list(ms), list(ms.values()), 1)
    for depth in (8, 32, 64):
        took = line(depth) * (1 + off)
        cell = ratios[f"depth {depth}"]
        result = evaluate(cell.params.quantity, {"a": ms[4], "b": ms[16], "c": ms[48], "t": took})
        assert result == pytest.approx(1 / (1 + off))
        parts = flow.operands(cell)
        assert [parts[name].params.config.depth for name in "abct"] == [4, 16, 48, depth]


def test_targets_without_a_stand_in_have_the_papers_lengths_and_our_iterations():
    flow = Workflow(scales.load(name="pocket").on("cpu"))
    cells = {(c.row, c.col, c.metric): c for c in flow.cells("subspec", "printed")}
    cell = cells["SubSpec, Qwen2.5-14B-Instruct", "T 0.6, set GSM8K", "tokens/s"]
    printed = papers.printed("subspec", "1")
    (tau,) = [
        c.number
        for c in printed
        if (c.row, c.col, c.model) == ("SubSpec [T=0.6, 12GB]", "GSM8K tau", "Qwen2.5-14B-Instruct")
    ]
    assert evaluate(cell.params.quantity, {"t": 800.0}) == pytest.approx(1000 * tau / 800)
    greedy = {}
    for target in ("Llama-3.1-8B-Instruct", "Qwen2.5-7B-Instruct"):  # rows of one label in the paper
        one = cells[f"SubSpec, {target}", "T 0, set MT-Bench", "tokens/s"]
        greedy[target] = evaluate(one.params.quantity, {"t": 1000.0})
    assert greedy == pytest.approx({"Llama-3.1-8B-Instruct": 28.35, "Qwen2.5-7B-Instruct": 27.08})
    timed = {name: part.params for name, part in flow.operands(cell).items()}
    assert timed == {"t": OffloadTime("Qwen2.5-14B", "12GiB")} and len(cells) == 4 * 10 * 2
    over = flow.operands(cells["SubSpec, Qwen2.5-32B-Instruct", "T 0, set MT-Bench", "speedup"])["n"].params
    assert over == OffloadTime("Qwen2.5-32B", "24GiB", draft="none", prefetch=False)


def test_a_number_that_was_not_printed_is_one_sentence():
    for key in ("1 | SubSpec [T=0, 8GB] | MT-Bench tau | Qwen2.5-9B", "1 | SubSpec"):
        with pytest.raises(UserError, match="subspec has no number at"):
            tables._number("subspec", key, "it")


def _value(quantity):
    """The value of a quantity of one seed."""
    mean = {name: one.values.mean() for name, one in quantity.seeds[0].items()}
    return quantity.value(mean)


@pytest.mark.parametrize(
    "words, message",
    [
        ({"shape": "Qwen-9B"}, "unknown shape 'Qwen-9B'"),
        ({"memory": "8 cats"}, "write an amount such as 8GiB"),
        ({"bus": -1.0}, "bus is -1"),
        ({"depth": -2}, "depth is -2"),
        ({"draft": "small"}, "draft small needs a draft_model"),
        ({"draft": "specexec"}, "draft specexec needs a draft_model"),
        ({"draft": "specexec", "draft_model": "Llama-3.2-1B", "depth": 4}, "draft specexec has no depth"),
        ({"budget": 64}, "draft subspec has no budget"),
        ({"draft": "eagle2", "target_bits": 8}, "draft eagle2 is timed with a target of 16 bits alone"),
        ({"draft": "small", "draft_model": "Qwen"}, "unknown shape .Qwen."),
    ],
)
def test_bad_asks_are_one_sentence(words, message):
    with pytest.raises(UserError, match=message):
        OffloadTime(**{"shape": "Qwen2.5-7B", "memory": "8GiB"} | words)


def test_intervals_end_where_values_can():
    assert OffloadTime("Qwen2.5-7B", "8GiB").limits == (0, math.inf)
    assert OffloadTime("Qwen2.5-7B", "8GiB", show="share drafting").limits == (0, 1)
