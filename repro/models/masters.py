"""Convert a run's any-precision master to a committed file.

    python -m repro.models.masters build/compress/…/FOLDER

It takes what the job of `bitbybit(any_precision=true, …)` on a pocket model left, checks that it holds block codes of 8
bits, scales, zeros and index lists and nothing else, and writes `repro/pocket/masters/MODEL.safetensors`, its line in
`repro/pocket/SHA256SUMS`, the spec that scores it at 8, 4 and 2 bits without training (`tables/bitbybit/master.yaml`)
and the one that draws its weights (`figures/bitbybit/master-weights.yaml`). Commit these four.
"""

import json
import sys
from pathlib import Path

from safetensors import safe_open

from repro import models
from repro.core.errors import UserError, sentence
from repro.core.files import HOME, atomic, check_replaceable, sha256, write_text

FOLDER, LIST, FILE = "masters", "SHA256SUMS", "data.safetensors"
MOST = 3_500_000  # bytes; with the pocket models 40 MB of weights at most are in the repository
DIGITS = 16  # of a file's SHA-256, that name it in a recipe
WIDTHS = """\
  16 bits: {{recipe: fp16}}
  8 bits: {{recipe: 'master(digest="{digest}")'}}
  4 bits: {{recipe: 'master(digest="{digest}") + sliced-w4'}}
  2 bits: {{recipe: 'master(digest="{digest}") + sliced-w2'}}
"""
TABLE = """# The committed master of {model} (made by: {recipe}), read at three widths: nothing is trained.
# Written by repro.models.masters.
title: The committed master at 8, 4 and 2 bits
rows:
{widths}models: [Llama-3.2-1B]
measure:
  WikiText-2: {{kind: perplexity, corpus: wikitext2, unit: ppl}}
  C4: {{kind: perplexity, corpus: c4, unit: ppl}}
extra_columns:
  BPW: {{kind: storage}}
scales: [pocket]
"""
FIGURE = """# Figure 3 of the committed master of {model}, computed where it is drawn. Written by repro.models.masters.
title: Distribution of weights of the committed master at several widths
series:
{widths}models: [Llama-3.2-1B]
measure: {{kind: histogram, show: weights, unit: "%"}}
across: {{kind: histogram, show: bins}}
points: axis
x: weight
y: weights in a bin, %
printed: "no numbers; the text says that dequantized weights collapse into few coarse clusters at low bits"
"""


def path(model: str) -> Path:
    """Where the master of a pocket model is, or would be."""
    return models.POCKET / FOLDER / f"{model}.safetensors"


def names() -> str:
    """The models that have one."""
    return ", ".join(sorted(file.stem for file in (models.POCKET / FOLDER).glob("*.safetensors"))) or "none"


def check(source: Path) -> dict[str, str]:
    """Its `meta`, if a file is the master of a pocket model and no more.

    Raises:
        UserError: it is not; the message says what is there instead.
    """
    try:
        with safe_open(source, "pt") as file:
            facts, keys = json.loads(file.metadata()["lowbit"]), list(file.keys())
    except Exception as error:  # a damaged file has many kinds
        raise UserError(f"{source}: not a compressed model ({error}); name the folder of a compress job") from None
    meta, layers = facts["meta"], facts["layers"]
    if "any_precision" not in meta.get("recipe", ""):
        raise UserError(
            f"{source}: made by {meta.get('recipe') or 'no recipe'}; a master is of bitbybit(any_precision=true)"
        )
    if not (models.POCKET / meta["model"] / "config.json").is_file():
        raise UserError(f"{source}: {meta['model']} is not a pocket model; only a pocket model's master is committed")
    models.check_fingerprint(meta["model"], meta["fingerprint"], source)
    narrow = [name for name, numbers in layers.items() if (numbers.get("bits"), numbers.get("shift")) != (8, 0)]
    if narrow or not layers:
        raise UserError(f"{source}: {narrow[0] if narrow else 'no layer'} has no codes of 8 bits; it is not a master")
    kinds = ("codes", "scales", "factor", "zeros", "index")
    more = [key for key in keys if key.rpartition("/")[2] not in kinds]
    if more or facts["dense"] or any(facts["attachments"].values()):
        odd = (more or facts["dense"] or ["attachments"])[0]
        raise UserError(f"{source}: it holds {odd}; a master is block codes, scales, zeros and index lists alone")
    if source.stat().st_size > MOST:
        raise UserError(f"{source}: {source.stat().st_size:,} bytes; a committed master has at most {MOST:,}")
    return meta


def commit(artifact: Path) -> list[Path]:
    """Write the files of a master from the folder of its job; the paths that are to be committed.

    Raises:
        UserError: as `check`, or somebody else's spec is in the place of one of them.
    """
    source = artifact / FILE if artifact.is_dir() else artifact
    meta = check(source)
    names = {"tables": "master", "figures": "master-weights"}  # one name in both would be taken for the figure
    specs = {kind: HOME / kind / "bitbybit" / f"{name}.yaml" for kind, name in names.items()}
    for spec in specs.values():
        check_replaceable(spec, "repro.models.masters:", _is_written_here)
    target, listed = path(meta["model"]), models.POCKET / LIST
    with atomic(target) as temporary:
        Path(temporary).write_bytes(source.read_bytes())
    digest, name = sha256(target), str(target.relative_to(models.POCKET))
    lines = [line for line in listed.read_text().splitlines() if not line.endswith(f"  {name}")]
    write_text(listed, "\n".join(sorted([*lines, f"{digest}  {name}"], key=lambda line: line[66:])) + "\n")
    given = {"model": meta["model"], "recipe": meta["recipe"], "digest": digest[:DIGITS]}
    given["widths"] = WIDTHS.format(**given)
    write_text(specs["tables"], TABLE.format(**given))
    write_text(specs["figures"], FIGURE.format(**given))
    return [target, listed, *specs.values()]


def _is_written_here(spec: Path) -> bool:
    """Whether a spec is one that this module wrote, by its first lines."""
    return b"ritten by repro.models.masters." in spec.read_bytes()[:400]


if __name__ == "__main__":
    try:
        if len(sys.argv) != 2:
            raise UserError(
                "give the folder of a compress job: python -m repro.models.masters build/compress/MODEL/FOLDER"
            )
        print(*commit(Path(sys.argv[1])), sep="\n")
    except UserError as error:
        print(sentence(error), file=sys.stderr)
        sys.exit(2)
