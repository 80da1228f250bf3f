"""The benchmark of everything: rows as it goes, failures as rows, and what may enter results/."""

import dataclasses

import pytest
import torch
from fake_device import Fake

from repro import bench, timing
from repro.__main__ import main
from repro.bench import Row
from repro.errors import UserError
from repro.peers import PEERS, Provider, against

ORIGIN = {"device": "NVIDIA H200", "commit": "0123456789", "environment": "torch 2", "date": "2026-01-01"}


def provider(fake, name, form="w4-g128", cost=3e-6, wrong=1.0, reason=None, **more):
    """A provider on the fake device."""

    def prepare(layer, count):
        if name == "breaks":
            raise ValueError("K must be a multiple of 7")

        def launch(x, weight):
            y = torch.empty(x.shape[0], layer.rows)
            fake.run(lambda: y.copy_(wrong * x @ weight.T), cost * count)
            return y

        inputs = {"x": layer.activations(count, torch.float32), "weight": layer.weight}
        return inputs, launch, against(layer.weight)

    return Provider(name, form, lambda device: reason, prepare, tolerance=1e-5, **more)


@pytest.fixture
def device(monkeypatch):
    fake = Fake(l2=1 << 12)
    monkeypatch.setattr(timing, "COLD_BYTES", 0)
    floor = lambda nbytes: dataclasses.replace(  # noqa: E731
        provider(fake, "floor", cost=1e-6).task(bench_layer(), 1), nbytes=nbytes
    )
    everyone = [
        provider(fake, "torch.matmul", "bf16", 9e-6),
        provider(fake, "mine"),
        provider(fake, "wrong", wrong=1.5),
        provider(fake, "breaks"),
        provider(fake, "absent", reason="needs the package absent==1.0"),
        provider(fake, "few", most=1),
    ]
    copy = timing.measure([provider(fake, "copy").task(bench_layer(), 1)], fake)[0]
    return bench.Device("cpu", fake, floor, lambda: {"copy": copy}, {p.label: p for p in everyone}, ORIGIN)


def bench_layer():
    from repro.peers import Layer

    return Layer(32, 64, device="cpu")


def test_everything_is_a_row(device, tmp_path):
    out, said = tmp_path / "x.csv", []
    rows = bench.bench(out, [(32, 64), (64, 64)], (1, 4), say=said.append, device=device, rounds=3)
    assert [r.key for r in bench.from_csv(out)] == [r.key for r in rows]
    by = {(r.provider, r.N, r.M): r for r in rows}
    assert by["mine", 64, 4].us == pytest.approx(12.0) and by["mine", 64, 4].fraction == pytest.approx(1 / 12)
    assert by["mine", 32, 1].bytes == 32 * 64 * 4 and by["mine", 32, 1].relerr < 1e-5
    assert by["wrong", 32, 1].status == "wrong" and "off by 0.5" in by["wrong", 32, 1].note
    assert by["breaks", 32, 4].status == "unsupported" and "multiple of 7" in by["breaks", 32, 4].note
    assert by["absent", None, None].status == "unsupported" and "absent==1.0" in by["absent", None, None].note
    assert ("few", 32, 1) in by and ("few", 32, 4) not in by
    assert by["mine", 32, 1].code and by["mine", 32, 1].clock_mhz == 1980
    assert any("mine 3.00 us, 0.33 of the floor" in line for line in said)


