"""The command line: one verb per rule, and the verbs of a person. `python -m repro VERB --help` says what each takes.

Bad input is one sentence and exit code 2. Threads are set before torch is imported, so that results do not depend on
how many cores there are.
"""

import argparse
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from repro.errors import UserError, unknown


class Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong with the options, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        """What argparse calls when the options do not fit."""
        raise UserError(f"{message}; {self.prog} --help lists what it takes")


def _shape(text: str) -> tuple[int, int]:
    """`4096x14336` as (N, K)."""
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write rows and columns as 4096x14336")
    return int(rows), int(columns)


def parser() -> argparse.ArgumentParser:
    """The verbs and their options."""
    top = Parser(prog="python -m repro", description=__doc__.split("\n")[0])
    verbs = top.add_subparsers(dest="verb", metavar="VERB")

    def verb(name: str, text: str, *, job: bool = False, profile: bool = False) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        if job:
            sub.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
            sub.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
            sub.add_argument("--threads", type=int, default=1)
            sub.add_argument("--hub", action="store_true")
        if profile:
            sub.add_argument("--profile", help="config/<name>.yaml; default $PROFILE, else pocket")
        return sub

    v = verb("make", "build targets with Snakemake and print the table", profile=True)
    v.add_argument("targets", nargs="+")
    v.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    v = verb("show", "print a table that was built: table1, spear/table1, …", profile=True)
    v.add_argument("table")
    v = verb("coverage", "measured and printed cells of every table and data figure", profile=True)
    v.add_argument("--csv", action="store_true")
    v = verb("plan", "jobs, minutes, downloads and disk of a target, without running it", profile=True)
    v.add_argument("targets", nargs="+")
    v = verb("verify", "rebuild tables in a clean folder and compare with what is recorded", profile=True)
    v.add_argument("tables", nargs="*")
    v = verb("accept", "take a file of measurements into results/, after checking it")
    v.add_argument("file", type=Path)
    v = verb("pretrain", "train a pocket model anew; resumes where it was stopped")
    v.add_argument("model")
    v.add_argument("--corpus", type=Path, help="folder of train-*.txt.xz; default $REPRO_DATA/corpus")
    v.add_argument("--out", type=Path, default=Path("build/pretrain"))
    v.add_argument("--device", default="cuda")
    v.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    verb("sample", "sample the embedded text from the largest pocket model and freeze it", job=True)
    verb("card", "measure the pocket models and write their card, repro/pocket/README.md", job=True)

    v = verb("bench", "time all kernels and peers on this machine's GPU")
    v.add_argument("--out", type=Path, required=True, help="CSV, written anew as it goes")
    v.add_argument("--shapes", type=_shape, nargs="+", default=[], metavar="NxK", help="default: those of the peers")
    v.add_argument("--counts", type=int, nargs="+", default=[1, 4, 8, 16, 64, 256, 512, 1024, 2048], metavar="M")
    v.add_argument("--modes", nargs="+", default=["cold"], choices=["cold", "warm"])
    v.add_argument("--only", nargs="+", default=[], metavar="WORD", help="providers whose label has one of the words")
    v.add_argument("--rounds", type=int, default=25)
    v.add_argument(
        "--joule-seconds", type=float, default=0.05, help="run each so long once more for its energy; 0: not"
    )
    v.add_argument("--resume", action="store_true", help="keep what the file has already, from the same commit")
    v.add_argument("--workers", type=int, default=8, help="processes that compile everything beforehand; 0: none")
    v = verb("tune", "sweep a kernel's launch configurations on this machine's GPU and record the fastest")
    v.add_argument("kernel")
    v = verb("regress", "is a kernel slower than it was? exit 1: yes, in two runs; 3: in one, measure again")
    v.add_argument("new", type=Path, nargs="+", help="pytest --benchmark-json of a run, and of a second one")
    v.add_argument("--against", type=Path, nargs="+", required=True, help="runs of the baseline; three are better")
    v.add_argument("--threshold", type=float, default=0.03, help="slowdown that never counts; default 0.03")
    v.add_argument("--partial", action="store_true", help="the new runs need not have every kernel")
    v = verb(
        "speed", "the bars that were asked beside what was measured, roofline and peers, from the accepted kernel times"
    )
    v.add_argument("--out", type=Path, default=Path("figures/kernels"))

    v = verb("tokens", "rule: token ids of a corpus", job=True)
    v.add_argument("--corpus", required=True)
    v.add_argument("--model", required=True)
    v.add_argument("--out", type=Path, required=True)
    v = verb("compress", "rule: a model under a recipe", job=True)
    v.add_argument("--model", required=True)
    v.add_argument("--recipe", required=True)
    v.add_argument("--start", type=Path, help="the compressed model that the last step goes on from")
    v.add_argument("--calibration", type=Path)
    for name in ("sequences", "length", "seed"):
        v.add_argument(f"--{name}", type=int, default=0)
    v.add_argument("--out", type=Path, required=True)
    v = verb("perplexity", "rule: per-window scores of a run", job=True)
    v.add_argument("--model", required=True)
    v.add_argument("--weights", type=Path)
    v.add_argument("--tokens", type=Path, nargs="+", required=True)
    v.add_argument("--out", type=Path, nargs="+", required=True)
    v.add_argument("--length", type=int, default=2048)
    v.add_argument("--windows", type=int)
    v.add_argument("--kl-windows", type=int, default=0)
    v = verb("zeroshot", "rule: per-item zero-shot results of a run", job=True)
    v.add_argument("--model", required=True)
    v.add_argument("--weights", type=Path)
    v.add_argument("--tasks", nargs="+", required=True)
    v.add_argument("--limit", type=int)
    v.add_argument("--batch-size", type=int, default=8)
    v.add_argument("--out", type=Path, required=True)
    v = verb("study", "rule: one part of a study, variants of a step on one quantized model", job=True)
    v.add_argument("--model", required=True)
    v.add_argument("--weights", type=Path, required=True)
    v.add_argument("--recipes", nargs="+", required=True)
    v.add_argument("--tokens", type=Path, required=True)
    v.add_argument("--length", type=int, default=2048)
    v.add_argument("--windows", type=int)
    v.add_argument("--out", type=Path, required=True)
    for name in ("perplexity", "zeroshot", "study"):
        verbs.choices[name].add_argument(
            "--code", nargs="*", type=Path, default=[], help="files whose hash is recorded"
        )
    v = verb("table", "rule: one printed table, or a study", profile=True)
    v.add_argument("table")
    v.add_argument("--built", action="store_true", help="draw what is built here, also for a device that is not here")
    v = verb("headline", "rule: the project's own Table 1", profile=True)
    v = verb("audit", "rule: where the papers contradict themselves")
    v = verb("leaderboard", "rule: every recipe beside every other", profile=True)
    for name in ("table", "headline", "leaderboard", "audit"):
        verbs.choices[name].add_argument("--out", type=Path, default=Path("tables"), help="folder of the tables")
    for name in ("table", "headline", "leaderboard", "coverage", "show", "plan", "verify", "make"):
        verbs.choices[name].add_argument("--configfile", type=Path, help="a profile file instead of a name")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; 0, or 2 with one sentence for bad input."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    top = parser()
    known = next(a for a in top._actions if isinstance(a, argparse._SubParsersAction)).choices
    try:
        if words and not words[0].startswith("-") and words[0] not in known:
            raise unknown("verb", words[0], known)
        args = top.parse_args(words)
        if args.verb is None:
            top.print_help()
            return 0
        for name in ("threads", "cores"):
            if getattr(args, name, 1) < 1:
                raise UserError(f"--{name} is {getattr(args, name)}; at least 1 is needed")
        if hasattr(args, "threads"):
            os.environ["OMP_NUM_THREADS"] = str(args.threads)
            import torch

            torch.set_num_threads(args.threads)
            if args.device == "cuda" and torch.cuda.device_count() > 1:  # jobs spread over the GPUs
                torch.cuda.set_device(zlib.crc32(str(os.getpid()).encode()) % torch.cuda.device_count())
        from repro import verbs

        return verbs.VERBS[args.verb](args) or 0
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
