"""The command line: `python -m repro VERB --help` lists the options. Bad input is one sentence and exit code 2."""

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from repro import __version__, cli
from repro.cli import measure
from repro.cli.options import Parser
from repro.core.errors import UserError, sentence, unknown
from repro.specs import scale_files

PROGRAM = "python -m repro"
REMEDIES = {  # by the number of an error of the file system
    errno.EACCES: "give this user the right to it, or name another",
    errno.EPERM: "give this user the right to it, or name another",
    errno.EROFS: "name one on a file system that can be written",
    errno.ENOSPC: "make room, or name one on another file system",
    errno.EDQUOT: "make room, or name one on another file system",
}


def overview() -> argparse.ArgumentParser:
    """The verbs, each with a line of what it does, without their options."""
    top = Parser(prog=PROGRAM, description="Rebuild tables and figures of low-bit LLM papers.")
    top.add_argument("--version", action="version", version=f"lowbit-repro {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB")
    for name, summary in cli.verbs().items():
        verbs.add_parser(name, help=summary.replace("%", "%%"))
    return top


def run(verb: str, words: Sequence[str]) -> int:
    """Run one verb with its options.

    Raises:
        UserError: an unknown verb, or options that do not fit.
    """
    known = cli.verbs()
    if verb not in known:
        raise unknown("verb", verb, known)
    parser = Parser(prog=f"{PROGRAM} {verb}", description=known[verb].replace("%", "%%"))
    if verb in cli.VERBS:
        module = importlib.import_module(f"repro.cli.{verb}")
        module.options(parser)
        return module.run(read(parser, words)) or 0
    measure.options(parser, cli.kinds()[verb])
    return measure.run(read(parser, words), verb) or 0


def read(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The options; an unknown scale is refused before anything is imported that takes time.

    Raises:
        UserError: options that do not fit, or an unknown scale.
    """
    args = parser.parse_args(words)
    if getattr(args, "configfile", args) is None:  # the verb takes a scale, and none is given as a file
        scale_files.file_of(args.scale)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; 0, or 2 with one sentence for bad input, or for a file that may not be read or written."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(f"lowbit-repro {__version__}")
        return 0
    try:
        if words and not words[0].startswith("-"):
            return run(words[0], words[1:])
        top = overview()
        top.parse_args(words)
        top.print_help()
        return 0
    except UserError as error:
        print(sentence(error), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in REMEDIES or error.filename is None:
            raise
        remedy = REMEDIES[error.errno]
        print(sentence(UserError(f"{error.filename}: {error.strerror}; {remedy}")), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run again to resume", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # a path in another encoding, a terminal without Unicode
    sys.exit(main())
