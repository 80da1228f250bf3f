"""SpQt's kernels on a GPU: `python -m repro.studies.sparse --out DIR`.

A measurement is one JSON file in DIR, written as soon as it is there; what is there already is not measured again.
Random weights; times are cold, of CUDA graphs, and stand only where the output was right.

    check               every kernel on the cases of its file: the largest relative error, in units of what is allowed
    list-<K>            microseconds of the list of active inputs, half of them active, in order and as they arrive; and
                        of its producers with the list and without: RMSNorm, and SiLU times up
    gemv-<N>x<K>-<s>    products of a layer at s % sparsity, interleaved: dense in rows and zigzag, sparse with load
                        balance and without, naive; and the floor, the fastest reader of the listed columns
    even-<N>x<K>        from these: the sparsity from which on sparse is faster than the better dense, list included
    step-<shape>-<how>  tokens/s of a shape's engine after 128 tokens: bf16, rows, zigzag, sparse by percent, and SpQt's
                        baselines at 50 % (Table 2, Figure 7)

Full kernel tables and Figures 8 to 10 come from `python -m repro bench --only q4_k`.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from repro.bench import listed_reader, operator_tasks, timing
from repro.bench.kernel_list import OURS, SPARSITIES, load
from repro.bench.task import Layer
from repro.core.errors import NotMeasurable, UserError
from repro.engine import q4_k
from repro.engine.weights import LAYERS, SparseInputs
from repro.kernels.active_inputs import in_order
from repro.kernels.active_inputs import reference as listed
from repro.metrics.shape_decode import HOW, loaded
from repro.store import provenance
from repro.studies.measurement_folder import MeasurementFolder

LAYERS_TIMED = [(4096, 4096), (14336, 4096), (4096, 14336), (5120, 13824), (28672, 8192), (8192, 28672)]
COLUMNS = (4096, 8192, 14336, 28672)
SHAPES = ("Llama-3-8B", "Llama-2-7B", "Llama-2-13B", "Llama-2-70B")
PROMPT, NEW, ROUNDS = 128, 64, 3
LISTED_BY_PRODUCERS = ("qkv", "gate_up", "down")  # whose inputs a step's norms and gated product list


def main(words: Sequence[str] | None = None) -> None:
    """Measure what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the measurements")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="only measurements whose name contains one of these words"
    )
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        raise SystemExit("error: this machine has no CUDA device; run it on a GPU")
    failed = SparseBench(args.out, "cuda", timing.Cuda(), args.only).run()
    if failed:
        raise SystemExit(f"error: not measured: {', '.join(failed)}")


