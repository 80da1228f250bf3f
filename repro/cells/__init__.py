"""Kinds of cell: one file each, one line here. A kind says what a spec may ask, which jobs it needs, how one runs.

A kind is a module with

    Ask                      frozen dataclass, what a spec may say; `unit` is that of the value
    Protocol, DEFAULT        optional: the scale's part, under a key named like the kind, and what it is when absent
    brief(protocol, least)   optional: the protocol of a build's own measurement, on the first windows or items
    jobs(ask, target)        role to job; None where this scale does not measure it
    series(ask, found)       from observations by role, the series that decide the value; these are what is kept
    value(ask, mean)         the value from the means of these series, numbers or arrays
    reference(ask)           optional: whether the value compares with full precision on the same units by itself
    itself(ask)              optional: what full precision gives in that comparison, None where there is none
    against(ask)             optional: how it is read against full precision, such as `q / f`
    limits(ask)              optional: the least and the greatest value that there can be, where intervals end
    status(ask, full)        optional: `floor` or `ok`, from the series of full precision
    fewest_bits(cell, peers) optional: of the cells of other rows that which full precision has to be better than, by
                             more than its interval, for the cell not to be at chance
    exact(ask, steps, shape) optional: the value by arithmetic on the public shape of a model that nothing stands in for
    PUBLIC                   optional: always so, also where something stands in
    JOBLESS                  optional: it takes no job, and is fresh everywhere
    FULL_FIRST               optional: a recipe is run only where the status of full precision is not `floor`
    LATER                    optional: options of `Ask` that came after accepted results, with the value that changes
                             nothing, which is not declared
    lacking(ask)             optional: why it cannot be measured here; empty if it can
    run(job, found, folder, origin), OUTPUTS     where the kind has a job of its own
    TIMES                    optional: its job times what it runs, and nothing else runs on its GPU meanwhile
    absent(ask)              optional: why results of the kind's own have no number
    quantity(ask), several(ask), origin(asks)    instead of all but Ask, where results are the kind's own (kernel times)
"""

from types import ModuleType
from typing import Any

from repro.cells import (
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

KINDS: dict[str, ModuleType] = {
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


def lacking(kind: str, ask: Any) -> str:
    """Why a metric cannot be measured here, such as a package that is missing; empty if it can."""
    module = KINDS.get(kind)
    return module.lacking(ask) if hasattr(module, "lacking") else ""
