"""Steps under tensor parallelism as a cell: its job, a tiny shape on ranks of a CPU, refusals, the specs that ask."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from repro.core.errors import NotMeasurable, UserError  # noqa: E402
from repro.engine import ranks  # noqa: E402
from repro.jobs.target import Target  # noqa: E402
from repro.metrics import parallel_decode  # noqa: E402
from repro.metrics.parallel_decode import HOW, ParallelDecode  # noqa: E402
from repro.results import measure  # noqa: E402
from repro.specs import figures, tables  # noqa: E402
from repro.specs import scale as scales  # noqa: E402
from repro.store import accepted, job, observations  # noqa: E402
from repro.verdicts import table_results  # noqa: E402
from repro.workflow.workflow import Workflow  # noqa: E402

TINY = dict(
    model_type="llama", hidden_size=256, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, vocab_size=300, max_position_embeddings=128,
)  # fmt: skip
CPU_WAYS = ("bf16", "w4", "naive", "w4-launched", "naive-launched")


def target(device="cpu"):
    return Target(scales.load(name="pocket").on(device), "shape/Llama-2-7B", "fp16")


def test_a_job_is_of_a_shape_at_a_degree_in_every_way():
    """So that a machine of two GPUs gives the cells of two ranks."""
    (made,) = ParallelDecode("Llama-2-13B", 2, "spear").jobs(target("cuda")).values()
    (same,) = ParallelDecode("Llama-2-13B", 2, "bf16").jobs(target("cuda")).values()
    (wider,) = ParallelDecode("Llama-2-13B", 4, "spear").jobs(target("cuda")).values()
    (other,) = ParallelDecode("Llama-2-7B", 2, "spear").jobs(target("cuda")).values()
    assert made.id == same.id
    assert len({made.id, wider.id, other.id}) == 3
    rule = json.loads(made.inputs)
    assert rule["degrees"] == [2] and rule["recipes"].keys() == HOW.keys()
    assert rule["recipes"]["spear"] == "rtn-w4-pc + spear(placement=random, k_share=0.4, rank=26)"
    assert (rule["prompt"], rule["new"], rule["rounds"]) == (128, 64, 3)
    assert (rule["launched"], rule["launched_rounds"]) == (8, 8)


def test_the_rank_of_70b_is_that_of_table_2_s_bytes():
    """148 MB of compensators on 40 % of the layers; Table 8 has no 70B."""
    from repro.methods.spear.compensator import stored_bytes

    wide, narrow, ffn = 8192, 1024, 28672
    shapes = [(wide, wide), (narrow, wide), (narrow, wide), (wide, wide), (ffn, wide), (ffn, wide), (wide, ffn)]
    share, rank = parallel_decode.PLACED["Llama-2-70B"]
    sizes = {r: share * 80 * stored_bytes(r, shapes, 4) / 1e6 for r in (rank - 2, rank, rank + 2)}
    assert min(sizes, key=lambda r: abs(sizes[r] - 148)) == rank


@pytest.mark.parametrize(
    "shape, degree, how, message",
    [("Llama-3.2-1B", 2, "w4", "unknown shape of parallel_decode"), ("Llama-2-7B", 5, "w4", "unknown number of ranks"),
     ("Llama-2-7B", 2, "spaer", "did you mean 'spear'")],
)  # fmt: skip
def test_what_there_is_not_is_refused(shape, degree, how, message):
    with pytest.raises(UserError, match=message):
        ParallelDecode(shape, degree, how)


def test_it_needs_a_gpu_for_each_rank(tmp_path, monkeypatch):
    (made,) = ParallelDecode("Llama-2-7B", 2, "w4").jobs(target()).values()
    with pytest.raises(NotMeasurable, match="times of shapes need a GPU"):
        ParallelDecode.run(made, {}, tmp_path, {})
    (made,) = ParallelDecode("Llama-2-7B", 4, "w4").jobs(target("cuda")).values()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(NotMeasurable, match="over 4 ranks needs 4 GPUs, and 2 can be seen here"):
        ParallelDecode.run(made, {}, tmp_path, {})


def test_rounds_of_all_ways_are_kept(tmp_path, monkeypatch):
    (made,) = ParallelDecode("Llama-2-7B", 3, "naive").jobs(target("cuda")).values()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    rounds = {parallel_decode.series_name(3, how): [3.0, 9.0] for how in HOW}
    monkeypatch.setattr(ranks, "run", lambda work, options, count, device: rounds if count == 3 else {})
    origin = dict.fromkeys(observations.ORIGIN, "{}")
    ParallelDecode.run(made, {}, tmp_path, origin)
    kept = {"rounds": observations.load(tmp_path / observations.FILE)}
    params = ParallelDecode("Llama-2-7B", 3, "naive")
    series = params.series(kept, target())
    assert series["ms"].values.tolist() == [3.0, 9.0] and params.value({"ms": 6.0}) == 6.0
    assert series["ms"].axis == "items" and series["ms"].group == "Llama-2-7B, 64 tokens after 128"
    launched = ParallelDecode("Llama-2-7B", 3, "fused-launched").series(kept, target())
    assert launched["ms"].group == "Llama-2-7B, 8 tokens after 128", "rounds of other numbers are not paired"


def on_a_rank(options, device):
    """A tiny shape in the ways that run on a CPU."""
    parallel_decode.SHAPES["tiny"] = TINY
    parallel_decode.HOW = {how: HOW[how] for how in CPU_WAYS}
    return parallel_decode.times(options, device)


def test_a_tiny_shape_is_timed_on_two_ranks(monkeypatch):
    """In processes of their own, at degrees of which one leaves a rank out."""
    monkeypatch.setenv("PYTHONPATH", str(__import__("pathlib").Path(__file__).parent))
    recipes = {how: "fp16" if how == "bf16" else "rtn-w4-pc" for how in HOW}
    options = {"shape": "tiny", "degrees": [1, 2], "recipes": recipes, "prompt": 5, "new": 3, "rounds": 2}
    options |= {"launched": 2, "launched_rounds": 3}
    times = ranks.run(on_a_rank, options, 2, "cpu")
    assert times.keys() == {f"tp{degree} {how}" for degree, how in itertools.product((1, 2), CPU_WAYS)}
    for name, values in times.items():
        assert len(values) == (3 if "launched" in name else 2) and min(values) > 0


def test_launched_ways_are_timed_in_turns():
    """So that within a round all of them meet the same pace of the host; the first round is dropped."""
    calls = []

    class Timed:
        def __init__(self, how):
            self.how = how

        def time(self, prompt, new):
            calls.append((self.how, prompt, new))
            return SimpleNamespace(ms_p50=float(len(calls)))

    options = {"prompt": 5, "launched": 2, "launched_rounds": 2}
    times = parallel_decode.interleaved([("a", Timed("a")), ("b", Timed("b"))], options)
    assert calls == [("a", 5, 2), ("b", 5, 2)] * 3
    assert times == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_a_way_without_a_head_reads_none(monkeypatch):
    """What the others take longer is the head's, the choice included."""
    monkeypatch.setitem(parallel_decode.SHAPES, "Llama-2-7B", TINY)
    link = SimpleNamespace(rank=1, ranks=2, add=lambda x: x, largest=lambda words: words)
    monkeypatch.setattr(parallel_decode, "HOW", {"w4": ("fp16", "plain", False), "none": ("fp16", "plain", False)})
    monkeypatch.setattr(parallel_decode, "HEADLESS", ("none",))
    model = parallel_decode.rank_decoder("Llama-2-7B", "fp16", 1, 2, 12, torch.device("cpu"))
    other = parallel_decode.rank_decoder("Llama-2-7B", "fp16", 0, 2, 12, torch.device("cpu"))
    assert model.head.weight.shape == (160, 256), "half of 300 tokens, padded to a multiple of 16"
    assert not torch.equal(model.head.weight, other.head.weight) and not model.head.weight[140:].any()
    assert torch.equal(model.embedding, other.embedding) and len(model.embedding) == 300
    engines = {how: parallel_decode.engine_of("Llama-2-7B", how, model, link) for how in parallel_decode.HOW}
    assert engines["w4"].stats.read_bytes - engines["none"].stats.read_bytes == 160 * 256 * 4
    assert engines["none"].time(5, 3).ms_p50 > 0
    assert engines["none"].model.head.greedy(torch.ones(3, 4)).tolist() == [0, 0, 0]


