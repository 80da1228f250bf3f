"""Times on this machine's GPU, a line of a CSV each, written as they come; lines that are there are not measured again.

python .ci/gpu_times.py times.csv      read rates, host times of a call, decode and prefill of public shapes
"""

import csv
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from repro.bench import bench
from repro.bench.kernel_list import load
from repro.generation import Engine
from repro.kernels import linear, read_floor, w8a8

COLUMNS = ("name", "value", "unit", "device", "commit", "environment", "date")
CALLS = 300  # of an operator, launched without waiting
MODELS = (("shape/Llama-3-8B", "fp16"), ("shape/Llama-3-8B", "rtn-w4-g128"), ("shape/Llama-3.2-1B", "rtn-w4-g128"))
Times = Iterator[tuple[str, Callable[[], float], str]]  # name, what measures it, unit


def read_rates() -> Times:
    """10^9 bytes a second of the fastest reader by size."""
    device = torch.device("cuda", torch.cuda.current_device())
    for power in (20, 22, 24, 26, 28, 30):
        yield f"read rate of {1 << power} bytes", lambda n=1 << power: read_floor.rate(n, device) / 1e9, "GB/s"


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds of the host for a call, in the best of seven rounds."""
    found = []
    for _ in range(7):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - began) / CALLS * 1e6)
        torch.cuda.synchronize()
    return min(found)


def host_times() -> Times:
    """The launch of operators on shapes whose kernels take less than that."""
    weight = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    packed = (
        load("w4a16_gemm")
        .random_weight({"N": 1024, "K": 1024, "bits": 4, "group": 128, "symmetric": False, "seed": 0})
        .to("cuda")
    )
    codes, scales = w8a8.quantize_weight(weight)
    for count in (1, 16, 64):
        x = torch.randn(count, 1024, device="cuda", dtype=torch.bfloat16)
        yield f"host, F.linear M = {count}", lambda x=x: host_us(lambda: F.linear(x, weight)), "us"
        yield f"host, linear.wna16 M = {count}", lambda x=x: host_us(lambda: linear.wna16(x, packed)), "us"
        yield f"host, w8a8 M = {count}", lambda x=x: host_us(lambda: w8a8.w8a8(x, codes, scales)), "us"
    for name in ("rms_norm", "silu_product", "rope_append", "attention", "argmax", "sample"):
        module = load(name)
        inputs = module.make_inputs(module.CASES[1 if name != "rope_append" else 0], "cuda")
        operator = getattr(torch.ops.lowbit, name).default
        yield f"host, {name}", lambda op=operator, inputs=inputs: host_us(lambda: op(**inputs)), "us"


def engine_times() -> Times:
    """Decode of one sequence, prefills of 2,048 tokens of one and of sixteen."""
    for model, recipe in MODELS:
        held: dict[str, Engine] = {}

        def engine(model: str = model, recipe: str = recipe, held: dict = held) -> Engine:
            if not held:
                held["it"] = Engine.load(model, recipe, context=2112, device="cuda")
                held["it"].time(128, 8)
            return held["it"]

        def decode(what: str, engine: Callable = engine) -> float:
            found = [engine().time(128, 128) for _ in range(3)]
            return getattr(min(found, key=lambda one: one.ms_p50), what)

        def prefill(batch: int, engine: Callable = engine) -> float:
            return min(engine().time(2048, 2, batch).prefill_s for _ in range(3)) * 1e3

        label = f"{model} {recipe}"
        yield f"{label}, decode after 128", lambda decode=decode: decode("ms_p50"), "ms"
        yield f"{label}, decode after 128, MBU", lambda decode=decode: decode("mbu"), ""
        yield f"{label}, prefill of 2,048", lambda prefill=prefill: prefill(1), "ms"
        yield f"{label}, prefill of 16 x 2,048", lambda prefill=prefill: prefill(16), "ms"
        held.clear()
        torch.cuda.empty_cache()


def transformers_prefill() -> Times:
    """Transformers' eager prefill of the 8B shapes in bf16, logits of the last token alone."""

    def measure() -> float:
        from transformers import AutoConfig, AutoModelForCausalLM

        from repro.generation.engine import SHAPES

        config = AutoConfig.for_model(**SHAPES["Llama-3-8B"])
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        ids, found = torch.randint(config.vocab_size, (1, 2048), device="cuda"), []
        with torch.inference_mode():
            for _ in range(4):
                torch.cuda.synchronize()
                began = time.perf_counter()
                model(ids, use_cache=True, logits_to_keep=1).logits.argmax().item()
                found.append(time.perf_counter() - began)
        return min(found) * 1e3

    yield "Transformers, Llama-3-8B bf16, prefill of 2,048", measure, "ms"


def main(path: Path) -> None:
    """Measure what the file does not have."""
    origin = bench.origin()
    known = set()
    if path.exists():
        with open(path, encoding="utf-8", newline="") as file:
            known = {row["name"] for row in csv.DictReader(file) if row["commit"] == origin["commit"]}
    with open(path, "a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        for times in (read_rates, engine_times, host_times, transformers_prefill):
            for name, measure, unit in times():
                if name in known:
                    continue
                began = time.perf_counter()
                try:
                    value = f"{measure():.5g}"
                except Exception as error:  # the others are measured all the same
                    value, unit = "failed", f"{type(error).__name__}: {error}"[:200]
                    print(name, unit, file=sys.stderr)
                else:
                    writer.writerow({"name": name, "value": value, "unit": unit} | origin)
                    file.flush()
                print(f"{name}: {value} {unit} ({time.perf_counter() - began:.1f} s)")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
