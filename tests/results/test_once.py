"""What a table shows is computed once: verdict, grid, CSV and replication ask one workflow, which remembers."""

from collections import Counter

import pytest

from repro.jobs import compress
from repro.make.snake import SnakemakeAdapter
from repro.models import identity
from repro.render import draw, tables
from repro.results import measure, recorded, replicate
from repro.specs import scale
from repro.workflow import estimate
from repro.workflow.workflow import Workflow

TABLE = "bitbybit/table1"  # cells, ratios to full precision and claims over them, from stored results


def counted(monkeypatch, flow):
    """How often each of these is computed for a cell while the table is drawn."""
    counts = Counter()

    def count(owner, name):
        original = getattr(owner, name)

        def counting(*given):
            counts[name, id(given[0]), given[1].key, *(m.observations for m in given[2:])] += 1
            return original(*given)

        monkeypatch.setattr(owner, name, counting)

    count(measure, "_computed")
    count(measure, "_quantity")
    count(recorded, "_recomputed")
    count(Workflow, "inputs")
    tables.drawn(flow, TABLE)
    return counts


def test_no_value_interval_or_hash_of_a_cell_is_computed_twice_when_a_table_is_drawn(monkeypatch):
    counts = counted(monkeypatch, Workflow(scale.load(name="pocket"), remember=True))
    assert {name for name, *_ in counts} == {"_computed", "_quantity", "_recomputed", "inputs"}
    assert len(counts) > 300
    assert not [key for key, count in counts.items() if count > 1]


def test_a_workflow_whose_files_may_change_computes_again(monkeypatch):
    counts = counted(monkeypatch, Workflow(scale.load(name="pocket")))
    assert max(counts.values()) > 1


@pytest.mark.parametrize("what", ["table", "page"])
def test_a_rule_draws_with_a_workflow_that_remembers(monkeypatch, tmp_path, what):
    seen = []
    monkeypatch.setitem(draw.DRAWN, what, lambda flow, name: seen.append(flow))
    draw.draw("{}", what, "x", str(tmp_path / "log"))
    made = []
    (flow,) = seen
    assert [flow.once(("a key",), lambda: made.append(1) or 2) for _ in range(3)] == [2, 2, 2] and made == [1]
    assert flow.brief.once(("another",), lambda: 3) == flow.brief.once(("another",), lambda: 4) == 3
    assert not flow.is_of_results and Workflow.of_results(flow.scale).is_of_results, "a page makes one of results"


def test_an_interval_is_resampled_once(monkeypatch):
    flow = Workflow.of_results(scale.load(name="pocket"))
    cell = next(c for c in flow.cells("bitbybit", "1") if measure.one(flow, c).n)
    quantity = measure.quantity(flow, cell, measure.one(flow, cell))
    first = quantity.interval()
    monkeypatch.setattr("repro.stats.statistics.interval", lambda *given: pytest.fail("again"))
    assert quantity.interval() is first


def test_a_listing_of_jobs_makes_and_times_each_once(monkeypatch):
    """A build with nothing to do lists the jobs of every cell before it may say so."""
    counts = Counter()

    def count(owner, name, key):
        original = getattr(owner, name)

        def counting(*given):
            counts[name, *key(*given)] += 1
            return original(*given)

        monkeypatch.setattr(owner, name, counting)

    def of_target(target):
        protocols = tuple(map(repr, target.scale.protocols.values()))  # whole or brief
        return (protocols, repr(target.scale.calibration), target.model, target.text, target.seed)

    count(compress, "_job", of_target)
    count(estimate, "run_of", lambda job, *seconds: (job,))
    count(identity, "tokenizer_digest", lambda place: ())
    count(recorded, "_recomputed", lambda flow, cell, row: cell.key)
    replicate.expected_seconds.cache_clear()
    adapter = SnakemakeAdapter(scale.load(name="pocket").as_config())
    assert adapter.jobs_of(TABLE)
    digests = counts.pop(("tokenizer_digest",))
    assert not [key for key in counts if key[0] == "_recomputed"], "whether a row stands needs no value"
    assert {name for name, *_ in counts} == {"_job", "run_of"} and set(counts.values()) == {1}
    assert digests <= sum(name == "_job" for name, *_ in counts), "once a target, not once a text or task of it"
    assert adapter.flow.once(("a key",), lambda: 1) == adapter.flow.once(("a key",), lambda: 2) == 1
