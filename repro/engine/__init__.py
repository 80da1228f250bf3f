"""One decode engine: a model under a recipe generates text, on a CPU, or on a GPU from packed weights with CUDA graphs.

Proofs: tests/test_engine.py and test_engine_equal.py on a CPU, test_engine_gpu.py on a GPU, test_engine_sparse.py on
both, and the last run of every prompt, chunk and batch on both in results/engine-equal.csv.

engine = Engine.load("pocket-10m", recipe="rtn-w4-g128", context=2048)
for piece in engine.generate("Once upon", max_new_tokens=64):
    print(piece, end="")
print(engine.stats)

engine.py    models by name, recipes, shapes (shapes.yaml)   core.py    what an engine can be asked
weights.py   packed and dense products, decoders             step.py    the plain step, its blocks and its cache
decoding.py  batches: prefill, steps, CUDA graphs            output.py  characters, stop strings, statistics
copies.py    layers with a copy at each of several widths    precision.py  switching between them while decoding
switching.py engines by name that switch             hosted.py   copies on the host, the next ones prefetched
order_file.py  what orders the layers, kept in a file

A model that is larger than the memory it may use: `Limited.load("pocket-10m", memory="8GiB", draft="subspec")`.

limited.py     such engines by name          budget.py       what a budget holds, by arithmetic
offload.py     streamed weights              speculate.py    draft trees, and what is accepted of them
substitute.py  a target and its draft        drafted.py      iterations with a draft
fit.py         what a budget gives           speculating.py  engines with a draft
limits.py      the limit on a GPU            traffic.py      when the bus copies
drafts.py      drafts that are models        ranked.py       dynamic trees
eagle.py       EAGLE-2's head and draft      shapes.py       shapes with random weights, also under a budget
"""

from typing import Any


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Engines, imported when first asked for: that takes seconds, and their jobs import this."""
    if name == "Engine":
        from repro.engine.engine import Engine

        return Engine
    if name == "SwitchingEngine":
        from repro.engine.switching import SwitchingEngine

        return SwitchingEngine
    if name == "Limited":
        from repro.engine.limited import Limited

        return Limited
    raise AttributeError(name)
