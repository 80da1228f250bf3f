"""Scales: what stands in for the papers' models and corpora, with which budgets, on which device.

`config/<name>.yaml` is read into `Scale`, strictly; these dataclasses are its schema. `base: other` takes the keys of
another scale that this one does not give. A key named after a kind of cell holds that kind's protocol. Scales are
written before the accepted runs that they judge.
"""

import difflib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from repro import papers
from repro.core.errors import UserError, shortened, unknown
from repro.core.files import HOME
from repro.core.strict import build, convert, load_yaml, shown
from repro.data import corpora
from repro.metrics import KINDS
from repro.recipes.recipe import parse
from repro.specs.scale_files import file_of, names  # noqa: F401  asked for here too

SHAPES = Path(__file__).parents[1] / "engine" / "shapes.yaml"  # by name; the engine itself imports torch
POOLS = 2**20  # seeds from here on are draws of training pools


@dataclass(frozen=True)
class Calibration:
    """The text that calibrated steps read: random crops of one corpus (GPTQ: 128 x 2048).

    Attributes:
        corpus: the text.
        sequences: number of crops. With `from_start`, a step with a budget of tokens reads as many as it needs.
        length: tokens per crop.
        seed: of the random crops.
        from_start: read the first sequences of the text in order instead of random crops.
    """

    corpus: str
    sequences: int
    length: int
    seed: int = 0
    from_start: bool = False

    def __post_init__(self) -> None:
        _check_corpus(self.corpus, "corpus")
        for name, least in {"sequences": 1, "length": 1, "seed": 0}.items():
            if not least <= getattr(self, name) < 2**31:
                raise UserError(f"{name} is {getattr(self, name)}; it must be {least} or more")

    def facts(self) -> dict[str, Any]:
        """The calibration as a job declares it."""
        facts = asdict(self)
        if not self.from_start:
            del facts["from_start"]
        return facts


def _check_corpus(name: str, where: str) -> None:
    try:
        corpora.entry(name)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


@dataclass(frozen=True)
class Pool:
    """A training text whose crops are the same for every seed of a cell; seeds change only order and random choices."""

    corpus: str
    sequences: int
    length: int
    draw: int = 0

    def under(self, seed: int) -> Calibration:
        """The calibration at a cell's seed: its own seed plus the cell's is always the pool's.

        Raises:
            UserError: as `Calibration`, or the cell's seed is too large.
        """
        return Calibration(self.corpus, self.sequences, self.length, POOLS + self.draw - seed)


@dataclass(frozen=True)
class Replicate:
    """What a build measures itself next to stored results.

    Attributes:
        windows: how many windows of each text, from its start.
        items: how many items of each task, from its start.
        tables: the tables in which `recipes` are replicated; of other tables only recipes that round.
        recipes: recipe to the stand-ins on which it is replicated.
        rows: table to row label to stand-ins: rows whose recipe has a learning rate that a sweep selects.
    """

    windows: int = 8
    items: int = 100
    tables: tuple[str, ...] = ()
    recipes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rows: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in {"windows": 1, "items": 2}.items():
            if not least <= getattr(self, name) < 2**31:
                raise UserError(f"{name} is {getattr(self, name)}; it must be {least} or more")
        for text in self.recipes:
            parse(text)


