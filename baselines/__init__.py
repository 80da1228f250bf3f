"""Baselines that the papers compare with, one file each: `Config`, `CALIBRATED`, `apply(lm, calibration, config)`.

`CALIBRATED` says whether `apply` needs calibration tokens, unless a property `calibrated` of the config does;
`RESCALES`, if defined, that it changes weights before it quantizes them, and `PREPARES` that it only changes them, so
that a quantizer must follow; `KIND` = "compensator" that it runs after a quantizer and adds something to its layers.
A trained step has `work(config, sequences, quantized, count)`, which says what its training takes (`estimate.Work`).
"""

from repro.baselines import (
    aser,
    awq,
    bitdistiller,
    dns,
    e2e_qp,
    efficientqat,
    eora,
    gptq,
    group_qat,
    hqq,
    load,
    loftq,
    lqer,
    matquant,
    omniquant,
    paretoq,
    planted,
    q4_k,
    qera,
    rtn,
    smoothquant,
    spinquant,
    staged_ap,
    uniform,
)

BASELINES = {
    "rtn": rtn,
    "gptq": gptq,
    "dns": dns,
    "awq": awq,
    "hqq": hqq,
    "omniquant": omniquant,
    "smoothquant": smoothquant,
    "spinquant": spinquant,
    "efficientqat": efficientqat,
    "staged_ap": staged_ap,
    "e2e_qp": e2e_qp,
    "paretoq": paretoq,
    "bitdistiller": bitdistiller,
    "matquant": matquant,
    "group_qat": group_qat,
    "q4_k": q4_k,
    "lqer": lqer,
    "qera": qera,
    "eora": eora,
    "aser": aser,
    "loftq": loftq,
    "uniform": uniform,
    "planted": planted,
    "load": load,
}
