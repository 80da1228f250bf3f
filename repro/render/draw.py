"""Render one table, figure or page of a scale, as a rule of the workflow asks."""

import json

from repro.core.errors import logged
from repro.render import table_files
from repro.specs import scale
from repro.workflow.workflow import Workflow


def _figure(flow: Workflow, name: str) -> None:
    from repro.render import figure_files  # with matplotlib, which takes half a second

    figure_files.build(flow, name)


def _page(flow: Workflow, name: str) -> None:
    from repro.render import page  # likewise, for its picture

    page.build(flow, name)


DRAWN = {"table": table_files.build, "figure": _figure, "page": _page}


def draw(config: str, kind: str, name: str, log: str) -> None:
    """Write the files of a table, figure or page, for a Snakemake rule.

    Args:
        config: the scale as JSON.
        kind: a key of `DRAWN`.
        name: of the table, figure or page.
        log: the file that gets the output.

    Raises:
        SystemExit: it failed; the message is one sentence.
    """
    with logged(log, f"{kind}s/{name}"):
        DRAWN[kind](Workflow(scale.load(json.loads(config)), remember=True), name)
