"""From specs and a profile to runs, and from runs to files: what the Snakefile asks. Nothing is computed here.

A run is a model and a recipe; its id names both and hashes its declared inputs, so that every table and protocol that
needs it shares it. Paths of outputs are relative to the working directory, sources are those of this checkout.
"""

import json
import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from repro import models, papers, profile, provenance, recipe, spec
from repro.errors import UserError, unknown
from repro.files import ROOT, short_hash, write_text

PYTHON = shlex.quote(sys.executable)
KINDS = (".csv", ".tex", ".md")
Place = tuple[str, str, str]  # row, col and model of a printed cell


@dataclass(frozen=True)
class Run:
    """A stand-in model under a recipe; `id` is its folder under build/runs."""

    model: str
    recipe: recipe.Recipe
    id: str

    @property
    def weights(self) -> str | None:
        """The compressed model; None for full precision."""
        return f"build/runs/{self.id}/weights.safetensors" if self.recipe.steps else None


class Workflow:
    """One profile's runs and the files that each rule needs.

    Where the profile's device is not there, or with `recorded`, nothing is run: cells are drawn from results/.
    """

    def __init__(
        self, config: Mapping[str, Any] | None = None, name: str | None = None, recorded: bool = False
    ) -> None:
        self.profile = profile.load(config, name)
        self.runs: dict[str, Run] = {}
        self.recorded = recorded or (self.profile.device == "cuda" and not has_cuda())

    # --- runs and protocols -------------------------------------------------------------------------------------------

    def run(self, model: str, text: str) -> Run:
        """The run of a stand-in under a recipe.

        Raises:
            UserError: unknown model or recipe.
        """
        p = self.profile
        parsed = recipe.parse(recipe.with_options(text, p.twin))
        inputs = [models.fingerprint(model), parsed.name, p.device, p.dtype, p.threads]
        if parsed.calibrated:
            inputs.append(asdict(p.calibration))
        slug = Path(model.split("@")[0]).name
        run = Run(model, parsed, f"{slug}/{parsed.slug}.{short_hash(json.dumps(inputs))}")
        return self.runs.setdefault(run.id, run)

    def stand_in(self, model: str) -> str | None:
        """What stands in for a paper's model in this profile; None where nothing does."""
        return self.profile.models.get(model)

    @cached_property
    def texts(self) -> list[str]:
        """The corpora of the perplexity protocol, each once."""
        return sorted(set(self.profile.corpora.values()))

    @cached_property
    def ppl(self) -> str:
        """The perplexity protocol as part of a file name."""
        return f"ppl-{short_hash(json.dumps([asdict(self.profile.perplexity), self.texts]))}"

    @cached_property
    def zs(self) -> str:
        """The zero-shot protocol as part of a file name."""
        return f"zeroshot-{short_hash(json.dumps(asdict(self.profile.zeroshot) if self.profile.zeroshot else None))}"

    def tokens(self, model: str, corpus: str) -> str:
        """The file of a corpus' token ids for a model."""
        return f"build/tokens/{models.tokenizer_key(model)}/{corpus}.safetensors"

    def scores(self, run: Run, corpus: str) -> str:
        """The file of per-window scores."""
        return f"build/runs/{run.id}/{self.ppl}/{corpus}.parquet"

    def items(self, run: Run) -> str:
        """The file of per-item zero-shot results."""
        return f"build/runs/{run.id}/{self.zs}.parquet"

    # --- what a table needs -------------------------------------------------------------------------------------------

    def cells(self, paper: str, number: str) -> list[tuple[str, str, spec.Column, str, Run | None]]:
        """(row, col, column, paper model, run) of every cell of a table that has a recipe; run None: no stand-in."""
        s = spec.table(paper, number)
        where: dict[tuple[str | None, str], dict[str, None]] = {}  # models of a row and column, or of a whole column
        for cell in papers.printed(paper, number):
            for row in (cell.row, None):
                where.setdefault((row, cell.col), {}).setdefault(cell.model)
        found = []
        for label, row, text in [*((row, row, text) for row, text in s.rows.items()), *((None, t, t) for t in s.extra)]:
            for col, column in s.columns.items():
                for model in where.get((label, col), ()):
                    name = self.stand_in(model)
                    found.append((row, col, column, model, self.run(name, text) if name else None))
        return found

    def source(self, column: spec.Column, run: Run) -> str | None:
        """The file that holds a cell's raw scores; None where this profile does not measure it, or not here.

        Raises:
            UserError: the spec names a corpus that the profile does not map.
        """
        if self.recorded or any(run.model in self.profile.recorded.get(step.name, ()) for step in run.recipe.steps):
            return None
        if column.measure == "zeroshot":
            return self.items(run) if self.profile.zeroshot else None
        if column.corpus not in self.profile.corpora:
            raise UserError(f"profile {self.profile.name}: {unknown('corpus', column.corpus, self.profile.corpora)}")
        return self.scores(run, self.profile.corpora[column.corpus])

    def table_inputs(self, paper: str, number: str, only: Collection[Place] | None = None) -> list[str]:
        """Spec, recorded results and raw scores of a table (of `only` some cells), each with its full precision."""
        spec.check_table(paper, number)
        wanted = []
        for row, col, column, model, run in self.cells(paper, number):
            if run and (only is None or (row, col, model) in only):
                wanted += [self.source(column, run), self.source(column, self.run(run.model, "fp16"))]
        path = spec.path_of(paper, number)
        printed = ROOT / "repro" / "papers" / paper / f"table{number}.csv"
        recorded = sorted((ROOT / "results").glob(f"*/{paper}-table{number}.csv"))
        return [
            *map(str, [printed, *([path] if path.is_file() else []), *recorded]),
            *dict.fromkeys(filter(None, wanted)),
        ]

    def headline_inputs(self) -> list[str]:
        """What tables/table1 needs: every paper's own Table 1, and the cells that the predicates name."""
        needed = []
        for claim in spec.headline().claims:
            named = {place for _, places in claim.places() for place in places.values()}
            needed += self.table_inputs(*claim.table.split("/"), named)
        first = [f"tables/{paper}/table1{kind}" for paper in papers.PAPERS for kind in KINDS]
        return [str(ROOT / "tables" / "table1.yaml"), *dict.fromkeys(needed), *first]

    def leaderboard_inputs(self) -> list[str]:
        """What tables/table2 needs: every cell that any spec measures."""
        return list(dict.fromkeys(f for paper, number in spec.specified() for f in self.table_inputs(paper, number)))

    def study_inputs(self, paper: str, name: str) -> list[str]:
        """What a study is drawn from."""
        from repro import study  # studies are made of runs

        return study.inputs(self, paper, name)

    def everything(self) -> list[str]:
        """Every table of the harness."""
        tables = [f"{paper}/table{number}" for paper in papers.PAPERS for number in papers.tables(paper)]
        tables += ["/".join(both) for both in spec.studies()]
        return [f"tables/{t}.tex" for t in (*tables, "table1", "table2", "audit")]

    # --- what each rule needs -----------------------------------------------------------------------------------------

    def the(self, run: str) -> Run:
        """The run with an id, once the specs are read.

        Raises:
            UserError: no spec of this profile leads to it.
        """
        if run not in self.runs:
            for paper, number in spec.specified():
                self.cells(paper, number)
            for model in set(self.profile.models.values()):
                self.run(model, "fp16")
        if run not in self.runs:
            raise unknown("run", run, self.runs)
        return self.runs[run]

    def code(self, verb: str, run: Run | None = None) -> list[str]:
        """The code files that decide what a verb makes; editing one of them rebuilds just that."""
        steps = [step.module.__file__ for step in run.recipe.steps] if run else []
        return [str(p) for p in provenance.closure(f"repro/jobs/{verb}.py", *map(str, steps))]

    def model_files(self, model: str) -> list[str]:
        """A local model's files."""
        return [str(p) for p in models.weight_files(model)]

    def model_of(self, tokenizer: str) -> str:
        """A stand-in that has the tokenizer of this key."""
        by_key = {models.tokenizer_key(m): m for m in self.profile.models.values()}
        if tokenizer not in by_key:
            raise unknown("tokenizer", tokenizer, by_key)
        return by_key[tokenizer]

    def options(self, **more: object) -> str:
        """The command-line options of a job: the profile's device, and `more`."""
        p = self.profile
        both = {"device": p.device, "dtype": p.dtype, "threads": p.threads} | more
        words = [
            f"--{key.replace('_', '-')} {shlex.quote(str(value))}" for key, value in both.items() if value is not None
        ]
        return " ".join([*words, *(["--hub"] if p.hub else [])])

    @cached_property
    def _parts(self) -> dict[str, Any]:
        from repro import study

        return {part.path: part for part in study.every(self)}

    def part(self, slug: str) -> Any:
        """The part of a study (`repro.study.Part`) that makes `build/studies/<slug>.parquet`.

        Raises:
            UserError: no study that this profile runs here has it.
        """
        path = f"build/studies/{slug}.parquet"
        if path not in self._parts:
            raise unknown("part of a study", slug, self._parts)
        return self._parts[path]

    def part_code(self, slug: str) -> list[str]:
        """The code files that decide a part of a study."""
        part = self.part(slug)
        return self.code("study", self.run(part.stand_in, next(iter(part.recipes.values()))))

    def part_options(self, slug: str) -> str:
        """The options of `repro study`."""
        part, p = self.part(slug), self.profile.perplexity
        words = self.options(model=part.stand_in, weights=part.base.weights, length=p.length, windows=p.windows)
        return f"{words} --recipes {shlex.join(part.recipes.values())}"

    def calibration(self, run: Run) -> list[str]:
        """The calibration tokens of a run whose recipe needs them."""
        return [self.tokens(run.model, self.profile.calibration.corpus)] if run.recipe.calibrated else []

    def start(self, run: Run) -> str | None:
        """The compressed model that the last step of a run's recipe goes on from; None where it starts anew."""
        return self.run(run.model, run.recipe.before).weights if run.recipe.before else None

    def compress_options(self, run: Run) -> str:
        """The options of `repro compress`."""
        c = self.profile.calibration
        more = asdict(c) | {"corpus": None, "calibration": (self.calibration(run) or [None])[0]}
        words = {"model": run.model, "recipe": run.recipe.name, "start": self.start(run)}
        return self.options(**words, **(more if run.recipe.calibrated else {}))

    def perplexity_options(self, run: Run) -> str:
        """The options of `repro perplexity`."""
        p = self.profile.perplexity
        more = {"length": p.length, "windows": p.windows, "kl_windows": p.kl_windows}
        return self.options(model=run.model, weights=run.weights, **more)

    def zeroshot_options(self, run: Run) -> str:
        """The options of `repro zeroshot`.

        Raises:
            UserError: the profile measures no zero-shot tasks.
        """
        z = self.profile.zeroshot
        if z is None:
            raise UserError(f"profile {self.profile.name} has no `zeroshot` section, so no task is measured")
        words = self.options(model=run.model, weights=run.weights, limit=z.limit, batch_size=z.batch_size)
        return f"{words} --tasks {' '.join(z.tasks)}"


def has_cuda() -> bool:
    """Whether torch sees a CUDA device here."""
    import torch

    return torch.cuda.is_available()


class Plain:
    """A `Workflow` as the Snakefile sees it: bad input ends Snakemake with one sentence and exit code 1."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._flow = plainly(Workflow, config)

    def __getattr__(self, name: str) -> Any:
        value = plainly(getattr, self._flow, name)
        return partial(plainly, value) if callable(value) else value


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; bad input is one sentence on stderr and the end."""
    try:
        return function(*args, **kwargs)
    except UserError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


def snakemake_options(config: Mapping[str, Any]) -> str:
    """How a job names the profile of this Snakemake call; one that came by --configfile is written down for it."""
    if not config:
        return f"--profile {profile.load().name}"
    text = json.dumps(config, indent=1, sort_keys=True, default=list) + "\n"
    path = Path("build") / f"profile-{short_hash(text)}.yaml"
    if not path.is_file():
        write_text(path, text)
    return f"--configfile {shlex.quote(str(path))}"
