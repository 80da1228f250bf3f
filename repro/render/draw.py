"""Render one table, figure or page of a scale, as a rule of the workflow asks."""

import json

from repro.core.errors import logged
from repro.render import figure_files, page, table_files
from repro.specs import scale
from repro.workflow.workflow import Workflow

DRAWN = {"table": table_files.build, "figure": figure_files.build, "page": page.build}


def draw(config: str, what: str, name: str, log: str) -> None:
    """Write the files of a table, figure or page, what is printed to the file `log`.

    Args:
        config: the scale as JSON.
        what: of `DRAWN`.

    Raises:
        SystemExit: a sentence of what failed.
    """
    with logged(log, f"{what}s/{name}"):
        DRAWN[what](Workflow(scale.load(json.loads(config)), remember=True), name)
