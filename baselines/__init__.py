"""What the papers compare with, one file per quantizer: `Config`, `CALIBRATED` and `apply(lm, calibration, config)`.

`CALIBRATED` says whether `apply` needs calibration tokens; `RESCALES`, where there is one, that it changes weights
before it quantizes them.
"""

from repro.baselines import awq, gptq, omniquant, rtn

BASELINES = {"rtn": rtn, "gptq": gptq, "awq": awq, "omniquant": omniquant}
