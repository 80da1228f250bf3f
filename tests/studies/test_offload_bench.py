"""The bench of offloading on a tiny shape and few prompts: what it writes, what it skips, what a fault leaves."""

import json
from itertools import chain

import pytest
import torch
from tiny import llama_config

from repro.engine.traffic import Copy, Use, used
from repro.generation import engine as engines_by_name
from repro.methods import subspec
from repro.studies import offload as bench

SHAPE = llama_config()


@pytest.fixture
def small(monkeypatch):
    """One tiny shape, and iterations that a test can wait for."""
    monkeypatch.setitem(engines_by_name.SHAPES, "tiny", SHAPE)
    monkeypatch.setattr(bench, "SHAPES", {"llama8b": ("shape/tiny", 96), "llama1b": ("shape/tiny", 96)})
    monkeypatch.setattr(bench, "BIG", ("llama8b",))
    monkeypatch.setattr(bench, "LITTLE", "6.2MiB")
    monkeypatch.setattr(bench, "LONG", 40)
    monkeypatch.setattr(bench, "WARM", 1)
    monkeypatch.setattr(bench, "TIMED", 2)
    monkeypatch.setattr(bench, "MODEL", "pocket-3m")
    monkeypatch.setattr(bench, "TOKENS", 8)
    monkeypatch.setattr(bench, "SETS", {"mt-bench": 2})
    monkeypatch.setattr(bench, "DRAFT", subspec.Config(top_k=3, depth=5))
    monkeypatch.setattr(bench, "recorded_lengths", lambda: [[6, 2, 1], [4, 5]])


def test_every_measurement_is_written_once(small, tmp_path, capsys):
    words = ["--out", str(tmp_path), "--device", "cpu", "--memory", "6.2MiB"]
    bench.main([*words, "--only", "llama8b", "memory", "lossless-float32"])
    facts_of = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    shapes = {f"llama8b-{name}" for name in ("sync", "prefetch", "speculate", "step", "whole")}
    assert set(facts_of) == shapes | {"memory", "memory-plain", "lossless-float32"}
    long, plain = facts_of["memory"], facts_of["memory-plain"]
    assert long["tokens"] == plain["tokens"] == 40 and long["streamed_bytes"] and plain["streamed_bytes"]
    assert (long["iterations"], plain["iterations"]) == (8, 39), "39 tokens after the prefill's, five at once or one"
    speculate = facts_of["llama8b-speculate"]
    assert speculate["nodes"] == 16 and len(speculate["seconds"]) >= 1 and speculate["draft_pass_s"] > 0
    assert speculate["streamed_bytes"] > 0 and len(facts_of["llama8b-sync"]["seconds"]) == 2
    lossless = facts_of["lossless-float32"]
    assert (lossless["prompts"], lossless["disagreements"], lossless["unexplained"]) == (2, 0, 0)
    capsys.readouterr()
    bench.main([*words, "--only", "llama8b", "memory", "lossless-float32"])
    assert capsys.readouterr().out == ""


def test_a_whole_run_accepts_what_the_record_says(small, tmp_path):
    """The tree's best node of a level with its ancestors: a path of the very length, whatever random weights say."""
    made = bench.OffloadBench(tmp_path, torch.device("cpu"), "6.2MiB", [])
    facts = made.whole("llama8b")
    assert (facts["prompts"], facts["tokens"], facts["iterations"]) == (2, 20, 7) and len(facts["seconds"]) == 5
    per_iteration = facts["tokens"] / facts["iterations"]
    assert facts["calculated_tokens_per_s"] == pytest.approx(per_iteration / facts["iteration_s"])
    spent = sum(facts["prefill_seconds"]) + sum(facts["seconds"])
    assert facts["tokens_per_s"] == pytest.approx(20 / spent)
    assert facts["ratio"] == pytest.approx(facts["tokens_per_s"] / facts["calculated_tokens_per_s"])
    assert facts["decode_ratio"] == pytest.approx(5 * facts["iteration_s"] / sum(facts["seconds"]))


