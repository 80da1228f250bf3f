"""Kinds of cell: one file each, one line here. What a file has to name, and what it may, says `metric.Metric`.

A kind says what a spec may ask, which jobs it needs, how one runs, and what its observations give.
"""

from types import ModuleType

from repro.metrics import (
    acceptance,
    agreement,
    bench,
    block_error,
    by_error,
    curve,
    decode,
    derived,
    exam,
    histogram,
    kernel_time,
    likelihood,
    llamacpp,
    memory,
    offload_time,
    perplexity,
    placement,
    sensitivity,
    setting,
    shape_decode,
    similarity,
    sparsity,
    storage,
    surface,
    switching,
    timeline,
    token_class,
    tpot,
    training,
    weight_divergence,
    zeroshot,
)
from repro.metrics.metric import Metric

MODULES: dict[str, ModuleType] = {
    "perplexity": perplexity,
    "llamacpp": llamacpp,
    "zeroshot": zeroshot,
    "likelihood": likelihood,
    "exam": exam,
    "storage": storage,
    "memory": memory,
    "placement": placement,
    "sensitivity": sensitivity,
    "agreement": agreement,
    "similarity": similarity,
    "sparsity": sparsity,
    "by_error": by_error,
    "token_class": token_class,
    "training": training,
    "curve": curve,
    "block_error": block_error,
    "histogram": histogram,
    "surface": surface,
    "setting": setting,
    "derived": derived,
    "kernel_time": kernel_time,
    "decode": decode,
    "acceptance": acceptance,
    "offload_time": offload_time,
    "timeline": timeline,
    "shape_decode": shape_decode,
    "switching": switching,
    "weight_divergence": weight_divergence,
    "tpot": tpot,
    "bench": bench,
}


KINDS: dict[str, Metric] = {name: Metric(module) for name, module in MODULES.items()}
NONE = Metric()


def metric_of(kind: str) -> Metric:
    """The metric of a cell; one without jobs or values for a cell that nothing measures."""
    return KINDS.get(kind, NONE)
