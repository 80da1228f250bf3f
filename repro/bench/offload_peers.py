"""What users would run instead of SubSpec, under one memory limit: `python -m repro.bench.offload_peers --out DIR`.

    accelerate            Transformers, with the blocks that do not fit offloaded by Accelerate
    accelerate-assisted   the same, with Transformers' assisted generation by a small model of the family

Shapes have random weights: seconds a token without an assistant are real; with one, what random weights accept means
nothing, so that its time of a pass and its draft's are kept, and tokens a second are not.
DeepSpeed's and FlexGen's offloading aim at large batches and have no row. llama.cpp is not measured here.
"""

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from repro.engine import budget
from repro.engine.limits import bound, device_bytes, limit
from repro.engine.shapes import SHAPES
from repro.errors import UserError
from repro.files import write_text
from repro.record import provenance

PAIRS = {"Llama-3.1-8B": "Llama-3.2-1B"}  # shapes with a small one of the family that has a shape here
WARM, TIMED, PROMPT = 2, 10, 900  # tokens


def main(words: Sequence[str] | None = None) -> None:
    """Measure what is not there yet; one JSON file each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the measurements")
    parser.add_argument("--shape", default="Llama-3.1-8B", choices=sorted(SHAPES), help="the target")
    parser.add_argument("--memory", default="8GiB", help="the limit")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args(words)
    if importlib.util.find_spec("accelerate") is None:
        raise SystemExit("error: Accelerate is not installed; pip install accelerate")
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: this machine has no CUDA device; run it on a GPU")
    args.out.mkdir(parents=True, exist_ok=True)
    for assisted in (False, True):
        name = f"{args.shape}-accelerate{'-assisted' if assisted else ''}"
        path = args.out / f"{name}.json"
        if path.is_file() or (assisted and args.shape not in PAIRS):
            continue
        try:
            found = measured(args.shape, args.memory, device, assisted)
        except (UserError, RuntimeError) as error:  # too little memory has either kind
            found = {"status": "oom", "why": " ".join(str(error).split())[:300]}
        found |= {"device": provenance.device_name(device.type), "commit": provenance.commit()}
        write_text(path, json.dumps(found, indent=1) + "\n")
        print(f"{name}: {json.dumps({k: v for k, v in found.items() if k != 'seconds'})}", flush=True)


def measured(shape: str, memory: str, device: torch.device, assisted: bool) -> dict[str, Any]:
    """Seconds of the target's passes in greedy generation under a limit.

    Returns:
        pass_s: the median of the timed passes of the target; seconds: all of them; resident: modules on the device.
    """
    amount = budget.parse_bytes(memory)
    limit(device, amount)
    try:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        small = random_model(PAIRS[shape], dtype).to(device) if assisted else None
        own = 0 if small is None else sum(p.nbytes for p in small.parameters())
        model, placed = offloaded(random_model(shape, dtype), amount - own, device)
        passes = Passes(model)
        ids = torch.randint(model.config.vocab_size, (1, min(PROMPT, model.config.max_position_embeddings // 2)))
        options = {"max_new_tokens": 1 + WARM + TIMED, "min_new_tokens": 1 + WARM + TIMED, "do_sample": False}
        model.generate(ids.to(device), assistant_model=small, pad_token_id=0, **options)
        seconds = passes.seconds[1 + WARM :] or passes.seconds[1:]
        resident = sum(where != "cpu" for where in placed.values())
        found = {"pass_s": statistics.median(seconds), "seconds": seconds, "resident_modules": resident}
        if device.type == "cuda":
            found |= {"device_bytes": device_bytes(device), "peak_bytes": torch.cuda.max_memory_allocated(device)}
        return found | {"status": "ok", "budget_bytes": amount, "modules": len(placed)}
    finally:
        bound(1.0, device)


def random_model(shape: str, dtype: torch.dtype) -> nn.Module:
    """A shape in Transformers' form with random weights on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds

    config = AutoConfig.for_model(**SHAPES[shape])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def offloaded(model: nn.Module, amount: int, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """A model that Accelerate distributes over a device and the host, and where each module lies.

    A fifth of the amount is left for the cache, intermediate results and the largest module that streams.
    """
    from accelerate import dispatch_model, infer_auto_device_map

    if device.type != "cuda":
        return model, {"": "cpu"}
    whole = {0: int(0.8 * amount), "cpu": 10**13}
    placed = infer_auto_device_map(model, max_memory=whole, no_split_module_classes=model._no_split_modules)
    return dispatch_model(model, placed, main_device=0), placed


class Passes:
    """Notes the seconds from one pass of a model to the next, the device waited for."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds: list[float] = []
        self._inner: Callable[..., Any] = model.forward
        model.forward = self._forward

    def _forward(self, *given: Any, **options: Any) -> Any:
        began = time.perf_counter()
        found = self._inner(*given, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - began)
        return found


if __name__ == "__main__":
    main()