def test_recorded_lengths_are_paths_of_the_tree(small):
    engine = bench.of_shape("shape/tiny", "6.2MiB", bench.DRAFT, 96, torch.device("cpu"), torch.float32)
    batch = bench.ReplayedDraft(engine._decoding([[7] * 9], 14, bench.Sampling(), 0), [6, 1, 3, 3])
    text = []
    for piece in engine._run(batch):
        text += piece
        if len(text) > 1 and len(batch.path) > 1:
            parents = batch.drafter.tree.parents.tolist()
            assert [parents[node] for node in batch.path[1:]] == batch.path[:-1] and batch.path[0] == 0
    assert batch.lengths == [1, 6, 1, 3, 3] and len(text) == 14
    assert batch.verify.cache.lengths[0] == 9 + 13


def test_the_record_is_spread_over_iterations_of_whole_tokens():
    assert bench.spread(10, 4) == [2, 3, 2, 3] and sum(bench.spread(255, 7)) == 255


def test_the_stored_record_has_forty_prompts():
    lengths = bench.recorded_lengths()
    assert len(lengths) == 40
    assert all(1 <= length <= 49 for length in chain.from_iterable(lengths))
    tokens, iterations = sum(map(sum, lengths)) + 40, sum(map(len, lengths)) + 40
    assert 30 < tokens / iterations < 40


def test_ten_prompts_are_two_of_each_set(tmp_path):
    sets = {"mt-bench": 40, "humaneval": 40, "gsm8k": 50, "aime24": 30, "math500": 40}
    assert set(bench.first_of_all(sets, 10).values()) == {2} and bench.first_of_all(sets, 200) == sets
    assert bench.first_of_all(sets, 5) == dict.fromkeys(sets, 1)
    with pytest.raises(SystemExit, match="give one of each of 5 sets at least"):
        bench.main(["--out", str(tmp_path), "--device", "cpu", "--prompts", "4"])


def test_a_measurement_that_fails_is_named_and_not_written(small, tmp_path):
    with pytest.raises(SystemExit, match="not measured: llama8b-sync"):
        bench.main(["--out", str(tmp_path), "--device", "cpu", "--memory", "1KiB", "--only", "llama8b-sync"])
    assert not list(tmp_path.iterdir())


@pytest.fixture
def pair(small):
    """pocket-3m decoding plainly, and with a draft."""
    plain = bench.Engine.load("pocket-3m", context=128, dtype="float32", device="cpu")
    return plain, bench.Limited.load("pocket-3m", "1GiB", draft=bench.DRAFT, context=128, dtype="float32", device="cpu")


def test_a_disagreement_is_measured_in_the_passes_that_chose_the_tokens(pair):
    plain, ours = pair
    ids = list(range(5, 25))
    own = next(plain.generate([ids], 8)).tokens
    tokens = [*own[:5], own[5] + 1, *own[6:]]
    facts = bench.disagreement(plain, ours, plain, ids, own, tokens)
    logits = plain.logits([*ids, *own[:5]])[-1]
    assert facts["token"] == 5 and (facts["own"], facts["got"]) == ([own[5]], [own[5] + 1])
    assert facts["gap"] == pytest.approx((logits[own[5]] - logits[own[5] + 1]).item(), abs=1e-3)
    assert 0 <= facts["moved"] < 1e-3 < facts["gap"] and not bench.explained(facts, torch.bfloat16)


def test_the_trees_logits_are_those_that_verified(pair, monkeypatch):
    """A pass over a tree that is moved by a known amount moves by that amount, at the token that disagrees."""
    plain, ours = pair
    ids = list(range(5, 25))
    own = next(plain.generate([ids], 8)).tokens
    for number in range(1, 7):
        tree = bench.tree_logits(ours, ids, number)
        assert torch.allclose(tree, bench.one_token_logits(plain, ids, own[: number + 1])[-1], atol=1e-3)
        assert tree.argmax() == own[number]

    def pushed(self, x):
        y = self.forward(x)
        if self is ours.model.head and len(x) > 1:  # nodes of a tree
            y[:, own[4]] -= 1000
            y[:, 7] += 2000
        return y

    monkeypatch.setattr(type(ours.model.head), "__call__", pushed)
    tokens = next(ours.generate([ids], 8)).tokens
    facts = bench.disagreement(plain, ours, plain, ids, own, tokens)
    assert facts["token"] >= 1 and facts["got"] == [7]
    wanted = 2000 + 1000 * (facts["own"] == [own[4]])
    assert facts["moved"] == pytest.approx(wanted, abs=1) and facts["tree_error"] == pytest.approx(2000, abs=1)
    assert facts["gap"] < facts["moved"] and not bench.explained(facts, torch.bfloat16)  # moved, but not by rounding


