"""Kernels with their cases, for tests that run all of them."""

from collections.abc import Iterable

from repro.bench.kernel_list import load


def every_case(names: Iterable[str]) -> list[tuple[str, dict]]:
    """The name of each kernel with each of its cases."""
    pairs = []
    for name in names:
        pairs += [(name, case) for case in load(name).CASES]
    return pairs
