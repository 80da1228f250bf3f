"""The bars: computed from accepted rows alone, on synthetic rows whose answers are known."""

import dataclasses
import re
import xml.etree.ElementTree

import pytest

from repro import bench, kernel_rows, peers, speed
from repro.__main__ import main
from repro.errors import UserError
from repro.kernel_rows import Row

ORIGIN = {"device": "NVIDIA H200", "commit": "0123456789", "environment": "torch 2", "date": "2026-01-01"}
SHAPES = [(2048, 2048), (4096, 4096), (8192, 8192)]


def row(kernel, provider, dtype, shape, m, us, floor=None, **changes):
    n, k = shape
    nbytes = n * k * {"w4-g128": 17, "w2-g64": 10, "bf16": 64, "fp16": 64}.get(kernel, 32) // 32
    numbers = {"us": us, "p20": us * 0.99, "p80": us * 1.01, "bytes": nbytes, "floor_us": floor, "relerr": 2e-4}
    numbers |= {"fraction": floor / us if floor else None, "copies": 5, "rounds": 25}
    return Row(kernel, provider, dtype, n, k, m, "cold", **(numbers | ORIGIN | changes))


def rows():
    """At every shape: the floor is 10 us, this project takes 12.5 (one layer: 12), everybody else a round number."""
    found = [
        Row("read_floor", "read_floor", "uint8", mode="cold", us=200.0, p20=199.0, p80=201.0, bytes=9 * 10**8,
            relerr=0.0, copies=2, **ORIGIN),
        row("bf16", "torch.matmul", "bf16", (8192, 8192), 8192, 1400.0),
    ]  # fmt: skip
    for shape in SHAPES:
        ours = 12.0 if shape == (4096, 4096) else 12.5
        found += [
            row("w4-g128", "wna16_gemv", "fp16", shape, 1, ours, 10.0),
            *(row("w4-g128", "linear", "fp16", shape, m, ours * more, 10.0) for m, more in ((4, 1.1), (8, 1.3))),
            *(row("w4-g128", "linear", "fp16", shape, m, 2 * ours, 10.0) for m in (16, 64, 256)),
            *(row("bf16", "torch.matmul", "bf16", shape, m, 30.0, 25.0) for m in (1, 4, 8, 16, 64, 256)),
            row("bf16", "torch.compile", "bf16", shape, 1, 26.0, 25.0),
            row("w4-g128", "awq_gemv", "fp16", shape, 1, 15.0, status="bridged", p20=None, p80=None, copies=None),
            row("w4-g128", "marlin", "fp16", shape, 16, 28.0, status="bridged", p20=None, p80=None, copies=None),
            row("w4-g128", "tinygemm", "bf16", shape, 8, 16.0, 10.0),
            row("w4-g128", "w4a16_gemm", "fp16", shape, 256, 25.0, 10.0),
            row("w4-g128", "dequantize", "fp16", shape, 256, 30.0 if shape == (2048, 2048) else 40.0, 10.0),
            row("w2-g64", "wna16_gemv", "fp16", shape, 1, 8.0, 6.0),
            row("w2-g64", "gemlite", "fp16", shape, 1, 20.0, 6.0),
            row("w2-g64", "gemlite-recorded", "fp16", shape, 1, 16.0, status="bridged"),
            row("w8a8", "w8a8_gemm", "bf16", shape, 512, 10.0, 5.0),
            row("int8", "torch._int_mm", "int32", shape, 512, 9.0 if shape == (2048, 2048) else 11.0, 5.0),
        ]
    return found


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results" / "nvidia-h200" / "kernels.csv"
    path.parent.mkdir(parents=True)
    path.write_text(kernel_rows.to_csv(rows()))
    return tmp_path / "results"


def bar(words, some=None):
    (found,) = [b for b in speed.bars(rows() if some is None else some, SHAPES) if words in b.what]
    return found


@pytest.mark.parametrize(
    "words, mean, worst, shape, holds",
    [
        ("fp16, M = 1: of the read floor, from 4096", (0.8 * 10 / 12) ** 0.5, 0.8, (8192, 8192), "no"),
        ("fp16, M = 1: of the read floor, smaller", 0.8, 0.8, (2048, 2048), "yes"),
        ("fp16, M = 1: over AWQ's gemv, carried", 1.2164, 1.2, (2048, 2048), "yes"),
        ("fp16, M = 1: relative error", 2e-4, 2e-4, (2048, 2048), "yes"),
        ("fp16, M = 4: time over", 1.1, 1.1, None, "yes"),
        ("fp16, M = 8: time over", 1.3, 1.3, None, "yes"),
        ("fp16, M = 8: over the fastest peer", 16 / 1.3 / (12.5**2 * 12) ** (1 / 3), 16 / 1.3 / 12.5, None, "no"),
        ("fp16, M = 16: over the better of", 28 / 2 / (12.5**2 * 12) ** (1 / 3), 28 / 25, (2048, 2048), "yes"),
        ("fp16, M = 64: over bf16", None, 30 / 25, (8192, 8192), "yes"),
        ("fp16, M = 256: over bf16", None, 30 / 25, (2048, 2048), "yes"),
        ("M = 256: gemm over dequantizing", None, 30 / 25, (2048, 2048), ""),
        ("over the fastest GemLite W2", 2.0, 2.0, None, "yes"),
        ("W8A8, M = 512", (0.9 * 1.1 * 1.1) ** (1 / 3), 0.9, (2048, 2048), "no"),
    ],
)
def test_a_bar_is_what_its_rows_say(words, mean, worst, shape, holds):
    found = next(b for b in speed.bars(rows(), SHAPES) if words in b.what)
    assert found.found[1] == pytest.approx(worst) and found.holds == holds
    assert mean is None or found.found[0] == pytest.approx(mean, rel=1e-4)
    assert shape is None or found.found[2] == shape


