"""Compress a model."""

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Any

from repro.cli import options as common
from repro.core.errors import NotMeasurable, UserError
from repro.core.files import atomic, check_replaceable

LONGEST = 2048  # tokens per sequence of --text, unless --length or the model's context says fewer


def options(parser: argparse.ArgumentParser) -> None:
    """The model, its recipe, and a text of the user's own."""
    common.add_target(parser)
    about = "a folder that takes the place of a model, or a copy of the weights (.safetensors)"
    parser.add_argument("--out", type=Path, help=about)
    about = "train or calibrate on this text (UTF-8), from its start, instead of the scale's"
    parser.add_argument("--text", type=Path, metavar="FILE", help=about)
    about = "tokens per sequence of --text; default the model's context, at most 2048"
    parser.add_argument("--length", type=common.number(0), default=0, metavar="N", help=about)
    about = "go on with an interrupted run, whose trained blocks lie in build/ (it does so without this option, too)"
    parser.add_argument("--resume", action="store_true", help=about)


def run(args: argparse.Namespace) -> None:
    """Compress a model, with the scale's calibration text or a text of the user's own."""
    from repro.jobs import compress, compressed_folder

    target = common.target(args, common.workflow(args, stored=False))
    if why := _not_run_by_the_engine(target):
        print(f"note: {why}; it can be compressed and measured, but generate cannot run it", file=sys.stderr)
    if args.text is not None:
        target = _on_text(target, args.text, args.length)
    elif args.length:
        raise UserError("--length goes with --text FILE")
    job = compress.job(target)
    to_folder = args.out is not None and args.out.suffix != ".safetensors"
    if to_folder and compressed_folder.is_of(args.out, job):
        print(args.out)
        return
    if args.out is not None and not to_folder:
        _check_out(args.out)
    if args.text is not None:
        _say_what_it_takes(target, job)
    _run(job)
    compressed_file = job.folder / compress.OUTPUTS[0]
    if to_folder:
        facts = compressed_folder.write(args.out, job)
        trained_tokens = sum(step["tokens"] for step in facts["steps"])
        size = f"{facts['bytes']:,} bytes, {facts['bits per block weight']:.3f} bits a block weight"
        print(f"{size}, {trained_tokens:,.0f} tokens of training")
    elif args.out is not None:
        with atomic(args.out) as temporary:
            shutil.copyfile(compressed_file, temporary)
    print(args.out or compressed_file)


def _run(job: Any) -> None:
    """Run the job. If it is interrupted, say how to resume it; if memory runs out, say what saves memory."""
    try:
        common.run_now([job])
    except KeyboardInterrupt:
        print("interrupted: the same command goes on after the last trained block", file=sys.stderr)
        raise
    except NotMeasurable as refused:
        if refused.status == "oom":
            raise UserError(f"{refused}; place=host in the recipe keeps hidden states in host memory") from None
        raise


def _on_text(target: Any, text: Path, length: int) -> Any:
    """The target whose steps are calibrated and trained on the first tokens of a text.

    Raises:
        UserError: the recipe takes no text, or the sequences are longer than the model's context.
    """
    from repro.train import training_cost

    if not target.recipe.calibrated:
        raise UserError(f"recipe {target.recipe.name!r} takes no text; leave --text out")
    config = training_cost.configuration(target.model, target.scale.hub)
    context = getattr(config, "max_position_embeddings", None) or LONGEST
    if length > context:
        raise UserError(f"--length {length}: longer than the model's context of {context}")
    facts = {"corpus": str(text.absolute()), "length": length or min(LONGEST, context), "from_start": True}
    calibration = dataclasses.replace(target.scale.calibration, **facts)
    return dataclasses.replace(target, scale=dataclasses.replace(target.scale, calibration=calibration))


def _say_what_it_takes(target: Any, job: Any) -> None:
    """Print tokens, memory and time of a training, before it begins.

    Raises:
        UserError: the text is too short for a step.
    """
    import torch

    from repro.data import corpora
    from repro.jobs import compress, tokens
    from repro.recipes import recipe
    from repro.train import training_cost

    crops = job.parsed_options()["calibration"]
    model = target.model
    scale = target.scale
    text = tokens.job(target, crops["corpus"])
    common.run_now([text])
    ids, _ = corpora.load_tokens(text.folder / tokens.OUTPUTS[0])
    steps = recipe.on_device(target.recipe.steps, scale.device)
    sequences = len(compress.first_sequences(ids, steps, crops))
    torch.set_num_threads(scale.threads)
    seconds = training_cost.block_seconds(steps, model, scale.hub, scale.device, scale.dtype, crops["length"])
    shape = training_cost.shape(model, scale.hub)
    size = getattr(torch, scale.dtype).itemsize
    cost = training_cost.estimate(steps, shape, sequences, crops["length"], size, scale.device)
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() if scale.device == "cuda" else None
    print(training_cost.report(cost, cost.token_blocks * seconds, free), flush=True)


def _not_run_by_the_engine(target: Any) -> str:
    """Why the decode engine cannot run the compressed model, known before hours go into it; empty if it can.

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
    """Raise if this command did not write the file `out`, or if the file would become part of a model."""
    from repro.jobs import compressed_folder
    from repro.models.lowbit import is_compressed_file

    if (out.parent / "config.json").is_file():  # where every safetensors file belongs to the model
        raise UserError(f"--out {out}: {out.parent} is the folder of a model; choose another folder")
    if (out.parent / compressed_folder.FACTS).is_file():
        raise UserError(f"--out {out}: {out.parent} is the folder of another compressed model; choose another folder")
    check_replaceable(out, "--out", is_compressed_file)
