"""List what can be built: tables, figures, scales, steps, models, metrics."""

import argparse

from repro import papers
from repro.papers.cell import table_name
from repro.specs import names


def options(parser: argparse.ArgumentParser) -> None:
    """This verb has no options."""


def run(args: argparse.Namespace) -> None:
    """Print what can be built: tables and figures with a spec, scales, recipes' steps, models, metrics."""
    from repro import models
    from repro.metrics import KINDS
    from repro.recipes import recipe
    from repro.specs import scale as scales

    rows = {
        "tables": [*(table_name(p, "table", n) for p, n in names.specified_tables()), *names.OWN],
        "figures": names.figures(),
        "pages": [f"docs/{paper}.md" for paper in names.pages()],
        "scales": scales.names(),
        "steps": sorted(recipe.STEPS),
        "models": models.pocket_names(),
        "metrics": list(KINDS),
        "papers": list(papers.PAPERS),
    }
    for title, texts in rows.items():
        print(f"{title:14} {', '.join(texts)}")
