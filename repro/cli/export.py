"""Write a Llama as a GGUF file that llama.cpp loads."""

import argparse
from pathlib import Path


def options(parser: argparse.ArgumentParser) -> None:
    """The model and the file."""
    parser.add_argument("model")
    parser.add_argument("--recipe", default="fp16", help="fp16 or q4_k")
    parser.add_argument("--gguf", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument("--check", action="store_true", help="write nothing; check that the file holds this model")


def run(args: argparse.Namespace) -> None:
    """A model as a file of another program."""
    from repro.generation.export import export

    print(export(args.model, args.recipe, args.gguf, args.check))
