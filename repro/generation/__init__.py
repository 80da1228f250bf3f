"""Models by name that generate text: on a CPU, or on a GPU from packed weights with CUDA graphs.

engine = Engine.load("pocket-10m", recipe="rtn-w4-g128", context=2048)
for piece in engine.generate("Once upon", max_new_tokens=64):
    print(piece, end="")
print(engine.stats)

A model that is larger than the memory it may use: `Limited.load("pocket-10m", memory="8GiB", draft="subspec")`.

engine.py       models by name, recipes, shapes        limited.py      the same under a memory limit
switching_engine.py   the same with switching of precision   fit.py   what a memory budget gives
train_eagle.py  the draft head of EAGLE-2              train_pmpd.py   PMPD's scheduler
export.py       a model as a GGUF file
"""

from repro.generation.engine import Engine
from repro.generation.limited import Limited
from repro.generation.switching_engine import SwitchingEngine

__all__ = ["Engine", "Limited", "SwitchingEngine"]
