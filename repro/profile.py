"""A profile says what stands in for the papers' models and corpora, with which budgets, on which device.

`config/<name>.yaml` is read into `Profile`, strictly; these dataclasses are its schema. `base: other` takes the keys of
another profile that this one does not give. Profiles are written before the accepted runs that they judge.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from repro.errors import UserError, unknown
from repro.files import ROOT
from repro.strict import build, load_yaml


@dataclass(frozen=True)
class Calibration:
    """What calibrated steps see: random crops of one corpus (GPTQ: 128 x 2048)."""

    corpus: str
    sequences: int
    length: int
    seed: int = 0


@dataclass(frozen=True)
class Perplexity:
    """GPTQ-style perplexity over the first `windows` windows (null: all); KL and top-1 over the first `kl_windows`."""

    length: int = 2048
    windows: int | None = None
    kl_windows: int = 4


@dataclass(frozen=True)
class ZeroShot:
    """lm-eval tasks on local data; `limit` items of each task (null: all)."""

    limit: int | None = None
    batch_size: int = 8
    tasks: tuple[str, ...] = tuple("piqa arc_easy arc_challenge hellaswag winogrande boolq lambada_openai mmlu".split())


@dataclass(frozen=True)
class Profile:
    """One configuration of the whole harness.

    Attributes:
        models: what stands in for each of the papers' models: a pocket model, a local folder, or `hub-id@revision`.
        recorded: step to the stand-ins under which it is not run here but drawn from accepted measurements of this
            profile, because it would take too long on this device.
        twin: step to options that it gets here, for a reduced run that still is one (`spear: {effort: 0.1}`); they are
            written into the recipe of every cell.
        judged_on: another profile, on whose accepted measurements a claim is judged that is not measured here.
        corpora: the text behind each of the papers' corpora (`wikitext2`, `c4`), by its own name.
        grade: what evidence from these stand-ins is worth (A the paper's model and protocol, C a scaled analogue).
        threads: CPU threads of every job, whatever `--cores` is, so that results do not depend on it.
        hub: whether models and corpora may be fetched from the hub.
    """

    name: str
    about: str
    models: dict[str, str]
    corpora: dict[str, str]
    calibration: Calibration
    perplexity: Perplexity = field(default_factory=Perplexity)
    zeroshot: ZeroShot | None = None
    recorded: dict[str, tuple[str, ...]] = field(default_factory=dict)
    twin: dict[str, dict[str, int | float | str]] = field(default_factory=dict)
    judged_on: str = ""
    grade: Literal["A", "B", "C"] = "C"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: int = 1
    hub: bool = False

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise UserError(f"profile {self.name}: threads is {self.threads}; a job needs at least 1")


def load(config: Mapping[str, Any] | None = None, name: str | None = None) -> Profile:
    """The profile in `config` (from `--configfile`), else `config/<name>.yaml`, else `$PROFILE`, else pocket.

    Raises:
        UserError: unknown profile, key or value.
    """
    if config:
        where = "the profile given by --configfile"
        return build(Profile, _over_base(config, where), where)
    name = name or os.environ.get("PROFILE") or "pocket"
    path = ROOT / "config" / f"{name}.yaml"
    if not path.is_file() or name not in names():
        raise unknown("profile", name, names())
    where = f"config/{name}.yaml"
    return build(Profile, _over_base(load_yaml(path), where, (name,)), where)


def _over_base(data: Any, where: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """A profile's keys over those of the one that its `base` names."""
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: not a profile; expected a mapping with keys of Profile")
    data = dict(data)
    base = data.pop("base", None)
    if base is None:
        return data
    known = [name for name in names() if name not in above]
    if base not in known:
        raise UserError(f"{where}: base: {unknown('profile', base, known)}")
    below = f"config/{base}.yaml"
    return _over_base(load_yaml(ROOT / "config" / f"{base}.yaml"), below, (*above, base)) | data


def names() -> list[str]:
    """The profiles that there are."""
    return sorted(p.stem for p in (ROOT / "config").glob("*.yaml") if p.stem != "pocket-models")
