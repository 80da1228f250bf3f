"""The verbs of the command line, one file each; the first line of its docstring is its line in `--help`.

A verb is a module with

    options(parser)     adds its options
    run(args)           does it; the exit code, or None for 0

A metric with jobs of its own is a verb too (`measure.py`): its options are the fields of the metric.

`--help`, a typo and `show` start at once. So a verb imports what takes time (torch, Transformers, pandas) in `run`.
"""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
VERBS = (
    "make", "show", "list", "coverage", "verify", "accept", "prune", "run", "choose", "table", "generate", "fit",
    "export", "compress", "pretrain", "card", "bench", "tune", "regress",
)  # fmt: skip
RUNS = re.compile(r"^    def run\(", re.MULTILINE)


def summary(path: Path) -> str:
    """The first line of a module's docstring, read without importing it."""
    with open(path, encoding="utf-8") as file:
        first = file.readline()
    return first.strip().strip('"')


def kinds() -> dict[str, Path]:
    """The metrics that jobs of their own measure, with their files; found without importing them."""
    files = sorted((HERE.parent / "metrics").glob("*.py"))
    return {path.stem: path for path in files if RUNS.search(path.read_text(encoding="utf-8"))}


def verbs() -> dict[str, str]:
    """Every verb and its line in `--help`."""
    fixed = {name: summary(HERE / f"{name}.py") for name in VERBS}
    return fixed | {name: summary(path) for name, path in kinds().items()}