def test_rounding_explains_what_lies_within_the_difference_of_the_passes():
    row = {"gap": 0.09, "moved": 0.1, "tree_error": 0.1, "rounding": 0.06}
    assert bench.explained(row, torch.bfloat16)
    assert not bench.explained(row | {"gap": 0.11}, torch.bfloat16)
    assert not bench.explained(row | {"tree_error": 0.13}, torch.bfloat16)
    assert not bench.explained(row, torch.float32) and bench.explained(row | {"gap": 1e-6}, torch.float32)


# --- the bus ----------------------------------------------------------------------------------------------------------


def test_the_bus_counts_what_was_copied_inside_a_span():
    copies = [Copy(0, 2, 200), Copy(2, 3, 50), Copy(4, 8, 400)]
    assert used(copies, 0, 8) == Use(7, 650)
    assert used(copies, 1, 6) == Use(4, 350)  # half of the first and of the last
    assert used(copies, 3, 4) == Use(0, 0)


def test_a_share_of_the_bus_leaves_out_what_came_before_the_span():
    """31 blocks stream; a verification finds the first one there, as drafting takes longer than a copy."""
    copies = [Copy(float(at), at + 1.0, 10) for at in range(-5, 30)]  # the block of time -5 for this verification
    uses = [used(copies, 0, 30)]
    shares = bench.bus_shares(uses, 30, 10)
    assert shares == {"bus_bytes_per_s": 10, "bus_share": 1, "bus_busy": 1}
    assert bench.bus_shares([Use(20, 210), Use(7, 60)], 40, 10) == {
        "bus_bytes_per_s": 10, "bus_share": 270 / 400, "bus_busy": 27 / 40,
    }  # fmt: skip


def test_every_copy_of_a_pass_is_noted_once(small):
    engine = bench.of_shape("shape/tiny", "6.2MiB", bench.DRAFT, 96, torch.device("cpu"), torch.float32)
    traffic = bench.traffic_of(engine)
    lanes = {block.down.lane for block in engine.model.blocks if hasattr(block.down, "lane")}
    assert not any(lane.loaded >= 0 for lane in lanes)
    engine.phases = True
    bench.timed(engine, 1)
    traffic.start()
    batch = bench.timed(engine, 2)
    copies = traffic.stop()
    passes = 1 + len(batch.verified)  # the prefill too
    assert sum(copy.nbytes for copy in copies) == passes * engine.plan.streamed_bytes
    assert all(copy.begin < copy.end for copy in copies)
    assert [copy.begin for copy in copies] == sorted(copy.begin for copy in copies)
    bench.timed(engine, 1)
    assert traffic.stop() == copies  # noted no more
    spans = batch.verified
    assert all(begin < end for begin, end in spans)
    assert all(used(copies, begin, end).seconds <= end - begin for begin, end in spans)


def test_a_planted_fault_is_a_disagreement(small, monkeypatch):
    monkeypatch.setattr(
        bench.Loaded, "streamed", lambda self, names, real=bench.Loaded.streamed: _scaled(real(self, names))
    )
    facts = bench.lossless(torch.device("cpu"), torch.float32, {"mt-bench": 2})
    assert facts["disagreements"] == facts["unexplained"] == 2


def _scaled(pair):
    return 1.5 * pair[0], pair[1]


def test_random_products_have_the_shapes_of_the_plan(small):
    engine = bench.of_shape("shape/tiny", "6.2MiB", bench.DRAFT, 96, torch.device("cpu"), torch.float32)
    streamed = [b for n, b in enumerate(engine.model.blocks) if n not in engine.plan.resident]
    nbytes = 0
    for block in streamed:
        nbytes += sum(product.weight.nbytes for product in (block.qkv, block.out, block.gate_up, block.down))
    assert nbytes == engine.plan.streamed_bytes