def test_a_bar_without_all_its_rows_is_no_yes():
    assert bar("bf16, M = 64").holds == "not measured" and bar("bf16, M = 64").cells()[2] == ""
    some = [r for r in rows() if (r.provider, r.N) != ("awq_gemv", 8192)]
    assert bar("fp16, M = 1: over AWQ's gemv, carried", some).holds == "2 of 3 shapes"


def test_the_dispatchers_other_way_is_said_and_not_asked_to_be_fast():
    slow = {"us": 100.0, "p20": 99.0, "p80": 101.0}
    some = [dataclasses.replace(r, **slow) if (r.provider, r.M) == ("linear", 256) else r for r in rows()]
    assert bar("fp16, M = 256: over bf16", some).holds == "no"
    noted = [dataclasses.replace(r, note="by dequantize" if (r.N or 0) > 4096 else "by gemm") for r in some]
    assert bar("fp16, M = 256: over bf16", noted).holds == "no, 1 by the other way"
    noted = [dataclasses.replace(r, note="by dequantize") if r.provider == "linear" else r for r in some]
    found = bar("fp16, M = 256: over bf16", noted)
    assert found.holds == "yes, 3 by the other way" and found.found[1] == pytest.approx(0.3)


def test_recorded_times_stand_beside_those_that_were_carried_over():
    found = bar("fp16, M = 1: over AWQ's gemv, as recorded")
    assert found.values[4096, 4096] == pytest.approx(5.379 / 12.0) and found.holds == "no"


def test_warm_rows_and_failures_do_not_count():
    some = rows()
    some += [dataclasses.replace(r, mode="warm", us=1.0) for r in some if r.provider == "wna16_gemv"]
    some += [dataclasses.replace(r, status="oom", us=None, M=64) for r in some if r.provider == "tinygemm"]
    assert [b.cells() for b in speed.bars(some, SHAPES)] == [b.cells() for b in speed.bars(rows(), SHAPES)]


def test_the_verb_prints_the_table_and_draws(results, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speed.draw, "__defaults__", (results,))
    assert main(["speed", "--out", str(tmp_path / "figures")]) == 0
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(speed.bars(rows())) and len({line.count("|") for line in lines}) == 1
    assert "| at least 0.860 / 0.780 | 0.816 / 0.800 (8192 x 8192) | 2 of 15 shapes |" in said
    assert "NVIDIA H200, 2026-01-01, commit 0123456789, torch 2." in said
    names = [f"nvidia-h200-{name}" for name in ("bars.md", *(f"peers-m{m}.svg" for m in (1, 16, 64)), "roofline.svg")]
    folder = tmp_path / "figures"
    assert sorted(p.name for p in folder.iterdir()) == names
    before = {name: (folder / name).read_bytes() for name in names}
    assert main(["speed", "--out", str(folder)]) == 0
    assert {name: (folder / name).read_bytes() for name in names} == before
    for name in names[1:]:
        xml.etree.ElementTree.fromstring(before[name])
    assert b"recorded, carried over" in before[names[1]] and b"AWQ gemv" in before[names[1]]
    assert b"AWQ gemv" not in before[names[2]] and b"MARLIN" in before[names[2]]
    assert b"this project: W4A16" in before[names[4]] and b"reading 4.50 TB/s" in before[names[4]]
    assert re.search(rb"bf16 78[56]", before[names[4]])


def test_stale_rows_are_counted():
    fresh = bench.code("w4-g128/fp16/wna16_gemv")
    some = [row("w4-g128", "wna16_gemv", "fp16", shape, 1, 12.0, 10.0, code=fresh) for shape in SHAPES]
    assert "stale" not in speed.source(some)
    assert "1 of them are stale" in speed.source([*some, dataclasses.replace(some[0], code="00000000")])


def test_speedups_are_against_the_best_product_of_16_bits():
    ratios, recorded = speed.speedups(rows(), 1)
    assert ratios["this project"]["8192 x 8192"] == pytest.approx(26 / 12.5)
    assert ratios["AWQ gemv"]["8192 x 8192"] == pytest.approx(26 / 15) and ("AWQ gemv", "8192 x 8192") in recorded
    assert not ratios["MARLIN"] and not any(who == "this project" for who, _ in recorded)


def test_every_provider_that_is_named_exists():
    from repro.kernel_list import OURS

    known = {p.name for p in {**peers.PEERS, **OURS}.values()} | {provider for provider, *_ in bench.BRIDGED}
    kinds = {p.format for p in {**peers.PEERS, **OURS}.values()}
    named = {who for _, providers in speed.FAMILIES.values() for who in providers}
    named |= {who for _, _, providers, _ in speed.SERIES for who in providers}
    assert named <= known and {kernel for _, kernel, _, _ in speed.SERIES} <= kinds
    assert set(bench.CEILINGS) <= set(peers.PEERS)


def test_nothing_accepted_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="no accepted kernel times"):
        speed.draw(tmp_path, tmp_path / "none")


@pytest.mark.parametrize("path", sorted((bench.ROOT / "docs").glob("*-bars.md")), ids=lambda path: path.stem)
def test_the_published_bars_are_those_of_the_accepted_rows(path):
    mine = [r for r in kernel_rows.accepted() if kernel_rows.slug(r.device) == path.stem.removesuffix("-bars")]
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    assert lines == [line for line in speed.table(mine).splitlines() if line.startswith("|")]
