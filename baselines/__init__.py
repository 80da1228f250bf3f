"""The quantizers that the papers compare with, one file each: `Config`, `CALIBRATED`, `apply(lm, calibration, config)`.

`CALIBRATED` says whether `apply` needs calibration tokens; `RESCALES`, if defined, that it changes weights before it
quantizes them.
"""

from repro.baselines import awq, gptq, omniquant, rtn

BASELINES = {"rtn": rtn, "gptq": gptq, "awq": awq, "omniquant": omniquant}
