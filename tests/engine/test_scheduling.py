"""Continuous batching by hand: which tokens an iteration has, how large a chunk may be, and who waits how long."""

import itertools
import random

import numpy as np
import pytest

from repro.core.errors import UserError
from repro.engine import scheduling
from repro.engine.scheduling import LatencyTable, LatencyTarget, Request, Scheduler, StaticBudget, WallClock, serve

TABLE = LatencyTable({8: 4.0, 64: 6.0, 128: 8.0, 512: 20.0})


class Simulated:
    """A clock, and iterations that take as long as a function of their tokens says."""

    def __init__(self, milliseconds):
        self.milliseconds, self.seconds, self.batches, self.skipped = milliseconds, 0.0, [], []

    def now(self):
        return self.seconds

    def skip_to(self, seconds):
        assert seconds > self.seconds, "time does not run back"
        self.skipped.append(seconds)
        self.seconds = seconds

    def __call__(self, batch):
        chunks = [(chunk.running.request.number, chunk.start, chunk.count) for chunk in batch.chunks]
        self.batches.append(([one.request.number for one in batch.decodes], chunks))
        self.seconds += self.milliseconds(batch.tokens) / 1e3


def served(requests, policy, milliseconds, rows=4):
    machine = Simulated(milliseconds)
    return serve(requests, Scheduler(policy, rows), machine, machine), machine


def many(count, seed, spread=0.4):
    rng = random.Random(seed)
    at, requests = 0.0, []
    for number in range(count):
        at += rng.expovariate(1 / spread)
        requests.append(Request(number, at, rng.randint(1, 300), rng.randint(1, 40)))
    return requests


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_a_trace_by_hand():
    """Ten milliseconds an iteration, a budget of 8 tokens: prompts of 10 and 5 that arrive at 0 and 15 ms."""
    requests = [Request(0, 0.0, 10, 3), Request(1, 0.015, 5, 2)]
    trace, machine = served(requests, StaticBudget(8), lambda tokens: 10.0)
    assert machine.batches == [
        ([], [(0, 0, 8)]),  # to 10 ms
        ([], [(0, 8, 2)]),  # to 20 ms: its first token; request 1 came at 15 ms, after this began
        ([0], [(1, 0, 5)]),  # to 30 ms: its second, and the first of request 1
        ([0, 1], []),  # to 40 ms: both are done
    ]
    assert trace.first == pytest.approx([0.020, 0.015])
    assert trace.gaps == [pytest.approx([0.010, 0.010]), pytest.approx([0.010])]
    assert trace.iterations == [(0, 8, 0.01), (0, 2, 0.01), (1, 5, pytest.approx(0.01)), (2, 0, pytest.approx(0.01))]
    assert machine.skipped == []


def test_several_prompts_share_an_iteration_in_the_order_of_their_arrival():
    requests = [Request(0, 0.0, 3, 1), Request(1, 0.0, 3, 1), Request(2, 0.0, 9, 1)]
    _, machine = served(requests, StaticBudget(8), lambda tokens: 1.0)
    assert machine.batches == [([], [(0, 0, 3), (1, 0, 3), (2, 0, 2)]), ([], [(2, 2, 7)])]


def test_idle_time_is_skipped():
    requests = [Request(0, 1.0, 2, 1), Request(1, 5.0, 2, 1)]
    trace, machine = served(requests, StaticBudget(8), lambda tokens: 10.0)
    assert machine.skipped == [1.0, 5.0]
    assert trace.first == pytest.approx([0.010, 0.010])


def test_a_budget_counts_the_tokens_that_are_decoded():
    assert [StaticBudget(8).chunk(decodes) for decodes in (0, 3, 8, 20)] == [8, 5, 0, 0]


def test_no_more_requests_run_than_there_are_rows():
    requests = [Request(number, 0.0, 2, 3) for number in range(5)]
    _, machine = served(requests, StaticBudget(64), lambda tokens: 1.0, rows=2)
    assert machine.batches[0] == ([], [(0, 0, 2), (1, 0, 2)])
    assert all(len(decodes) + len(chunks) <= 2 for decodes, chunks in machine.batches)
    assert machine.batches[3] == ([], [(2, 0, 2), (3, 0, 2)]), "rows of those that are done are taken again"


# --- the latency table ------------------------------------------------------------------------------------------------


def test_a_table_interpolates_between_what_was_measured():
    assert TABLE(8) == 4.0 and TABLE(64) == 6.0 and TABLE(512) == 20.0
    assert TABLE(36) == pytest.approx(5.0) and TABLE(96) == pytest.approx(7.0) and TABLE(224) == pytest.approx(11.0)
    assert TABLE(0) == 0.0, "no tokens are no iteration"
    assert TABLE(1) == 4.0, "fewer than were measured take as long"
    assert TABLE(640) == pytest.approx(24.0), "the last slope goes on"


def test_a_table_never_falls():
    table = LatencyTable({8: 4.0, 16: 3.5, 32: 5.0})
    assert [table(tokens) for tokens in (8, 12, 16, 24)] == [4.0, 4.0, 4.0, 4.5]


def test_a_table_of_padded_iterations_is_of_what_is_computed():
    table = LatencyTable({8: 4.0, 64: 6.0, 128: 8.0}, sizes=[8, 64, 128])
    assert [table(tokens) for tokens in (1, 8, 9, 64, 65, 128)] == [4.0, 4.0, 6.0, 6.0, 8.0, 8.0]
    assert table(192) == pytest.approx(10.0)


@pytest.mark.parametrize("points", [{8: 1.0}, {0: 1.0, 8: 2.0}, {8: 0.0, 16: 1.0}])
def test_a_table_that_says_too_little_is_refused(points):
    with pytest.raises(UserError, match="latency table"):
        LatencyTable(points)


