"""Time of a prefill at the shape of Llama 3.1 8B, next to the peak, to Transformers, and to that of sixteen prompts.

    python -m repro.studies.prefill --out DIR     # on a GPU of 80 GB or more, about 100 s

Writes `DIR/prefill.json`: seconds of every call, of one prompt of 2,048 tokens and of sixteen together

    bf16, w4-g128   `Engine.time`: from the prompts' ids to every prompt's first token on the host
    transformers    the same of Transformers' model in bf16, launched by Python, its weights random, too (one prompt)
    ... on device   a CUDA graph of all that the engine launches until then (one prompt)

then says which of the targets hold. They take turns of a few calls each, of which the first ones do not count: at the
power cap a GPU's clock follows what ran in the tenths of a second before. The project's own times are in
`results/<device>/prefill.json`.

    bf16, w4        operations of the blocks' products over the wall time are at least 0.72 and 0.60 of an H200's 790e12
    transformers    one prompt in bf16 takes no longer than Transformers does
    batch           sixteen prompts take at most 16.5 times as long as one
    idle            the wall time of one prompt is at most 1.05 times that of the device alone
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from repro.bench import bench, timing
from repro.core.files import write_text
from repro.engine import prefill
from repro.engine.core import SHAPE, Core
from repro.engine.shapes import SHAPES
from repro.generation import Engine
from repro.kernels.argmax import argmax
from repro.studies.measurement_folder import file_of_command_line

MODEL = "Llama-3.1-8B"
RECIPES = {"bf16": "fp16", "w4-g128": "rtn-w4-g128"}  # activations are bfloat16 in both
TOKENS, PROMPTS = 2048, 16
TURNS = 3
BEFORE, CALLS = 4, 3  # calls of one prompt in a turn: that do not count, that do
BEFORE_BATCH, BATCHES = 1, 1  # of sixteen
PEAK = 790e12  # operations a second that a bf16 product reaches on an H200, by the issue that set the targets
SHARES = {"bf16": 0.72, "w4-g128": 0.60}
TIMES_OF_ONE = 16.5
IDLE = 1.05


def operations(tokens: int) -> float:
    """Operations of the products of all blocks with so many tokens; attention's are not counted."""
    shape = SHAPES[MODEL]
    hidden, heads, shared = (shape[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    attention = 2 * hidden * shape["head_dim"] * (heads + shared)  # queries and output; keys and values
    weights = attention + 3 * hidden * shape["intermediate_size"]
    return 2.0 * shape["num_hidden_layers"] * weights * tokens


def of_engine(engine: Core, prompts: int, tokens: int) -> float:
    """Seconds from random prompts to the first token of each."""
    return engine.time(tokens, 1, prompts).prefill_s


def of_transformers(model: Any, tokens: int) -> float:  # noqa: ANN401
    """Seconds from a random prompt to its first, greedy token, with keys and values kept for the steps after it."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=generator).tolist()
    began = time.perf_counter()
    with torch.inference_mode():
        prompt = torch.tensor(ids, device=model.device)
        logits = model(prompt, use_cache=True, logits_to_keep=1).logits
        logits[0, -1].argmax().item()
    return time.perf_counter() - began


def on_device(engine: Core, tokens: int, backend: timing.Cuda) -> Callable[[], float]:
    """A function that replays one prompt's prefill, head and greedy choice as a graph and returns its seconds."""
    model, cache = engine.model, engine.cache
    prompt = prefill.packed([list(range(tokens))], 0, model.device)
    groups = prefill.spans([tokens], 0)

    def whole() -> torch.Tensor:
        return argmax(model.head(prefill.forward(model, cache, prompt, groups)[-1:]))

    with torch.inference_mode():
        graph = backend.capture([whole])

    def replay(reads: tuple = (cache, prompt)) -> float:  # which a graph does not keep
        return graph.replay()

    return replay


def measure(before: int, count: int, calls: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Seconds of calls that take `TURNS` turns, each of `count` of them after `before` that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            for _ in range(before):
                call()
            for _ in range(count):
                seconds[name].append(float(f"{call():.5g}"))
    return seconds


def random_transformers(device: torch.device) -> Any:  # noqa: ANN401
    """Transformers' model of the shape in bfloat16 with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[MODEL]), dtype=torch.bfloat16)
    return model.eval()


def record(out: Path) -> dict[str, Any]:
    """Measure, and write the file."""
    backend, device = timing.Cuda(), torch.device("cuda")
    singles: dict[str, Callable[[], float]] = {}
    batches: dict[str, Callable[[], float]] = {}
    for name, recipe in RECIPES.items():
        engine = Engine.load(SHAPE + MODEL, recipe, TOKENS + 1, device="cuda", dtype="bfloat16")
        singles[name] = lambda engine=engine: of_engine(engine, 1, TOKENS)
        singles[f"{name} on device"] = on_device(engine, TOKENS, backend)
        batches[f"{name}, {PROMPTS} prompts"] = lambda engine=engine: of_engine(engine, PROMPTS, TOKENS)
    model = random_transformers(device)
    singles["transformers"] = lambda: of_transformers(model, TOKENS)
    content = {**bench.origin(), "tokens": TOKENS, "prompts": PROMPTS}
    content["seconds"] = measure(BEFORE, CALLS, singles) | measure(BEFORE_BATCH, BATCHES, batches)
    write_text(out, json.dumps(content, indent=1) + "\n")
    return content


def verdicts(content: Mapping[str, Any]) -> dict[str, str]:
    """Each target's figure in words, which begin with `holds` or `missed`."""
    seconds = {name: median(calls) for name, calls in content["seconds"].items()}
    words = {}

    def judge(target: str, holds: bool, figure: str) -> None:
        words[target] = f"{'holds' if holds else 'missed'}: {figure}"

    for name, least in SHARES.items():
        share = operations(content["tokens"]) / seconds[name] / PEAK
        figure = f"{seconds[name] * 1e3:.1f} ms, {share:.3f} of {PEAK / 1e12:.0f} T operations/s, {least} asked"
        judge(name, share >= least, figure)
    ratio = seconds["bf16"] / seconds["transformers"]
    judge("transformers", ratio <= 1, f"{ratio:.3f} of its {seconds['transformers'] * 1e3:.1f} ms")
    for name in SHARES:
        times = seconds[f"{name}, {content['prompts']} prompts"] / seconds[name]
        judge(f"batch, {name}", times <= TIMES_OF_ONE, f"{times:.2f} times one prompt, {TIMES_OF_ONE} allowed")
        idle = seconds[name] / seconds[f"{name} on device"]
        judge(f"idle, {name}", idle <= IDLE, f"{idle:.3f} times the device's time, {IDLE} allowed")
    return words


def main() -> None:
    """Record, then say which targets hold."""
    out = file_of_command_line(__doc__, "prefill.json")
    for target, words in verdicts(record(out)).items():
        print(f"{target}: {words}")


if __name__ == "__main__":
    main()
