"""The five papers' own ideas: one file per method, one line here. Methods expose the same interface as baselines."""

from types import ModuleType

from repro.methods import spear
from repro.methods.spqt import sparsity as spqt
from repro.models.attachments import REGISTRIES

METHODS: dict[str, ModuleType] = {"spear": spear, "spqt": spqt}
REGISTRIES.append(METHODS)