def test_a_run_that_is_cut_leaves_a_whole_file(device, tmp_path):
    out = tmp_path / "x.csv"

    def cut(line):
        if line.startswith("64 x 64"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.bench(out, [(32, 64), (64, 64)], (1,), say=cut, device=device, rounds=3)
    assert {r.N for r in bench.from_csv(out)} == {None, 32} or {r.N for r in bench.from_csv(out)} == {32, None}
    assert [p.name for p in tmp_path.iterdir()] == ["x.csv"]


def test_only_takes_words_and_always_the_library(device, tmp_path):
    rows = bench.bench(tmp_path / "x.csv", [(32, 64)], (1,), only=["mine"], say=str, device=device, rounds=3)
    assert {r.provider for r in rows} == {"torch.matmul", "mine", "floor", "copy"} - {"floor", "copy"} | {
        r.provider for r in rows if r.N is None or r.kernel == r.provider
    }
    with pytest.raises(UserError, match="unknown provider 'mein'"):
        bench.bench(tmp_path / "x.csv", only=["mein"], device=device)


def good(**changes):
    row = Row("w4-g128", "wna16_gemv", "fp16", 4096, 4096, 1, "cold", "ok", 4.2, 4.1, 4.3, 8912896, 3.86, 0.92)
    row = dataclasses.replace(row, copy_fraction=0.5, relerr=2e-4, rounds=25, copies=23, **ORIGIN)
    return dataclasses.replace(row, **changes)


def written(path, *rows):
    path.write_text(bench.to_csv(rows))
    return path


def test_accept_merges_newer_rows_and_leaves_the_rest(tmp_path, capsys, monkeypatch):
    results = tmp_path / "results"
    monkeypatch.setattr(bench.accept, "__defaults__", (results,))
    assert main(["accept", str(written(tmp_path / "a.csv", good(), good(M=4)))]) == 0
    assert main(["accept", str(written(tmp_path / "b.csv", good(us=4.25, note="again")))]) == 0
    assert "1 rows into" in capsys.readouterr().out
    rows = bench.accepted(results)
    assert [(r.M, r.us, r.note) for r in rows] == [(1, 4.25, "again"), (4, 4.2, "")]
    assert (results / "nvidia-h200" / "kernels.csv").is_file()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"us": 1.8, "p20": 1.7}, r"less than the 1\.86 us that 4\.8 TB/s of memory allows"),
        ({"kernel": "bf16", "dtype": "bf16", "M": 4096, "bytes": 100, "us": 90.0, "p80": 90.0}, "990 T operations/s"),
        ({"us": None}, "us is empty"),
        ({"bytes": None}, "bytes is empty"),
        ({"p20": 4.25}, "is not between its p20 and p80"),
        ({"copies": 1}, "cold with 1 copy"),
        ({"commit": "0123456789+"}, "commit the code, then measure"),
        ({"commit": "unknown"}, "commit the code, then measure"),
        ({"device": ""}, "device is empty"),
        ({"date": ""}, "date is empty"),
        ({"mode": "tepid"}, "unknown mode"),
        ({"status": "wrong", "us": None, "note": "off by 3"}, "no measured row|its result is wrong"),
    ],
)
def test_what_is_not_accepted(tmp_path, changes, said):
    path = written(tmp_path / "a.csv", good(M=8), good(**changes))
    with pytest.raises(UserError, match=said):
        bench.accept(path, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_given_twice_and_nothing_measured(tmp_path):
    with pytest.raises(UserError, match="given twice"):
        bench.accept(written(tmp_path / "a.csv", good(), good()), tmp_path)
    with pytest.raises(UserError, match="no measured row"):
        bench.accept(written(tmp_path / "a.csv", good(status="oom", us=None)), tmp_path)


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda text: text.replace("provider", "who", 1), "its columns differ"),
        (lambda text: text[:-40], "cut short"),
        (lambda text: text.replace("4.2,", "fast,", 1), "us is 'fast', not a number"),
        (lambda text: text.replace("4.2,", "nan,", 1), "not finite"),
        (lambda text: text.replace(",ok,", ",great,"), "unknown status 'great'"),
        (lambda text: None, "no such file"),
    ],
)
def test_a_damaged_file_is_a_sentence(tmp_path, spoil, said):
    path = written(tmp_path / "a.csv", good())
    text = spoil(path.read_text())
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(UserError, match=said):
        bench.from_csv(path)


def test_without_a_gpu_it_says_so(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["bench", "--out", str(tmp_path / "x.csv")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert main(["bench", "--out", "x.csv", "--shapes", "4096*4096"]) == 2
    assert "write rows and columns as 4096x14336" in capsys.readouterr().err


def test_figures(tmp_path, capsys):
    library = dict(kernel="bf16", dtype="bf16", bytes=1 << 25, us=12.5, p20=12.4, p80=12.6)
    awq = good(provider="awq_gemv_g128", status="bridged", us=5.4)
    rows = [good(), good(provider="torch.matmul", **library), awq, good(N=8192, us=8.0, p80=9.0, bytes=17825792)]
    bench.accept(written(tmp_path / "a.csv", *rows), tmp_path / "results")
    ratios = bench.speedups(bench.accepted(tmp_path / "results"), 1)
    assert ratios == {
        "wna16_gemv fp16": {"4096 x 4096": pytest.approx(12.5 / 4.2)},
        "awq_gemv_g128 (recorded)": {"4096 x 4096": pytest.approx(12.5 / 5.4)},
    }
    drawn = bench.draw(tmp_path / "figures", tmp_path / "results")
    assert [p.name for p in drawn] == ["nvidia-h200-peers-m1.svg", "nvidia-h200-roofline.svg"]
    before = [p.read_bytes() for p in drawn]
    assert [p.read_bytes() for p in bench.draw(tmp_path / "figures", tmp_path / "results")] == before
    assert b"awq_gemv_g128 (recorded)" in before[0] and b"wna16_gemv (w4-g128, fp16)" in before[1]
    with pytest.raises(UserError, match="no accepted kernel times"):
        bench.draw(tmp_path, tmp_path / "none")


def test_labels_of_peers_are_known_to_the_guard():
    from repro import regress

    assert "/".join(regress.LIBRARY) in PEERS
