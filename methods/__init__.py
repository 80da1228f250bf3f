"""The five papers' methods: one file each, one line here. They expose the same interface as baselines."""

from types import ModuleType

from repro.methods import bitbybit, spear
from repro.methods.bitbybit import sliced
from repro.methods.spqt import sparse_inputs as spqt
from repro.models.attachments import REGISTRIES

METHODS: dict[str, ModuleType] = {
    "spear": spear,
    "spqt": spqt,
    "bitbybit": bitbybit,
    "sliced": sliced,
}
REGISTRIES.append(METHODS)
