"""Bit-by-Bit's kernels on tiny layers: which files are written, who is in them, and what is right there."""

import dataclasses

import pytest
import torch
from fake_device import Host

pytest.importorskip("triton")

from repro.bench import (  # noqa: E402
    bench,
    kernel_list,
    peers,
    timing,
    two_bit,  # noqa: E402
)
from repro.bench.task import Layer  # noqa: E402
from repro.core.errors import UserError  # noqa: E402
from repro.store.kernel_rows import from_csv  # noqa: E402

ORIGIN = {"device": "NVIDIA H200", "commit": "0123456789", "environment": "torch 2", "date": "2026-01-01"}
INSIDE, READY = "w2a2-g32/bf16/w2a2_gemv", "w2a2-g32/bf16/w2a2_ready"
HALF, DENSE = "w2-g32/bf16/wna16_gemv", "bf16/bf16/dense_gemv"


@pytest.fixture
def device(monkeypatch):
    parts = {
        "table7": (((64, 96),), (1,), ("cold", "warm")),
        "figure6": (((48, two_bit.wider(96)),), (1,), ("cold",)),
        "tokens": (((48, 96),), (2, 4), ("cold",)),
    }
    monkeypatch.setattr(two_bit, "PARTS", parts)
    monkeypatch.setattr(Host, "release", lambda self: None, raising=False)
    who = {**peers.PEERS, **kernel_list.OURS}
    able = {n: dataclasses.replace(p, unavailable=lambda device: None) for n, p in who.items()}
    sections = []

    def ceilings():
        sections.append(1)
        task = able[peers.LIBRARY_LABEL].task(Layer(32, 64, device="cpu"), 1)
        return {"copy": timing.measure([dataclasses.replace(task, name="copy", facts={})], Host(), timing.WARM)[0]}

    made = bench.Device("cpu", Host(), lambda nbytes: [], ceilings, able, ORIGIN)
    monkeypatch.setattr(timing, "measure", without_floors(timing.measure))
    return made, sections


def without_floors(measure):
    """A processor has no reader, whose time would be the floor."""
    return lambda tasks, backend, mode, rounds=3, floor=None, *rest: [
        dataclasses.replace(t, floor_us=t.us) for t in measure(tasks, backend, mode, 3, None, *rest)
    ]


def test_every_file_has_everybody_and_none_is_measured_twice(device, tmp_path, capsys):
    bench_device, sections = device
    two_bit.run(tmp_path, bench_device)
    rows = {}
    for path in tmp_path.glob("*.csv"):
        rows[path.stem] = [row for row in from_csv(path) if row.N]
    assert rows.keys() == {"table7", "figure6", "tokens"} and len(sections) == 1
    everybody = {INSIDE, READY, HALF, DENSE, peers.LIBRARY_LABEL}
    for mode in ("cold", "warm"):
        assert {r.label for r in rows["table7"] if r.mode == mode and r.status == "ok"} == everybody
    assert {r.label for r in rows["tokens"]} == everybody - {DENSE} and {r.M for r in rows["tokens"]} == {2, 4}
    by_label = {r.label: r for r in rows["figure6"] if r.status == "ok"}
    assert by_label[INSIDE].K == 128 and by_label[INSIDE].bytes == by_label[READY].bytes == 6 * 1184 + 48 * 4
    assert by_label[HALF].bytes == 48 * 128 // 4 + 48 * 4 * 4 and by_label[DENSE].bytes == 2 * 48 * 128
    assert by_label[READY].relerr < 1e-6 and by_label[INSIDE].relerr < 3e-3
    capsys.readouterr()
    two_bit.run(tmp_path, bench_device, only=["figure"])
    again = capsys.readouterr().out
    assert "1 of 1 shapes and numbers of rows are there already" in again and "48 x 128, M = 1" not in again


def test_a_wrong_kernel_has_no_time_and_is_named(device, tmp_path):
    bench_device, _ = device
    for label in (INSIDE, READY):

        def prepare(layer, count, right=bench_device.providers[label].prepare):
            inputs, launch, want = right(layer, count)
            return inputs, lambda **call: launch(**call) * 1.01, want

        bench_device.providers[label] = dataclasses.replace(bench_device.providers[label], prepare=prepare)
    with pytest.raises(UserError, match=r"w2a2-g32/bf16/w2a2_gemv at 48 x 128: .* off by 0.0"):
        two_bit.run(tmp_path, bench_device, only=["figure"])
    assert {r.label for r in from_csv(tmp_path / "figure6.csv") if r.status == "wrong"} == {INSIDE, READY}


def test_w2a2_and_w2a16_hold_the_same_codes():
    layer = Layer(48, 96, device="cpu")
    tasks = {label: kernel_list.OURS[label].task(layer, 1) for label in (INSIDE, HALF)}
    w2a2, packed = tasks[INSIDE].inputs, tasks[HALF].inputs["packed"]
    weight = kernel_list.load("w2a2_gemv").form.dequantize(w2a2["units"], w2a2["factors"].double(), 3)
    whole = kernel_list.packing.dequantize(packed)
    torch.testing.assert_close(whole.double(), weight, rtol=2**-10, atol=0)


def test_a_tenth_more_columns_are_whole_groups():
    assert [two_bit.wider(k) for k in (3072, 8192, 4096, 14336)] == [3392, 9024, 4512, 15776]
    assert {len(shapes) * len(counts) * len(modes) for shapes, counts, modes in two_bit.PARTS.values()} == {24, 12, 36}
