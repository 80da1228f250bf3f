"""The command line: `python -m repro VERB --help` lists the options. Bad input is one sentence and exit code 2."""

import argparse
import dataclasses
import os
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from repro import __version__
from repro.errors import UserError, sentence, shortened, unknown


class Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong with the options, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        """What argparse calls when the options do not fit."""
        raise UserError(f"{shortened(message, 300)}; {self.prog} --help lists the options")


def _shape(text: str) -> tuple[int, int]:
    """`4096x14336` as (N, K)."""
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is no shape; write rows and columns as 4096x14336")
    return int(rows), int(columns)


def _number(least: int, kind: type = int) -> Callable[[str], int | float]:
    """Reads a number of at least `least`, and at most what 31 bits hold."""

    def read(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not least <= value < 2**31:  # also of NaN
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{shortened(text)!r} is not {what} of {least} or more")
        return value

    return read


def parser() -> argparse.ArgumentParser:
    """The verbs and their options."""
    from repro import verbs  # imports torch, which `--version` does not need
    from repro.cells import KINDS

    top = Parser(prog="python -m repro", description="Rebuild tables and figures of low-bit LLM papers.")
    top.add_argument("--version", action="version", version=f"lowbit-repro {__version__}")
    subparsers = top.add_subparsers(dest="verb", metavar="VERB")

    def verb(
        name: str, run: Callable[[argparse.Namespace], Any], text: str, *, scale: bool = False
    ) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        if scale:
            sub.add_argument("--scale", help="config/<name>.yaml; default $SCALE, else pocket")
            sub.add_argument("--configfile", type=Path, help="a scale file instead of a name")
            sub.add_argument("--config", nargs="+", metavar="KEY=VALUE", help="single keys over the scale")
        return sub

    v = verb("make", verbs.make, "build targets with Snakemake and print the tables among them", scale=True)
    v.add_argument("targets", nargs="+")
    v.add_argument("--cores", type=_number(1), default=os.cpu_count() or 1)
    v = verb("show", verbs.show, "print a built table: table1, spear/table1, …")
    v.add_argument("table")
    verb("list", verbs.listed, "what can be built: tables, figures, scales, steps, models, kinds of cell")
    v = verb("coverage", verbs.coverage, "measured and printed cells of every table and data figure", scale=True)
    v.add_argument("--csv", action="store_true")
    v = verb("plan", verbs.plan, "jobs, minutes, downloads and disk of a target, without running it", scale=True)
    v.add_argument("targets", nargs="+")
    v = verb("verify", verbs.verify, "rebuild tables in a clean folder and compare with what is recorded", scale=True)
    v.add_argument("tables", nargs="*")
    v = verb("accept", verbs.accept, "take a built table's measurements into results/, recomputed and checked")
    v.add_argument("file", type=Path)
    about = "replay a few recorded cells whose code has changed; byte-equal ones carry their group forward"
    v = verb("attest", verbs.attest, about)
    v.add_argument("--cells", type=_number(1), default=3, help="cells replayed per group; default 3")
    v.add_argument("--scale", help="only results of this scale")
    v.add_argument("--side-by-side", type=_number(0), default=0, metavar="N", help="workers; default by device")
    about = "run the jobs of tables and figures side by side, without Snakemake; resumes"
    v = verb("run", verbs.run, about, scale=True)
    v.add_argument("targets", nargs="+", help="spear/table1, spear/figure13, or a file of jobs")
    v.add_argument("--side-by-side", type=_number(1), default=1, metavar="N", help="worker processes")
    about = "GPUs that the workers are spread over, by MPS where allowed"
    v.add_argument("--gpus", type=_number(0), default=0, help=about)
    v.add_argument("--minutes", type=_number(0, float), default=0.0, help="start no job after that many; 0 is no limit")
    v.add_argument("--recorded", action="store_true", help="the cells that this scale takes from accepted results")
    v.add_argument("--missing", action="store_true", help="only what no accepted result of the scale stands for")
    v.add_argument("--dry-run", action="store_true", help="print the jobs")
    v.add_argument("--save", type=Path, metavar="FILE", help="write the jobs to a file, for another machine")
    v = verb("table", verbs.table, "write a table or figure from what is built here, without Snakemake", scale=True)
    v.add_argument("table")
    v.add_argument("--built", action="store_true", help="also for a device that is not here")

    v = verb("generate", verbs.generate, "stream a model's text, then one line of numbers: tokens/s, ms, MBU, memory")
    v.add_argument("prompt", nargs="?", help="the text to go on with; without it standard input")
    v.add_argument("--file", type=Path, help="a file with the prompt")
    v.add_argument("--model", required=True, help="pocket-10m, a local folder, hub-id@revision")
    v.add_argument("--recipe", default="fp16", help="such as 'rtn-w4-g128 + spear'; built now if it is not yet")
    v.add_argument("--no-build", dest="build", action="store_false", help="do not build a recipe; say the command")
    v.add_argument("--scale", help="whose calibration text a recipe is built with; default $SCALE, else pocket")
    v.add_argument("--context", type=_number(1), help="tokens of prompt and answer; default the model's, at most 2048")
    v.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    about = "default: the checkpoint's, float32 on a CPU without it"
    v.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help=about)
    v.add_argument("--chat", action="store_true", help="the prompt is a user's message in the tokenizer's template")
    v.add_argument("--max-new-tokens", type=_number(1), metavar="N", help="default: until the context is full")
    v.add_argument("--temperature", type=_number(0, float), default=0.0, help="0, the default, is greedy")
    v.add_argument("--top-k", type=_number(0), default=0)
    v.add_argument("--top-p", type=_number(0, float), default=1.0)
    v.add_argument("--seed", type=_number(0), default=0)
    v.add_argument("--stop", nargs="+", default=(), metavar="TEXT", help="texts that end the answer")

    v = verb("export", verbs.export, "write a Llama as a GGUF file that llama.cpp loads")
    v.add_argument("model")
    v.add_argument("--recipe", default="fp16", help="fp16 or q4_k")
    v.add_argument("--gguf", type=Path, required=True, metavar="FILE", help="the file to write")
    v.add_argument("--check", action="store_true", help="write nothing: does the file hold this model?")

    for name, module in {"compress": None, **{k: m for k, m in KINDS.items() if hasattr(m, "run")}}.items():
        about = "compress a model" if module is None else module.__doc__.partition("\n")[0]
        v = verb(name, verbs.measure if module else verbs.compress, about, scale=True)
        v.add_argument("model")
        v.add_argument("--recipe", default="fp16", help="such as 'gptq-w4-g128' or 'rtn-w4-pc + spear'")
        v.add_argument("--seed", type=_number(0), default=0)
        if module is None:
            v.add_argument(
                "--out", type=Path, help="a copy of the compressed model (.safetensors); with --text a folder"
            )
            about = "train or calibrate on this text (UTF-8), from its start, instead of the scale's"
            v.add_argument("--text", type=Path, metavar="FILE", help=about)
            about = "tokens of a sequence of it; default the model's context, at most 2048"
            v.add_argument("--length", type=_number(0), default=0, metavar="N", help=about)
            about = "go on with --out where an interrupted run stopped; starts it where there is none"
            v.add_argument("--resume", action="store_true", help=about)
            continue
        hints = typing.get_type_hints(module.Ask)
        for field in dataclasses.fields(module.Ask):
            options: dict = {"required": field.default is dataclasses.MISSING}
            if typing.get_origin(hints[field.name]) is tuple:
                options |= {"nargs": "+"}
            elif typing.get_origin(hints[field.name]) is typing.Literal:
                options |= {"choices": typing.get_args(hints[field.name])}
            elif hints[field.name] is bool:
                options = {"action": "store_true", "default": None}
            elif hints[field.name] is int:
                options["type"] = _number(0)
            v.add_argument(f"--{field.name}", **options)

    v = verb("pretrain", verbs.pretrain, "train a pocket model anew; resumes where it was stopped")
    v.add_argument("model")
    v.add_argument("--corpus", type=Path, help="folder of train-*.txt.xz; default $REPRO_DATA/corpus")
    v.add_argument("--out", type=Path, default=Path("build/pretrain"))
    v.add_argument("--device", default="cuda")
    v.add_argument("--stop-after", type=_number(0, float), default=float("inf"), metavar="SECONDS")
    v.add_argument("--seed", type=_number(0), help="another draw of initial weights and batches than the configured")
    v = verb("sample", verbs.sample, "sample the embedded text from the largest pocket model and freeze it")
    v.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    v = verb("card", verbs.card, "measure the pocket models and write their card, repro/pocket/README.md")
    v.add_argument("--device", default="cpu", choices=["cpu", "cuda"])

    v = verb("bench", verbs.bench, "time all kernels and peers on this machine's GPU")
    v.add_argument("--out", type=Path, default=Path("build/kernels.csv"), help="CSV, written anew as it goes")
    v.add_argument("--shapes", type=_shape, nargs="+", default=[], metavar="NxK", help="default: those of the peers")
    v.add_argument("--counts", type=_number(1), nargs="+", default=[1, 4, 8, 16, 64, 256, 512, 1024, 2048], metavar="M")
    v.add_argument("--modes", nargs="+", default=["cold"], choices=["cold", "warm"])
    v.add_argument("--only", nargs="+", default=[], metavar="WORD", help="providers whose label has one of the words")
    v.add_argument("--rounds", type=_number(1), default=25)
    about = "extra seconds per kernel for the energy reading (0 disables it)"
    v.add_argument("--joule-seconds", type=_number(0, float), default=0.05, help=about)
    v.add_argument("--resume", action="store_true", help="keep what the file has already, from the same commit")
    about = "processes that compile everything beforehand; 0: none"
    v.add_argument("--workers", type=_number(0), default=8, help=about)
    about = "sweep a kernel's launch configurations on this machine's GPU and record the fastest"
    v = verb("tune", verbs.tune, about)
    v.add_argument("kernel")
    about = "is a kernel slower than it was? exit 1: yes, in two runs; 3: in one, measure again"
    v = verb("regress", verbs.regress, about)
    v.add_argument("new", type=Path, nargs="+", help="pytest --benchmark-json of a run, and of a second one")
    v.add_argument("--against", type=Path, nargs="+", required=True, help="runs of the baseline; three are better")
    v.add_argument("--threshold", type=_number(0, float), default=0.03, help="slowdown that never counts; default 0.03")
    v.add_argument("--partial", action="store_true", help="the new runs need not have every kernel")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; 0, or 2 with one sentence for bad input."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:  # without importing what a bare checkout lacks
        print(f"lowbit-repro {__version__}")
        return 0
    try:
        top = parser()
        known = next(a.choices for a in top._actions if a.dest == "verb")
        if words and not words[0].startswith("-") and words[0] not in known:
            raise unknown("verb", words[0], known)
        args = top.parse_args(words)
        if args.verb is None:
            top.print_help()
            return 0
        return args.run(args) or 0
    except UserError as error:
        print(sentence(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run again to resume", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a path in another encoding, a terminal without Unicode
    sys.exit(main())