# --- SPEAR's rule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("target", [5.0, 9.0, 13.3, 22.0])
def test_a_chunk_is_the_largest_that_keeps_the_target(joint, target):
    """Against a search through all chunks."""
    policy = LatencyTarget(TABLE, target, least=1, most=512, joint=joint)
    for decodes in (0, 1, 30, 64, 200):
        price = (lambda c: TABLE(decodes + c)) if joint else (lambda c: TABLE(decodes) + TABLE(c))  # noqa: B023
        keeping = [c for c in range(1, 512 - decodes + 1) if price(c) <= target]
        assert policy.chunk(decodes) == max(keeping, default=1)


def test_the_printed_rule_prices_decodes_and_chunk_apart():
    """T(64) = 6 ms: 8 ms are left, which is T(128), where one batch of 14 ms has 320 tokens."""
    assert LatencyTarget(TABLE, 14.0).chunk(64) == 128
    assert LatencyTarget(TABLE, 14.0, joint=True).chunk(64) == 320 - 64


def test_a_chunk_is_never_empty_and_never_beyond_the_largest_iteration():
    assert LatencyTarget(TABLE, 1.0, least=16).chunk(30) == 16, "no prompt waits for ever"
    assert LatencyTarget(TABLE, 1e3, most=512).chunk(30) == 482


def test_a_placement_with_more_compensators_has_smaller_chunks():
    dense = LatencyTable({8: 5.0, 64: 8.0, 128: 11.0, 512: 26.0})
    assert LatencyTarget(dense, 14.0).chunk(32) < LatencyTarget(TABLE, 14.0).chunk(32)


@pytest.mark.parametrize("wrong", [{"target": 0.0}, {"least": 0}, {"least": 64, "most": 32}])
def test_a_target_that_means_nothing_is_refused(wrong):
    with pytest.raises(UserError, match="target must be positive, and 1 <= least <= most"):
        LatencyTarget(TABLE, **({"target": 10.0} | wrong))


def test_other_input_that_means_nothing_is_refused():
    with pytest.raises(UserError, match="budget of 0 tokens"):
        StaticBudget(0)
    with pytest.raises(UserError, match="request 3: 0 prompt tokens"):
        Request(3, 0.0, 0, 1)
    with pytest.raises(UserError, match="0 rows"):
        Scheduler(StaticBudget(8), 0)


# --- what holds for any workload --------------------------------------------------------------------------------------

POLICIES = {
    "static": StaticBudget(64),
    "small": StaticBudget(4),
    "target": LatencyTarget(TABLE, 12.0),
    "joint": LatencyTarget(TABLE, 12.0, joint=True),
    "missed": LatencyTarget(TABLE, 1.0),
}


def chunks_of(machine):
    """(request, first token, tokens) of every chunk of a prompt, as they were computed."""
    return itertools.chain.from_iterable(batch for _, batch in machine.batches)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("spread", [0.002, 0.2])
def test_every_token_is_computed_once_and_everybody_is_served(name, spread):
    requests = many(40, seed=1, spread=spread)
    trace, machine = served(requests, POLICIES[name], TABLE, rows=6)
    for request in requests:
        computed = 0
        for number, start, count in chunks_of(machine):
            if number == request.number:
                assert start == computed
                computed += count
        assert computed == request.prompt_tokens
        decoded = sum(request.number in decodes for decodes, _ in machine.batches)
        assert decoded == request.new_tokens - 1 == len(trace.gaps[request.number])
    assert all(first > 0 for first in trace.first)
    begun = [number for number, start, _ in chunks_of(machine) if start == 0]
    assert begun == sorted(begun), "first come, first served"


@pytest.mark.parametrize("name", POLICIES)
def test_no_decode_is_put_off(name):
    """A token's gap is one iteration: whoever decodes is in every one of them (stall-free)."""
    trace, _ = served(many(30, seed=2, spread=0.01), POLICIES[name], TABLE, rows=6)
    seconds = np.array([of_iteration for _, _, of_iteration in trace.iterations])
    for gap in itertools.chain.from_iterable(trace.gaps):
        assert abs(gap - seconds).min() < 1e-9


@pytest.mark.parametrize("joint", [False, True])
def test_a_target_is_kept_where_the_table_is_true(joint):
    """T grows ever more slowly with the tokens, so that one batch is no dearer than its parts."""
    policy = LatencyTarget(TABLE, 12.0, joint=joint)
    trace, machine = served(many(60, seed=3, spread=0.01), policy, TABLE, rows=32)
    slowest = max(seconds for _, _, seconds in trace.iterations)
    assert slowest <= 0.012 + 1e-9
    if joint:
        assert slowest > 0.0119, "the target is used up"
    assert max(len(decodes) for decodes, _ in machine.batches) > 10


def test_a_larger_target_serves_first_tokens_sooner():
    def mean(target):
        trace, _ = served(many(80, seed=4, spread=0.02), LatencyTarget(TABLE, target), TABLE, rows=64)
        return sum(trace.first)

    assert mean(18.0) < mean(13.0) < mean(10.0)


def test_the_wall_clock_skips_what_is_to_come_and_never_back(monkeypatch):
    at = [100.0]
    monkeypatch.setattr(scheduling.time, "perf_counter", lambda: at[0])
    clock = WallClock()
    at[0] += 2.0
    assert clock.now() == 2.0
    clock.skip_to(7.0)
    assert clock.now() == 7.0
    clock.skip_to(3.0)
    assert clock.now() == 7.0
    at[0] += 0.5
    assert clock.now() == 7.5
