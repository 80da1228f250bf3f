"""Times of a text from measured steps: against a slow sum over tokens and layers, and what is missing gives none."""

import json
from itertools import product

import numpy as np
import pytest

from repro.bench import along
from repro.core.errors import UserError
from repro.methods.flexquant.config import Config
from repro.metrics import tpot
from repro.metrics.tpot import TimePerToken
from repro.results import measure
from repro.specs import scale as scales
from repro.specs import tables
from repro.workflow.workflow import Workflow

MS = {16: (4.6, 5.4), 8: (2.6, 3.4), 4: (2.0, 2.8)}  # after 128 and 4,096 tokens
EXTRA = {0.5: 0.2, 1.5: 0.1}  # ms of a mixture beyond its static steps, by moves over layers
LOST = {1: 0.3, 4: 0.6, 16: 3.0}  # ms by layers of a switch
SWITCHES = [23, 45, 67, 89]  # of a run in which they were timed
FACTS = {"shape": "shape/Llama-3-8B", "device": "NVIDIA H200", "commit": "abc"}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A folder with two contexts of every width, the signal and switches of four layers."""
    monkeypatch.setattr(tpot, "BUILT", tmp_path)
    for bits, times in MS.items():
        for context, ms in zip((128, 4096), times):
            write(tmp_path / f"step-{bits}-{context}.json", {"context": context, "timed": 64, "ms": ms})
    write(tmp_path / "signal.json", {"listening ms": 2.02, "plain ms": 2.0})
    for share, extra in EXTRA.items():
        write(tmp_path / f"mixed-random-{share}.json", {"ms": 3.0 + extra, "expected ms": 3.0})
    for layers, ms in LOST.items():
        write(tmp_path / f"switch-ahead-{layers}.json", {"layers": layers, "ms": around(ms), "steps": SWITCHES})
    return tmp_path


def write(path, facts):
    path.write_text(json.dumps(FACTS | facts))


def around(lost):
    """Milliseconds of steps around switches, each of which delays its token; between them layers get faster."""
    ms = []
    for step in range(1, 101):
        switched = sum(step >= at for at in SWITCHES)
        ms.append(4.0 - 0.01 * switched + lost * (step in SWITCHES))
    return ms


def shown(params):
    """The value of a cell, or None."""
    result = params.read()
    return result and result.interval().value


def step(bits, context):
    """Milliseconds of a static step, by hand."""
    low, high = MS[bits]
    share = min(max((context - 160) / (4128 - 160), 0), 1)
    return low + share * (high - low)


def test_a_static_text_is_the_mean_of_its_steps(measured):
    by_hand = np.mean([step(8, 128 + token) for token in range(1, 2001)])
    assert shown(TimePerToken("ms", "2000", bits="8")) == pytest.approx(by_hand)
    static = np.mean([step(16, 128 + token) for token in range(1, 2001)])
    assert shown(TimePerToken("times", "2000", bits="8")) == pytest.approx(static / by_hand)
    assert shown(TimePerToken("times", "2000", bits="16")) == pytest.approx(1.0)


@pytest.mark.parametrize("layers", [1, 16])
def test_a_schedule_takes_each_layers_share_of_the_step_of_its_width(measured, layers):
    """Every window of 20 qualifies: a switch at step 22, and then one every 21 steps; first block first."""
    sizes, total, seconds = tpot._sizes("shape/Llama-3-8B"), 0, []
    names = list(sizes)
    assert len(names) == 224 and sum(sizes.values()) == 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    bits, made, switches = dict.fromkeys(names, 16), 0, 0
    moves = [(name, width) for width, name in product((8, 4), names)]
    for token in range(1, 1501):
        if token >= 22 and (token - 22) % 21 == 0:
            for name, width in moves[made : made + layers]:
                bits[name] = width
            switches += made < len(moves)
            made += layers
        weights_at = dict.fromkeys(MS, 0)
        for name, size in sizes.items():
            weights_at[bits[name]] += size
        total = sum(sizes.values())
        mixed = np.interp((weights_at[8] + 2 * weights_at[4]) / total, [0, 0.5, 1, 1.5, 2], [0, 0.2, 0, 0.1, 0])
        seconds.append(mixed + sum(weights_at[width] / total * step(width, 128 + token) for width in MS))
    params = TimePerToken("ms", "1500", f"flexquant(layers={layers})")
    assert shown(params) == pytest.approx(np.mean(seconds) + switches * LOST[layers] / 1500)
    every = ("16 bits", "8 bits", "4 bits", "cache", "mixing", "PPLE")
    parts = [shown(TimePerToken(part, "1500", params.schedule)) for part in every]
    assert sum(parts) == pytest.approx(seconds[-1]) and (parts[4] > 0) == (layers == 1) and parts[5] > 0
    grown = sum(weights_at[width] / total * (step(width, 1628) - MS[width][0]) for width in MS)
    assert parts[3] == pytest.approx(grown), (
        "what keys and values add to the shortest context, the signal on neither side"
    )
    assert parts[2] > 0 if layers == 16 else parts[2] == 0


def test_a_number_of_results_of_its_own_takes_no_job_where_a_table_also_has_a_model():
    flow = Workflow(scales.load(name="pocket"))
    cells = flow.cells("flexquant", "intervals")
    timed = [cell for cell in cells if cell.measure == "tpot"]
    assert len(timed) == 6 and not any(map(flow.jobs, timed))
    assert {job.kind for job in measure.missing(flow, cells)} <= {"switching", "compress", "tokens"}


def test_parts_that_are_measured_by_themselves(measured):
    assert shown(TimePerToken("PPLE", "1000", "flexquant(layers=4)")) == pytest.approx(0.02)
    switches = 1 + (999 - 22) // 21
    assert shown(TimePerToken("switching", "1000", "flexquant(layers=4)")) == pytest.approx(
        0.6 * switches / 1000, rel=0.03
    )
    between = shown(TimePerToken("switching", "1000", "flexquant(layers=8)"))  # of 4 and 16 layers
    assert between == pytest.approx(1.4 * switches / 1000, rel=0.03) and shown(TimePerToken("PPLE", "9", bits="8")) == 0


def test_a_switch_loses_what_its_tokens_take_beyond_the_settled_ones():
    ms = around(0.6)
    ms[40] += 5.0  # late in an interval: the settled ones are its median
    assert along.lost(ms, SWITCHES) == pytest.approx([0.6, 0.6], abs=1e-9)
    ms[43] += 1.0  # the token before a switch belongs to it
    assert along.lost(ms, SWITCHES) == pytest.approx([1.6, 0.6], abs=1e-9)
    ms = [4.0] * 100
    for at in range(45, 55):
        ms[at] = 4.5  # a graph is captured beside these
    assert along.lost(ms, SWITCHES) == pytest.approx([5.0, 0.0], abs=1e-9)


@pytest.mark.parametrize("absent", ["mixed-random", "switch-ahead"])
def test_a_schedule_needs_mixtures_and_switches(measured, absent):
    for path in measured.glob(f"{absent}-*.json"):
        path.unlink()
    assert shown(TimePerToken("ms", "1000", "flexquant(layers=4)")) is None
    assert shown(TimePerToken("ms", "1000", bits="4")) is not None


def test_what_was_not_measured_has_no_value(measured, monkeypatch, tmp_path):
    assert shown(TimePerToken("ms", "4000", bits="8")) is not None
    assert shown(TimePerToken("ms", "4001", bits="8")) is None  # beyond the longest context
    most = max(LOST)
    assert shown(TimePerToken("ms", "1000", f"flexquant(layers={most})")) is not None
    assert shown(TimePerToken("ms", "1000", f"flexquant(layers={most + 1})")) is None  # more than any measured switch
    (measured / "step-4-128.json").unlink()
    (measured / "step-4-4096.json").unlink()
    assert shown(TimePerToken("ms", "100", "flexquant")) is None
    assert shown(TimePerToken("ms", "100", bits="8")) is not None
    monkeypatch.setattr(tpot, "BUILT", tmp_path / "none")
    monkeypatch.setattr(tpot, "STORED", tmp_path / "none")
    assert shown(TimePerToken("ms", "100", bits="8")) is None


def test_where_times_come_from(measured):
    result = TimePerToken.origin([TimePerToken("ms", "100", bits="8")])
    assert result["device"] == "NVIDIA H200" and result["note"] == "calculated" and result["source"] == "fresh"


def in_processes(measured, factors):
    """The measurements of several processes, in each of which every step takes another factor of its time."""
    for number, factor in enumerate(factors, start=1):
        folder = measured / f"run-{number}"
        folder.mkdir()
        for path in measured.glob("*.json"):
            measurement = json.loads(path.read_text())
            measurement |= {"ms": factor * measurement["ms"]} if path.name.startswith("step-") else {}
            (folder / path.name).write_text(json.dumps(measurement | {"commit": f"commit{number}"}))


def test_several_processes_give_an_interval(measured):
    """Of 3 processes at 0.9, 1.0 and 1.1 times: s / sqrt(3) = 0.0577, times t(0.975, 2) = 4.303."""
    static, switching = TimePerToken("ms", "2000", bits="8"), TimePerToken("times", "1500", "flexquant(layers=4)")
    alone = shown(static), shown(switching)
    assert static.read().interval().hi == alone[0], "one process gives none"
    in_processes(measured, (0.9, 1.0, 1.1))
    interval = static.read().interval()
    assert interval.value == pytest.approx(alone[0])
    assert interval.hi - interval.value == pytest.approx(0.0577350 * 4.302653 * alone[0], rel=1e-5)
    assert interval.value - interval.lo == pytest.approx(interval.hi - interval.value)
    of_ratio = switching.read().interval()  # within a process both times have its factor
    assert of_ratio.lo < alone[1] < of_ratio.hi and of_ratio.hi - of_ratio.lo < 0.1 * alone[1]
    result = TimePerToken.origin([static])
    assert result["commit"] == "commit1 + commit2 + commit3" and result["covers"] == "processes"
    assert result["protocol"].endswith("of 3 processes") and result["source"] == "fresh"


def test_what_one_process_lacks_has_no_value(measured):
    in_processes(measured, (1.0, 1.0))
    assert shown(TimePerToken("ms", "1000", bits="8")) is not None
    for path in (measured / "run-2").glob("step-8-*.json"):
        path.unlink()
    assert shown(TimePerToken("ms", "1000", bits="8")) is None
    assert shown(TimePerToken("ms", "1000", bits="4")) is not None


def test_no_threshold_switches_earlier():
    """At its best: as many switches as windows fit in."""
    sizes = {"a": 3, "b": 1}
    log = tpot.at_best(Config(layers=1), sizes, 100)
    share = along.shares(log, [16, 8, 4], sizes, 100)
    assert [switch.step for switch in log] == [22, 43, 64, 85]
    assert share[21].tolist() == [0.25, 0.75, 0] and share[99].tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "how, message",
    [
        ({"tokens": "many", "bits": "8"}, "it must be a number, 1 or more"),
        ({"tokens": "9"}, "give a schedule"),
        ({"tokens": "9", "bits": "8", "schedule": "flexquant"}, "give a schedule"),
        ({"tokens": "9", "bits": "3"}, "3 bits have no step that is timed; choose from 16, 8, 4"),
        ({"tokens": "9", "schedule": "flexquant(path=[4, 3])"}, "3 bits have no step that is timed"),
    ],
)
def test_what_cannot_be_timed_is_a_sentence(how, message):
    with pytest.raises(UserError, match=message):
        TimePerToken("ms", **how)


def test_the_table_and_the_figures_ask_for_what_there_is(measured):
    flow = Workflow(scales.load(name="pocket"))
    cells = flow.cells("flexquant", "speed")
    assert len(cells) == 7 * 4 * 2 and all(flow.is_external(cell) for cell in cells)
    values = {cell.cell_key: flow.quantity(cell) for cell in cells}
    assert sum(result is None for result in values.values()) == 7 * 2  # 7,800 tokens were not measured here
    for number in ("6", "7"):
        assert all(flow.is_external(cell) for cell in flow.cells("flexquant", number, "figure"))
    assert {claim.claim for claim in tables.table("flexquant", "speed").claims} == {
        "flexquant F01", "flexquant F15", "flexquant F17"}  # fmt: skip


def test_a_stored_process_measured_the_same_state_alike():
    """All layers at 8 bits are a static step and the mixture in the middle; a host that stalls makes one of them short.

    Such a process was left out: 2.389 and 2.589 ms, tokens that came late twice as long as the others.
    """
    runs = sorted(tpot.STORED.glob("run-*/"))
    assert len(runs) >= 2
    for run in runs:
        static = json.loads((run / "step-8-128.json").read_text())
        mixture = json.loads((run / "mixed-random-1.0.json").read_text())
        assert mixture["ms"] == pytest.approx(static["ms"], rel=0.02), run.name