def test_table_5_and_figure_9_ask_for_every_way():
    cells = tables.cells("spear", "5")
    assert {(c.params.shape, c.params.ranks, c.params.how) for c in cells} == {
        (c.model, int(c.col[3]), c.params.how) for c in cells
    }
    assert len(cells) == 9 * len(HOW) and {c.params.how for c in cells} == HOW.keys()
    assert sum(bool(cell.printed) for cell in cells) == 36 and not any(c.printed for c in cells if "launched" in c.row)
    flow = Workflow(scales.load(name="pocket").on("cuda"), stored=False)
    jobs = {job.id for job in flow.every_job(flow.cells("spear", "5"))}
    drawn = {job.id for job in flow.every_job(flow.cells("spear", "9", "figure"))}
    assert len(jobs) == 9
    assert len(drawn) == 6
    assert drawn < jobs
    assert len(figures.cells("spear", "9")) == 30


def test_a_shape_needs_no_stand_in_and_is_of_grade_b(tmp_path, monkeypatch):
    monkeypatch.setattr(accepted, "RESULTS", tmp_path)
    monkeypatch.setattr(job, "BUILD", tmp_path)
    flow = Workflow(scales.load(name="pocket").on("cuda"), stored=False)
    cells = {cell.model: cell for cell in flow.cells("spear", "5")}
    assert {model: cell.stand_in for model, cell in cells.items()} == {m: f"shape/{m}" for m in parallel_decode.PLACED}
    assert all(flow.is_measured(cell) and flow.grade(cell) == "B" for cell in cells.values())
    assert flow.grade(flow.cells("spear", "4")[0]) == "C"
    for cell in cells.values():
        one = measure.measurement_of(flow, cell)
        assert one.status == "not_run" and one.stand_in == cell.stand_in


def test_claims_name_cells_that_there_are():
    """All of them but those on rows of our own can be judged by the printed numbers, too."""
    flow = Workflow(scales.load(name="pocket"), stored=True)
    own = {}
    for claim in tables.table("spear", "5").claims:
        judged = table_results.judge(flow, claim)
        own[claim.says] = judged.own_numbers
        assert judged.cases
    assert len(own) == 7