@dataclass(frozen=True)
class Scale:
    """One configuration of the whole harness.

    Attributes:
        models: what stands in for each of the papers' models: a pocket model, a local folder, `hub-id@revision`, or
            `hub` for the pin in config/hub.yaml. The papers' other spellings of a name are aliases there.
        corpora: the text that stands in for each of the papers' corpora (`wikitext2`, `c4`), by its own name.
        calibration_texts: likewise for cells whose spec names a calibration text; a text or a `Pool` of it.
        seeds: the most seeds of a cell that are run; None is all that a spec asks for.
        device: the device class that its cells are measured on; `any` is this machine's GPU, else its CPU.
        replicate: what a build measures itself, next to what is stored.
        grade: the grade of evidence from these stand-ins (A the paper's model and protocol, C a scaled analogue).
        threads: CPU threads of every job, whatever `--cores` is, so that results do not depend on it.
        training_threads: CPU threads, at least, of a job whose recipe trains.
        memory_mb: memory of a job, for a cluster's scheduler.
        hub: whether models and corpora may be fetched from the hub.
        protocols: metric to its protocol, from the keys that are named after metrics.
    """

    name: str
    about: str
    models: dict[str, str]
    corpora: dict[str, str]
    calibration: Calibration
    calibration_texts: dict[str, str | Pool] = field(default_factory=dict)
    seeds: int | None = None
    replicate: Replicate = field(default_factory=Replicate)
    grade: Literal["A", "B", "C"] = "C"
    device: Literal["any", "cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: int = 1
    training_threads: int = 1
    memory_mb: int = 4000
    hub: bool = False
    protocols: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, most in {"threads": 1024, "training_threads": 1024, "memory_mb": 10**8}.items():
            if not 1 <= getattr(self, name) <= most:
                raise UserError(
                    f"scale {self.name}: {name} is {getattr(self, name)}; it must be 1 or more, at most {most}"
                )
        if self.seeds is not None and self.seeds < 1:
            raise UserError(f"scale {self.name}: seeds is {self.seeds}; it must be 1 or more, or null")
        for key in ("corpora", "calibration_texts"):
            for paper, text in getattr(self, key).items():
                if isinstance(text, Pool):
                    text.under(0)
                else:
                    _check_corpus(text, f"{key}: {paper}")

    def stand_in(self, model: str) -> str | None:
        """The stand-in of a paper's model; None if it has none."""
        _, alias = hub_models()
        name = self.models.get(model) or self.models.get(alias.get(model, model))
        return pin(alias.get(model, model)) if name == "hub" else name

    def text(self, corpus: str) -> str:
        """The corpus that stands in for a paper's, or the corpus of that name or path itself.

        Raises:
            UserError: there is neither.
        """
        if corpus in self.corpora:
            return self.corpora[corpus]
        _check_corpus(corpus, f"scale {self.name}")
        return corpus

    def second_text(self, name: str) -> str:
        """The corpus of the second text that a step reads, by a paper's name of it or by its own.

        Raises:
            UserError: an unknown name.
        """
        known = {corpus: corpus for corpus in corpora.CORPORA} | self.calibration_texts
        if name not in known:
            raise UserError(f"scale {self.name}: {unknown('second text', name, known)}")
        text = known[name]
        return text.corpus if isinstance(text, Pool) else text

    def here(self) -> "Scale":
        """The same scale on the device class that its jobs run on here."""
        if self.device != "any":
            return self
        return self.on("cuda" if has_cuda() else "cpu")

    def on(self, device: str) -> "Scale":
        """The same scale on another device class."""
        return replace(self, device=device)

    def brief(self) -> "Scale":
        """The same scale with the protocols of a build: the first windows and items, and one seed.

        Budgets of calibration and training stay whole, so the compressed models are those of the stored results.
        """
        shortened = dict(self.protocols)
        for kind, protocol in self.protocols.items():
            if protocol is not None:
                shortened[kind] = KINDS[kind].brief(protocol, self.replicate)
        return replace(self, protocols=shortened, seeds=1)

    def calibrated_on(self, corpus: str, seed: int = 0) -> "Scale":
        """The same scale with a paper's corpus as calibration text at a cell's seed; empty keeps the scale's own."""
        text = self.calibration_texts[corpus] if corpus else self.calibration.corpus
        drawn = text.under(seed) if isinstance(text, Pool) else replace(self.calibration, corpus=text)
        return replace(self, calibration=drawn)

    def as_config(self) -> dict[str, Any]:
        """The keys of its file, nothing left out."""
        facts = asdict(self)
        protocols = facts.pop("protocols")
        return facts | protocols


@dataclass(frozen=True)
class PublicShape:
    """A Llama's shape; `kv` is the number of rows of k and of v, `tied` whether the head is the embedding."""

    layers: int
    hidden: int
    ffn: int
    kv: int
    vocab: int
    tied: bool = False

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(N, K) of every linear layer of the blocks."""
        square = (self.hidden, self.hidden)
        narrow = (self.kv, self.hidden)
        wide = (self.ffn, self.hidden)
        return self.layers * [square, narrow, narrow, square, wide, wide, wide[::-1]]

    @property
    def others(self) -> int:
        """All other parameters: embedding, head, norms."""
        return self.hidden * (self.vocab * (1 if self.tied else 2) + 2 * self.layers + 1)


@dataclass(frozen=True)
class Pin:
    """A model on the hub: `hub-id@revision`, the papers' other spellings of its name, and its shape where known."""

    pin: str
    spellings: tuple[str, ...] = ()
    shape: PublicShape | None = None


@cache
def pins() -> dict[str, Pin]:
    """The papers' models as config/hub.yaml has them."""
    return convert(dict[str, Pin], load_yaml(HOME / "config" / "hub.yaml"), "config/hub.yaml")


def shape(model: str) -> PublicShape | None:
    """The public shape of a paper's model, in any spelling; None where config/hub.yaml has none."""
    pin = pins().get(hub_models()[1].get(model, model))
    return pin.shape if pin else None


@cache
def hub_models() -> tuple[dict[str, str], dict[str, str]]:
    """From config/hub.yaml: model to `hub-id@revision`, and every other spelling to the model."""
    entries = pins()
    alias = {}
    for name, entry in entries.items():
        alias |= dict.fromkeys(entry.spellings, name)
    return {name: entry.pin for name, entry in entries.items()}, alias


def pin(model: str) -> str:
    """`hub-id@revision` of a paper's model.

    Raises:
        UserError: config/hub.yaml has none.
    """
    pins, _ = hub_models()
    if model not in pins:
        raise UserError(f"config/hub.yaml: {unknown('model', model, pins)}")
    return pins[model]


def load(config: Mapping[str, Any] | None = None, name: str | None = None, path: Path | None = None) -> Scale:
    """The scale of a config file, or `config/<name>.yaml` (default: $SCALE, else pocket), keys of `config` over it.

    Args:
        config: all keys of a scale, or some (`snakemake --config threads=2`).
        name: a scale in config/.
        path: a file with all keys; its name must be the scale's.

    Raises:
        UserError: unknown scale, key or value.
    """
    config = dict(config or {})
    if path is not None:
        config, where = _merged(_named(path), config), str(path)
    elif "name" in config and ("models" in config or "base" in config):  # a whole file, which Snakemake has read
        where = "the scale given by --configfile"
    else:
        file = file_of(config.pop("name", None) or name)
        where = f"config/{file.name}" + (" with --config" if config else "")
        config = _merged(_named(file), config)
    return _build(config, where)


def _named(path: Path) -> dict[str, Any]:
    """The keys of a scale's file, whose name must be its own."""
    data = load_yaml(path)
    if not isinstance(data, Mapping):
        raise UserError(f"{shown(path)}: not a scale; expected a mapping with keys of Scale")
    if data.get("name") != path.stem:
        problem = f"its name is {shortened(data['name'])!r}" if "name" in data else "key 'name' is missing"
        raise UserError(f"{shown(path)}: {problem}; a scale is named like its file, {path.stem!r}")
    return dict(data)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both, mappings key by key, as Snakemake merges `--config` into a file."""
    merged = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            merged[key] = _merged(below[key], above[key])
    return merged


def _build(data: Mapping[str, Any], where: str) -> Scale:
    merged = _over_base(data, where)
    protocols = {}
    for kind, metric in KINDS.items():
        if metric.PROTOCOL:
            protocol = merged.pop(kind, metric.DEFAULT)
            protocols[kind] = None if protocol is None else build(metric.PROTOCOL, protocol, f"{where}: {kind}")
    if "protocols" in merged:
        raise UserError(f"{where}: {unknown('key', 'protocols', {*merged, *protocols} - {'protocols'})}")
    scale = replace(build(Scale, merged, where), protocols=protocols)
    _check_spelling(scale.models, where)
    return scale


NEARLY = 0.8  # how alike two spellings are, of 1, where one is taken for a slip of the other


def _check_spelling(models: Mapping[str, str], where: str) -> None:
    """Raise where a key is nearly the name of a paper's model, but no name: its stand-in would stand for nothing.

    Names of one's own, for specs of one's own, are free.
    """
    known = _named_models()
    for name in models:
        if name in known or not difflib.get_close_matches(name, known, n=1, cutoff=NEARLY):
            continue
        specs = (HOME / "tables").glob("**/*.yaml")
        if not any(name in path.read_text(encoding="utf-8") for path in specs):
            raise UserError(f"{where}: models: {unknown('model', name, known)}")


@cache
def _named_models() -> frozenset[str]:
    """The models that papers print, in every spelling, and those with a public shape."""
    pinned, spellings = hub_models()
    found = {*pinned, *spellings, *load_yaml(SHAPES)}
    for paper in papers.PAPERS:
        for table in papers.tables(paper):
            found |= {cell.model for cell in papers.printed(paper, table) if cell.model}
    return frozenset(found)


def _over_base(data: Mapping[str, Any], where: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """A scale's keys over those of the one that its `base` names."""
    data = dict(data)
    base = data.pop("base", None)
    if base is None:
        return data
    above = (*above, data.get("name"))
    known = [name for name in names() if name not in above]
    if base not in known:
        raise UserError(f"{where}: base: {unknown('scale', base, known)}")
    file = file_of(base)
    return _over_base(_named(file), f"config/{file.name}", above) | data


def has_cuda() -> bool:
    """Whether torch sees a CUDA device here."""
    if importlib.util.find_spec("torch") is None:
        raise UserError("torch is not installed here; install requirements.lock")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asks the driver; workers can be forked afterwards
    import torch

    return torch.cuda.is_available()
