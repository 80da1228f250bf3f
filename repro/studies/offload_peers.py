"""What users would run instead of SubSpec, under one memory limit: `python -m repro.studies.offload_peers --out DIR`.

    accelerate            Transformers, with the blocks that do not fit offloaded by Accelerate
    accelerate-assisted   the same, with Transformers' assisted generation by a small model of the family
    llamacpp              llama.cpp's own llama-bench with part of the layers on the processor, from a GGUF file of the
                          shape in F16 (`--gguf`); `not_run` where the program or the file is not there
    llamacpp-calculated   what its two parts would take at least: the layers on the processor by the rate at which this
                          host reads memory, those on the GPU by the rate of its decode steps

Shapes have random weights: seconds a token without an assistant are real; with one, what random weights accept means
nothing, so that its time of a pass and its draft's are kept, and tokens a second are not.
DeepSpeed's and FlexGen's offloading aim at large batches and have no row.
"""

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from repro.core.errors import UserError
from repro.core.files import write_text
from repro.engine import budget
from repro.engine.limits import bound, device_bytes, limit, release
from repro.engine.shapes import SHAPES
from repro.generation import fit
from repro.store import provenance

PAIRS = {"Llama-3.1-8B": "Llama-3.2-1B"}  # shapes with a small one of the family that has a shape here
WARM, TIMED, PROMPT = 1, 5, 900  # tokens
SECONDS = 30  # of a generation, at most
# Of the limit for weights; the rest is for the cache, intermediate results and what streams. Accelerate keeps room for
# the largest module, a head of 1 GiB here, and what its allocator holds in pieces comes on top: the first that runs.
SHARES = (0.8, 0.7, 0.6, 0.5)
SHARE = SHARES[0]  # of llama.cpp, whose layers stay where they are
LLAMA_BENCH = "llama-bench"  # llama.cpp's program
HOST_READ = 2**30  # bytes over which the host's rate is measured: more than its caches hold


def main(words: Sequence[str] | None = None) -> None:
    """Measure what is not there yet; one JSON file each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the measurements")
    parser.add_argument("--shape", default="Llama-3.1-8B", choices=sorted(SHAPES), help="the target")
    parser.add_argument("--memory", default="8GiB", help="the limit")
    parser.add_argument("--gguf", type=Path, help="the shape in F16, for llama.cpp")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args(words)
    if importlib.util.find_spec("accelerate") is None:
        raise SystemExit("error: Accelerate is not installed; pip install accelerate")
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: this machine has no CUDA device; run it on a GPU")
    args.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Callable[[], dict[str, Any]]] = {
        "accelerate": lambda: measured(args.shape, args.memory, device, assisted=False),
        "llamacpp": lambda: llamacpp(args.shape, args.memory, args.gguf),
        "llamacpp-calculated": lambda: calculated(args.shape, args.memory, device),
    }
    if args.shape in PAIRS:
        rows["accelerate-assisted"] = lambda: measured(args.shape, args.memory, device, assisted=True)
    for row, measure in rows.items():
        path = args.out / f"{args.shape}-{row}.json"
        if path.is_file():
            continue
        try:
            facts = measure()
        except (UserError, RuntimeError) as error:  # too little memory has either kind
            facts = {"status": "oom", "why": " ".join(str(error).split())[:300]}
        facts |= {"device": provenance.device_name(device.type), "commit": provenance.commit()}
        write_text(path, json.dumps(facts, indent=1) + "\n")
        printed = {key: value for key, value in facts.items() if key != "seconds"}
        print(f"{path.stem}: {json.dumps(printed)}", flush=True)


def measured(shape: str, memory: str, device: torch.device, assisted: bool) -> dict[str, Any]:
    """Seconds of the target's passes in greedy generation under a limit.

    The largest of `SHARES` that runs is taken; a smaller one streams more.

    Returns:
        pass_s: the median of the timed passes of the target; seconds: all of them; resident: modules on the device;
        share: of the limit, for weights.

    Raises:
        torch.OutOfMemoryError: no share runs.
    """
    *larger, least = SHARES
    for share in larger:
        try:
            return generated(shape, memory, device, assisted, share)
        except torch.OutOfMemoryError:
            pass
        release()  # modules and their hooks hold one another
    return generated(shape, memory, device, assisted, least)


def generated(shape: str, memory: str, device: torch.device, assisted: bool, share: float) -> dict[str, Any]:
    """`measured` with a share of the limit for weights."""
    amount = budget.parse_bytes(memory)
    try:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        target = random_model(shape, dtype, device)
        assistant = random_model(PAIRS[shape], dtype, device) if assisted else None
        release()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        limit(device, amount)
        assistant_bytes = 0
        if assistant is not None:
            assistant_bytes = sum(p.nbytes for p in assistant.parameters())
            assistant.to(device)
        model, placed = offloaded(target, share * (amount - assistant_bytes), device)
        passes = Passes(model)
        ids = torch.randint(model.config.vocab_size, (1, min(PROMPT, model.config.max_position_embeddings // 2)))
        options = {"max_new_tokens": 1 + WARM + TIMED, "min_new_tokens": 1 + WARM + TIMED, "do_sample": False}
        options["max_time"] = SECONDS
        model.generate(ids.to(device), assistant_model=assistant, pad_token_id=0, **options)
        seconds = passes.seconds[1 + WARM :] or passes.seconds[-1:]  # one where time ended it
        resident = sum(where != "cpu" for where in placed.values())
        facts = {"pass_s": statistics.median(seconds), "seconds": seconds, "resident_modules": resident}
        if device.type == "cuda":
            facts |= {"device_bytes": device_bytes(device), "peak_bytes": torch.cuda.max_memory_allocated(device)}
        return facts | {"status": "ok", "budget_bytes": amount, "share": share, "modules": len(placed)}
    finally:
        bound(1.0, device)


def random_model(shape: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A shape in Transformers' form with random weights on the CPU, which a GPU draws in seconds."""
    from transformers import AutoModelForCausalLM  # takes seconds

    with device:
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype)
    return model.eval().to("cpu")


