"""The five papers' own ideas: one file per method, one line here. A method has the face of a baseline."""

from types import ModuleType

from repro.methods import spear

METHODS: dict[str, ModuleType] = {"spear": spear}
