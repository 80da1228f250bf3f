"""Compress a model."""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from repro.cli import options as common
from repro.core.errors import UserError
from repro.core.files import atomic, check_replaceable


def options(parser: argparse.ArgumentParser) -> None:
    """The model, its recipe, and a text of the user's own."""
    common.add_target(parser)
    about = "a copy of the compressed model (.safetensors); with --text a folder"
    parser.add_argument("--out", type=Path, help=about)
    about = "train or calibrate on this text (UTF-8), from its start, instead of the scale's"
    parser.add_argument("--text", type=Path, metavar="FILE", help=about)
    about = "tokens per sequence; default the model's context, at most 2048"
    parser.add_argument("--length", type=common.number(0), default=0, metavar="N", help=about)
    about = "resume an interrupted run in --out, or start it"
    parser.add_argument("--resume", action="store_true", help=about)


def run(args: argparse.Namespace) -> None:
    """A model under a recipe, with the scale's calibration text or one of the user's own."""
    from repro.jobs import compress
    from repro.workflow import own_text

    target = common.target(args, common.workflow(args, stored=False))
    if why := _not_run_by_the_engine(target):
        print(f"note: {why}; it can be compressed and measured, but generate cannot run it", file=sys.stderr)
    if args.text is not None:
        if args.out is None or args.out.suffix == ".safetensors":
            raise UserError("--text: name a folder for the result as well, --out FOLDER")
        own_text.compress(target, own_text.OwnText(args.text, args.length), args.out, args.resume)
        print(args.out)
        return
    if args.resume or args.length:
        raise UserError("--resume and --length go with --text FILE")
    job = compress.job(target)
    if args.out is not None and args.out.suffix != ".safetensors":
        raise UserError(f"--out {args.out}: a compressed model is a .safetensors file")
    if args.out is not None:
        _check_out(args.out)
    common.run_now([job])
    made = job.folder / compress.OUTPUTS[0]
    if args.out is not None:
        with atomic(args.out) as temporary:
            shutil.copyfile(made, temporary)
    print(args.out or made)


def _not_run_by_the_engine(target: Any) -> str:
    """Why the decode engine will not run what is compressed, said before hours go into it; empty where it will.

    Raises:
        UserError: the model's configuration does not load.
    """
    from repro.engine import weights
    from repro.generation.engine import configuration

    config = configuration(target)
    try:
        for step in target.recipe.steps:
            if hasattr(step.config, "group") and hasattr(step.config, "bits"):
                weights.slot(step.config.bits)
        weights.check(target.model, config, None)
    except UserError as error:
        return str(error)
    return ""


def _check_out(out: Path) -> None:
    """Raise where the file `out` is something that this command did not write, or would become part of a model."""
    from repro.models.lowbit import is_compressed_file
    from repro.workflow import own_text

    if (out.parent / "config.json").is_file():  # where every safetensors file belongs to the model
        raise UserError(f"--out {out}: {out.parent} is the folder of a model; choose another folder")
    if (out.parent / own_text.FACTS).is_file():
        raise UserError(f"--out {out}: {out.parent} is the folder of another compressed model; choose another folder")
    check_replaceable(out, "--out", is_compressed_file)