def offloaded(model: nn.Module, weights: float, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """A model that Accelerate splits between a device (`weights` bytes) and the host; and each module's device."""
    from accelerate import dispatch_model, infer_auto_device_map

    if device.type != "cuda":
        return model, {"": "cpu"}
    memory = {0: int(weights), "cpu": 10**13}
    placed = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=model._no_split_modules)
    return dispatch_model(model, placed, main_device=0), placed


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def llamacpp(shape: str, memory: str, gguf: Path | None) -> dict[str, Any]:
    """Seconds a token of llama.cpp with as many layers on the GPU as the limit holds.

    Raises:
        UserError: its program fails.
    """
    program = shutil.which(LLAMA_BENCH)
    if program is None:
        return {"status": "not_run", "why": f"llama.cpp is not installed: no {LLAMA_BENCH} on the path"}
    if gguf is None or not gguf.is_file():
        return {"status": "not_run", "why": f"no GGUF file of {shape} in F16; name one with --gguf"}
    layers = layers_on_device(shape, memory)
    words = [program, "-m", str(gguf), "-ngl", str(layers), "-p", "0", "-n", str(TIMED), "-r", "3", "-o", "json"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{LLAMA_BENCH} ended with {done.returncode}: {done.stderr.strip()[-200:]}")
    (row,) = json.loads(done.stdout)
    seconds = [count / 1e9 / TIMED for count in row["samples_ns"]]
    return {"status": "ok", "pass_s": statistics.median(seconds), "seconds": seconds, "layers_on_device": layers}


def calculated(shape: str, memory: str, device: torch.device) -> dict[str, Any]:
    """Seconds a token if weights are read where they are stored, from rates measured here; no such run was made.

    Returns:
        pass_s: bytes on the host over `host_bytes_per_s`, and bytes on the GPU over `device_bytes_per_s`; of the host's
            part alone where there is no GPU.
    """
    config = config_of(shape)
    layers = layers_on_device(shape, memory)
    block = sum(budget.block_sizes(config, torch.bfloat16))
    on_host = (config.num_hidden_layers - layers) * block
    on_device = layers * block + head_bytes(config)
    rates = host_read_rate(HOST_READ), fit.read_rate(device)
    pass_s = on_host / rates[0] + (on_device / rates[1] if device.type == "cuda" else 0.0)
    facts = {"status": "calculated", "pass_s": pass_s, "layers_on_device": layers}
    facts |= {"host_bytes": on_host, "device_bytes": on_device, "host_bytes_per_s": rates[0]}
    return facts | ({"device_bytes_per_s": rates[1]} if device.type == "cuda" else {})


def layers_on_device(shape: str, memory: str) -> int:
    """Blocks that fit with the head in `SHARE` of a limit."""
    config = config_of(shape)
    left = SHARE * budget.parse_bytes(memory) - head_bytes(config)
    block = sum(budget.block_sizes(config, torch.bfloat16))
    return max(0, min(config.num_hidden_layers, int(left // block)))


def head_bytes(config: Any) -> int:
    """Bytes of the head in 16 bits; the embedding stays on the host, as a token reads one row of it."""
    return 2 * config.vocab_size * config.hidden_size


def config_of(shape: str) -> Any:
    """A shape's configuration in Transformers' form."""
    from transformers import AutoConfig  # takes seconds

    return AutoConfig.for_model(**SHAPES[shape])


def host_read_rate(nbytes: int) -> float:
    """Bytes per second at which all threads of this process read memory that no cache holds: the best of five sums."""
    values = torch.ones(nbytes // 4)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - began)
    return nbytes / min(seconds)


# --- Transformers -----------------------------------------------------------------------------------------------------


class Passes:
    """Notes the seconds from one pass of a model to the next, the device waited for."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds: list[float] = []
        self._inner: Callable[..., Any] = model.forward
        model.forward = self._forward

    def _forward(self, *given: Any, **options: Any) -> Any:
        began = time.perf_counter()
        output = self._inner(*given, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - began)
        return output


if __name__ == "__main__":
    main()