class SparseBench:
    """The measurements on one device."""

    def __init__(self, folder: Path, device: str, backend: timing.Cuda, only: Sequence[str] = ()) -> None:
        self.device = device
        self.backend = backend
        facts = {"device": provenance.device_name(device), "commit": provenance.commit()}
        self.files = MeasurementFolder(folder, facts, only)
        self.failed: list[str] = []

    def run(self) -> list[str]:
        """All measurements in order; the names of those that failed."""
        self.once("check", self.check)
        for columns in COLUMNS:
            self.once(f"list-{columns}", lambda k=columns: self.listing(k))
        for rows, columns in LAYERS_TIMED:
            for s in SPARSITIES:
                self.once(f"gemv-{rows}x{columns}-{s}", lambda n=rows, k=columns, s=s: self.products(n, k, s))
            self.once(f"even-{rows}x{columns}", lambda n=rows, k=columns: self.even(n, k))
        for shape in SHAPES:
            for how in HOW:
                self.once(f"step-{shape}-{how}", lambda n=shape, h=how: self.step(n, h))
        return self.failed

    def once(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """A measurement, unless its file is there; one that fails leaves none, and the others go on."""
        if not self.files.is_due(name):
            return
        try:
            self.files.write(name, measure)
        except (NotMeasurable, UserError, RuntimeError, ValueError, timing.Unsound) as error:
            self.failed.append(name)
            print(f"{name} failed: {' '.join(str(error).split())[:300]}", flush=True)
        finally:
            if self.device == "cuda":
                torch.cuda.empty_cache()

    def stored(self, name: str) -> dict[str, Any]:
        """A measurement that is there.

        Raises:
            UserError: it is not.
        """
        if not self.files.file(name).is_file():
            raise UserError(f"{name} is not measured")
        return self.files.read(name)

    # --- kernels ------------------------------------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """The largest error of each kernel over its cases, over what is allowed; a list's wrong entries."""
        errors: dict[str, float] = {}
        for name in ("active_inputs", *operator_tasks.PRODUCTS):
            module = load(name)
            for case in module.CASES:
                inputs = module.make_inputs(case, self.device)
                expected = module.reference(**inputs)
                result = getattr(torch.ops.lowbit, name)(**inputs)
                if name == "active_inputs":
                    errors[name] = max(errors.get(name, 0.0), float((in_order(result) != expected).sum()))
                    continue
                off = float((result.double() - expected.double()).norm() / expected.double().norm())
                errors[name] = max(errors.get(name, 0.0), off / operator_tasks.tolerance(name, expected.dtype))
        wrong = [name for name, off in errors.items() if not off <= (0 if name == "active_inputs" else 1)]
        if wrong:
            raise timing.Unsound(f"wrong: {', '.join(f'{name} ({errors[name]:.3g})' for name in wrong)}")
        return errors

    def listing(self, columns: int) -> dict[str, Any]:
        """Microseconds of a list of half of so many inputs."""
        case = {"K": columns, "share": 0.5, "dtype": "bfloat16", "seed": 0}
        tasks = []
        for ordered in (True, False):
            tasks.append(
                operator_tasks.task("active_inputs", case | {"ordered": ordered}, "active_inputs", self.device)
            )
        norm = {"T": 1, "H": columns, "residual": True, "threshold": 0.67, "dtype": "bfloat16", "seed": 0}
        product = {"T": 1, "F": columns, "threshold": 3.0, "dtype": "bfloat16", "seed": 0}
        for name, case_of_kernel in (("rms_norm", norm), ("silu_product", product)):
            tasks += [
                operator_tasks.task(kernel, case_of_kernel, kernel, self.device) for kernel in (name, f"{name}_active")
            ]
        names = ("ordered", "as they arrive", "norm", "norm with list", "product", "product with list")
        timings = timing.measure(tasks, self.backend, timing.WARM)
        return {"K": columns} | {f"{name} us": t.us for name, t in zip(names, timings)}

    def products(self, rows: int, columns: int, s: int) -> dict[str, Any]:
        """Microseconds of the products of one layer and of the reader of its listed columns."""
        layer = Layer(rows, columns, device=self.device)
        labels = {
            "dense rows": "q4_k/bf16/q4_k_gemv",
            "dense zigzag": "q4_k-zigzag/bf16/zigzag_gemv",
            "sparse": f"q4_k-zigzag-s{s}/bf16/zigzag_sparse",
        }
        if s == 50:
            labels |= {"without load balance": "q4_k-zigzag-s50/bf16/zigzag_masked"}
            labels |= {"naive": "q4_k-s50/bf16/q4_k_naive_sparse"}
        tasks = [OURS[label].task(layer, 1) for label in labels.values()]
        planes = {name: tasks[1].inputs[name] for name in ("codes", "headers")}
        x = layer.activations(1, torch.bfloat16)
        active = listed(x, x.abs().float().quantile(s / 100).item())
        readers = listed_reader.tasks(**planes, active=active)
        floor = timing.read_floors if self.device == "cuda" else None
        timings = timing.measure([*tasks, *readers], self.backend, floor=floor)
        by_name = dict(zip(labels, timings))
        least = min(timings[len(labels) :], key=lambda timing_of_reader: timing_of_reader.us)
        facts: dict[str, Any] = {"N": rows, "K": columns, "sparsity": s, "floor us": least.us, "floor": least.name}
        for name, t in by_name.items():
            facts |= {f"{name} us": t.us, f"{name} p20 p80": [t.p20, t.p80], f"{name} relerr": t.relerr}
            if t.floor_us:
                facts[f"{name} share of contiguous"] = t.fraction
        sparse = by_name["sparse"]
        facts |= {"sparse share of the floor": least.us / sparse.us, "listed bytes": sparse.nbytes}
        facts["contiguous us"] = sparse.floor_us
        return facts

    def even(self, rows: int, columns: int) -> dict[str, Any]:
        """The break-even sparsity: where a line through the sparse times meets the best dense time."""
        measured = {s: self.stored(f"gemv-{rows}x{columns}-{s}") for s in SPARSITIES}
        dense_rows = statistics.median(measured[s]["dense rows us"] for s in SPARSITIES)
        dense_zigzag = statistics.median(measured[s]["dense zigzag us"] for s in SPARSITIES)
        dense = min(dense_rows, dense_zigzag)
        nearest = min(COLUMNS, key=lambda k: abs(k - columns))
        with_list = self.stored(f"list-{nearest}")["ordered us"]
        times = [measured[s]["sparse us"] for s in SPARSITIES]
        slope, base = statistics.linear_regression(SPARSITIES, times)
        facts = {"dense us": dense, "list us": with_list, "us a percent": slope}
        for name, more in (("break-even", 0.0), ("break-even with list", with_list)):
            facts[f"{name} %"] = (dense - base - more) / slope if slope < 0 else None
        return facts

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, shape: str, how: str) -> dict[str, Any]:
        """Tokens a second of a shape, the best round; what a step reads, and how many launches its lists add."""
        recipe, method = HOW[how]
        engine = loaded(shape, recipe, method, PROMPT + NEW + 1, torch.device(self.device))
        lists = 0
        for block in engine.model.blocks:
            for name in LAYERS:
                product = getattr(block, name)
                sparse = isinstance(product, SparseInputs) and isinstance(product.dense, q4_k.Q4K)
                lists += sparse and (method == "naive" or (method == "listed" and name not in LISTED_BY_PRODUCERS))
        rounds = [engine.time(PROMPT, NEW) for _ in range(1 + ROUNDS)][1:]
        best = min(rounds, key=lambda stats: stats.ms_p50)
        facts = {"shape": shape, "recipe": recipe, "method": method, "lists": lists, "read_bytes": best.read_bytes}
        return facts | {"ms": best.ms_p50, "tokens/s": 1e3 / best.ms_p50, "rounds ms": [r.ms_p50 for r in rounds]}


if __name__ == "__main__":
    main()
