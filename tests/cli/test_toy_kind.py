"""A new kind of cell is one new file and one dict line: built, drawn, judged, accepted, and a command of its own."""

import json

import dag
import pandas as pd
import pytest

KIND = '''\
"""Bytes of every tensor that is stored for a model."""

from dataclasses import dataclass

import numpy as np
from safetensors import safe_open

from repro import models
from repro.jobs import compress
from repro.metrics.metric import Metric
from repro.store.job import make
from repro.store import observations
from repro.store.observations import Series


@dataclass(frozen=True)
class Protocol:
    """Tensors of at least so many bytes."""

    least: int = 1


@dataclass(frozen=True)
class Toy(Metric):
    """In `thousands`, or not."""

    VERSION = 1
    PROTOCOL = Protocol
    DEFAULT = {}

    thousands: bool = False
    unit: str = "bytes"

    def jobs(self, target):
        """One job a target."""
        least = target.scale.protocols["toy"].least
        needs = {"weights": compress.job(target)} if target.recipe.steps else {}
        inputs = target.inputs() | {"least": least}
        return {"sizes": make("toy", target.label, inputs, target.options() | {"least": least}, needs, target.steps)}

    @staticmethod
    def run(job, found, folder, origin):
        """Count."""
        given = job.parsed_options()
        files = [p for p in models.weight_files(given["model"]) if p.suffix == ".safetensors"]
        sizes = []
        for path in [found["weights"] / "data.safetensors"] if "weights" in found else files:
            with safe_open(path, "pt") as file:
                sizes += [file.get_tensor(name).nbytes for name in sorted(file.keys())]
        kept = np.asarray([size for size in sizes if size >= given["least"]], dtype=float)
        series = {"sizes": Series(kept, "items", given["recipe"])}
        observations.save(folder / observations.FILE, series, origin)

    def series(self, found, target):
        """The sizes."""
        return found["sizes"].series

    def value(self, mean):
        """The mean size."""
        return mean["sizes"] / (1000 if self.thousands else 1)
'''
SPEC = """\
title: bytes of a stored tensor
rows: {FP16: fp16, RTN: rtn-w4-pc}
models: [Llama-3.2-1B]
measure:
  bytes: {kind: toy}
  kB: {kind: toy, thousands: true, unit: kB}
claims:
  - claim: spear C002
    says: a stored tensor of a 4-bit model is smaller
    printed: nothing
    cells: {f: "FP16 |  | bytes", b: "RTN |  | bytes"}
    cases: [Llama-3.2-1B]
    quantity: b / f
    holds: "< 1"
"""
FIGURE = """\
title: bytes of every stored tensor
series: {FP16: fp16, RTN: rtn-w4-pc}
models: [Llama-3.2-1B]
measure: {kind: toy}
points: axis
x: tensor
y: bytes
"""
TOYS, PLOT = "tables/spear/toys.tex", "figures/spear/figure13.svg"


@pytest.mark.timeout(600)
def test_a_kind_is_one_file_and_one_dict_line(tmp_path):
    checkout = dag.folder(dag.copy_checkout(tmp_path / "source"))
    (checkout / "repro" / "metrics" / "toy.py").write_text(KIND)
    registry = checkout / "repro" / "metrics" / "__init__.py"
    text = registry.read_text().replace(
        "from repro.metrics.tpot import", "from repro.metrics.toy import Toy\nfrom repro.metrics.tpot import", 1
    )
    registry.write_text(
        text.replace('    "perplexity": Perplexity,\n', '    "perplexity": Perplexity,\n    "toy": Toy,\n', 1)
    )
    (checkout / "tables" / "spear" / "toys.yaml").write_text(SPEC)
    (checkout / "figures" / "spear" / "figure13.yaml").write_text(FIGURE)
    (checkout / "config" / "tiny.yaml").write_text(json.dumps(dag.SCALE | {"toy": {"least": 100}}))
    who = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org"]
    for words in (["git", "init", "-q"], ["git", "add", "-A"], [*who, "commit", "-q", "-m", "a toy"]):
        done = dag.run(words, checkout, checkout)
        assert done.code == 0, done.text

    done = dag.quick(dag.repro("make", TOYS, PLOT, "--cores", 2), checkout, checkout, timeout=500)
    assert done.code == 0, done.text
    frame = pd.read_csv(checkout / "tables/spear/toys.csv").set_index(["row", "metric"])
    assert set(frame["status"]) == {"ok"} and set(frame["source"]) == {"fresh"}
    full, small = (frame.loc[(row, "bytes")] for row in ("FP16", "RTN"))
    assert full["value"] > small["value"] > 100 and full["n"] == 20 and full["lo"] < full["value"] < full["hi"]
    assert frame.loc[("FP16", "kB"), "value"] == pytest.approx(full["value"] / 1000, rel=1e-6)
    sheet = (checkout / "tables/spear/toys.md").read_text()
    assert "spear C002: a stored tensor of a 4-bit model is smaller. Printed: nothing." in sheet
    assert "Holds on the stand-ins (1 of 1 case); grade C" in sheet and "Printed numbers" not in sheet
    drawn = pd.read_csv(checkout / "figures/spear/figure13.csv")
    assert drawn.groupby("series").size().to_dict() == {"FP16": 20, "RTN": int(small["n"])}
    assert (checkout / PLOT).stat().st_size > 1000

    done = dag.quick(dag.repro("accept", "tables/spear/toys.csv"), checkout, checkout)
    assert done.code == 0 and "4 rows into results/" in done.out, done.text
    (stored,) = checkout.glob("results/*/spear-toys.csv.xz")
    kept = pd.read_csv(stored).set_index(["row", "metric"])
    assert kept["value"].to_dict() == frame["value"].to_dict()
    done = dag.quick(dag.repro("toy", dag.MODEL, "--recipe", "rtn-w4-pc", "--thousands"), checkout, checkout)
    assert done.code == 0, done.text
    counted, measured = done.out.splitlines()
    assert counted == f"{int(small['n'])} items of rtn-w4-pc"
    assert measured.split()[0] == f"{small['value'] / 1000:.7g}"
