"""Steps of public shapes as a cell: its job, a tiny shape by its function, its refusals, the specs that ask for it."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from repro.core.errors import NotMeasurable, UserError  # noqa: E402
from repro.engine import q4_k, random_shape, two_bit, weights  # noqa: E402
from repro.generation import engine  # noqa: E402
from repro.jobs.target import Target  # noqa: E402
from repro.metrics import shape_decode  # noqa: E402
from repro.metrics.shape_decode import AS_TRAINED, AT_LENGTHS, HOW, ShapeDecode  # noqa: E402
from repro.recipes.recipe import parse  # noqa: E402
from repro.specs import figures, tables  # noqa: E402
from repro.specs import scale as scales  # noqa: E402
from repro.store.observations import Series  # noqa: E402
from repro.verdicts import table_results  # noqa: E402
from repro.workflow.workflow import Workflow  # noqa: E402

TINY = dict(
    model_type="llama", hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=300, max_position_embeddings=128,
)  # fmt: skip


def target(device="cpu"):
    return Target(scales.load(name="pocket").on(device), "pocket-3m", "fp16")


def test_a_job_is_of_the_shape_and_the_way_alone():
    (made,) = ShapeDecode("Llama-2-7B", "s50-masked").jobs(target("cuda")).values()
    rule = json.loads(made.inputs)
    assert rule == {
        "shape": "Llama-2-7B", "recipe": "q4_k(layout=zigzag) + spqt(sparsity=0.5)", "method": "masked",
        "device": "cuda", "prompt": 128, "new": 64, "rounds": 5,
    }  # fmt: skip
    (other,) = ShapeDecode("Llama-2-7B", "s50", show="ms").jobs(target("cuda")).values()
    (same,) = ShapeDecode("Llama-2-7B", "s50").jobs(target("cuda")).values()
    assert other.id == same.id != made.id


def test_a_cpu_has_no_such_times(tmp_path):
    (made,) = ShapeDecode("Llama-2-7B", "rows").jobs(target()).values()
    with pytest.raises(NotMeasurable, match="need a GPU"):
        shape_decode.ShapeDecode.run(made, {}, tmp_path, {})


@pytest.mark.parametrize(("shape", "how", "message"), [("Llama-9", "rows", "shape"), ("Llama-2-7B", "s51", "s50")])
def test_what_there_is_not_is_refused(shape, how, message):
    with pytest.raises(UserError, match=message):
        ShapeDecode(shape, how)


@pytest.mark.parametrize("how", ["s50", "s50-masked", "s50-naive"])
def test_a_way_skips_inputs_by_its_kernel(monkeypatch, how):
    monkeypatch.setitem(engine.SHAPES, "tiny", TINY)
    monkeypatch.setattr(weights, "runs_q4_k", lambda device, dtype: True)
    kernel = {"s50": "zigzag_sparse", "s50-masked": "zigzag_masked", "s50-naive": "q4_k_naive_sparse"}[how]
    used, real = [], getattr(q4_k, kernel)
    monkeypatch.setattr(q4_k, kernel, lambda *arguments: used.append(1) or real(*arguments))
    core = shape_decode.loaded("tiny", *HOW[how], 9, torch.device("cpu"))
    assert core.time(3, 3).new_tokens == 3 and len(used) >= 4 * 2


def test_values_are_of_the_mean_step():
    kept = {"rounds": type("Kept", (), {"series": {"ms": Series(np.array([4.0, 4.0]), "items", "g")}})()}
    assert list(ShapeDecode("Llama-2-7B", "rows").series(kept, target())) == ["ms"]
    assert ShapeDecode("Llama-2-7B", "rows").value({"ms": 4.0}) == 250
    assert ShapeDecode("Llama-2-7B", "rows", show="ms").value({"ms": 4.0}) == 4


def test_ways_behind_several_prompts_are_one_job_of_all_lengths():
    (made,) = ShapeDecode("Llama-3-8B", "w2a2", length=64).jobs(target("cuda")).values()
    (same,) = ShapeDecode("Llama-3-8B", "w2a2", length=512, show="ms").jobs(target("cuda")).values()
    rule = json.loads(made.inputs)
    assert made.id == same.id and rule["lengths"] == [64, 128, 256, 512]
    assert rule["recipe"] == "bitbybit(w2a2, split=none)"
    for how, length in (("w2a2", 0), ("w2a2", 100), ("rows", 64)):
        with pytest.raises(UserError, match="unknown prompt of"):
            ShapeDecode("Llama-3-8B", how, length=length)
    kept = {
        "rounds": type(
            "Kept", (), {"series": {f"ms {n}": Series(np.array([n / 8.0]), "items", "g") for n in (64, 512)}}
        )()
    }
    params = ShapeDecode("Llama-3-8B", "w2a2", length=512)
    assert params.value({"ms": params.series(kept, target())["ms"].values[0]}) == 1000 / 64


@pytest.mark.parametrize("how", ["w2a2", "w2a2-split", "w2a16"])
def test_bit_by_bit_s_shapes_decode_by_its_products(monkeypatch, how):
    """Of the tiny shape a block has one launch of q, k and v, or three where each has split channels of its own."""
    monkeypatch.setitem(engine.SHAPES, "tiny", TINY)
    monkeypatch.setattr(two_bit, "runs_kernels", lambda device, dtype: True)
    core = shape_decode.loaded("tiny", *AT_LENGTHS[how], 9, torch.device("cpu"))
    block = core.model.blocks[0]
    kinds = {"w2a2": two_bit.W2A2, "w2a2-split": weights.JoinedColumns, "w2a16": weights.Dense}
    assert type(block.qkv) is kinds[how] and core.time(3, 3).new_tokens == 3
    if how == "w2a2":
        assert block.qkv.outputs == 512 and block.down.units.shape == (32, 1, 1184)
    if how == "w2a2-split":
        widths = [len(one.index) for one in block.gate_up]
        assert widths == [288, 288], "a tenth of 256 in a model of one block, in whole groups"
        assert (
            core.model.stored_bytes
            > shape_decode.loaded("tiny", *AT_LENGTHS["w2a2"], 9, torch.device("cpu")).model.stored_bytes
        )


def test_a_shape_under_another_setting_of_bit_by_bit_is_refused():
    for recipe in ("bitbybit(w4a16)", "bitbybit(w2a16, any_precision=true)"):
        with pytest.raises(UserError, match="bitbybit at w2a2 or w2a16 in groups of 32"):
            random_shape.shape_recipe(parse(recipe))


def test_transformers_steps_are_timed_between_tokens(monkeypatch):
    monkeypatch.setitem(shape_decode.SHAPES, "tiny", TINY)
    steps = []
    real = shape_decode.Clock.put
    monkeypatch.setattr(shape_decode.Clock, "put", lambda self, ids: steps.append(len(ids)) or real(self, ids))
    assert shape_decode.transformers_steps("tiny", torch.device("cpu"))(5, 3) > 0
    assert len(steps) == 1 + 4, "the prompt, the token of its prefill, and three steps"


def test_table_8_has_its_own_device_and_ours():
    cells = {(cell.params.how, cell.params.length) for cell in tables.cells("bitbybit", "decode")}
    assert cells == set(product(AT_LENGTHS, shape_decode.LENGTHS))
    (claim,) = tables.table("bitbybit", "table8"[5:]).claims
    judged = table_results.judge(Workflow(replace(scales.load(name="pocket"), models={}), stored=True), claim)
    assert judged.own_numbers == "consistent" and len(judged.cases) == 4
    flow = Workflow(scales.load(name="pocket").on("cuda"), stored=False)
    jobs = {job.id for job in flow.every_job(flow.cells("bitbybit", "decode"))}
    targets = {job.id for job in flow.every_job(flow.cells("kernels", "two-bit-decode"))}
    assert len(jobs) == 5 and len(targets) == 4 and targets < jobs


def test_table_and_figure_ask_for_every_way_and_shape():
    cells = {(cell.params.shape, cell.params.how) for cell in tables.cells("spqt", "decode")}
    assert {how for _, how in cells} == {*HOW, *AS_TRAINED} and len(cells) == 4 * (len(HOW) + len(AS_TRAINED))
    assert len(figures.cells("spqt", "7")) == 12
    flow = Workflow(scales.load(name="pocket").on("cuda"), stored=False)
    jobs = {job.id for job in flow.every_job(flow.cells("spqt", "decode"))}
    drawn = {job.id for job in flow.every_job(flow.cells("spqt", "7", "figure"))}
    timed = {job for job in jobs if job.startswith("shape_decode")}
    assert len(timed) == 68 and len(drawn) == 16 and drawn < timed
    assert len({job for job in jobs if job.startswith("compress")}) == 9, "Q4_K, and eight ways to choose thresholds"


def test_lists_of_a_trained_model_are_of_its_job():
    """The model under the same recipe, and a text; a shape, a model and a recipe make one job."""
    (made,) = ShapeDecode("Llama-2-7B", "teal50").jobs(target("cuda")).values()
    needs, options = dict(made.needs), made.parsed_options()
    assert needs["weights"].kind == "compress"
    assert parse(needs["weights"].parsed_options()["recipe"]).config == parse(options["recipe"]).config
    assert "thresholds=teal" in options["recipe"]
    assert (options["model"], options["shape"]) == ("pocket-3m", "Llama-2-7B")
    assert needs["text"].kind == "tokens" and (options["length"], options["windows"]) == (2048, 1)
    others = [ShapeDecode("Llama-2-7B", "unified50"), ShapeDecode("Llama-2-13B", "teal50")]
    ids = {next(iter(one.jobs(target("cuda")).values())).id for one in others}
    assert len(ids | {made.id}) == 3
