"""Train a pocket model from scratch; resumes after an interruption."""

import argparse
import json
from pathlib import Path

from repro.cli import options as common


def options(parser: argparse.ArgumentParser) -> None:
    """The model, its text, and where it is trained."""
    parser.add_argument("model")
    about = "folder of train-*.txt.xz; default $REPRO_DATA/corpus"
    parser.add_argument("--corpus", type=Path, help=about)
    parser.add_argument("--out", type=Path, default=Path("build/pretrain"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stop-after", type=common.number(0, float), default=float("inf"), metavar="SECONDS")
    about = "seed of initial weights and batches (default: the configured one)"
    parser.add_argument("--seed", type=common.number(0), help=about)


def run(args: argparse.Namespace) -> None:
    """Train a pocket model anew."""
    from repro.train import pretrain

    log = pretrain.command(args.model, args.corpus, args.out, args.device, args.stop_after, args.seed)
    print(json.dumps({key: log.get(key) for key in ("model", "step", "steps", "done", "tokens_per_s", "mfu")}))
