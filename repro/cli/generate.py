"""Stream generated text, then one line of numbers: tokens/s, ms, MBU, memory."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.cli import options as common
from repro.core.errors import UserError
from repro.core.files import regular

if TYPE_CHECKING:
    from repro.generation.limited import Limited
    from repro.generation.switching_engine import SwitchingEngine


def options(parser: argparse.ArgumentParser) -> None:
    """The model, the prompt, and how to continue it."""
    add = parser.add_argument
    add("prompt", nargs="?", help="the text to continue (default: standard input)")
    add("--file", type=Path, help="a file with the prompt")
    add("--model", required=True, help="pocket-10m, a local folder, hub-id@revision")
    add("--recipe", default="fp16", help="such as 'rtn-w4-g128 + spear'; compressed first if necessary")
    about = "flexquant, or 'flexquant(threshold=2.0, layers=4)': switch layers to fewer bits while decoding"
    add("--precision", metavar="SCHEDULE", help=about)
    about = "with --precision: file with the order of layers, computed once (minutes for 8B) and then read"
    add("--order", type=Path, metavar="FILE", help=about)
    add("--no-build", dest="build", action="store_false", help="do not compress the model; print the command that does")
    add("--scale", help="whose calibration text a recipe is built with; default $SCALE, else pocket")
    about = "tokens of prompt and answer; default the model's, at most 2048"
    add("--context", type=common.number(1), help=about)
    add("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    about = "default: the checkpoint's, float32 on a CPU without it"
    add("--dtype", choices=["float32", "float16", "bfloat16"], help=about)
    add("--memory", metavar="BYTES", help="memory limit on the device, such as 8GiB; what does not fit is streamed")
    add(
        "--draft",
        metavar="DRAFT",
        help="with --memory: draft for speculative decoding; subspec, or subspec(bits=3, depth=32)",
    )
    add("--no-prefetch", dest="prefetch", action="store_false", help="with --memory: do not prefetch weights")
    add("--chat", action="store_true", help="apply the tokenizer's chat template to the prompt")
    add("--max-new-tokens", type=common.number(1), metavar="N", help="default: until the context is full")
    add("--temperature", type=common.number(0, float), default=0.0, help="sampling temperature; 0 (default) is greedy")
    add("--top-k", type=common.number(0), default=0)
    add("--top-p", type=common.number(0, float), default=1.0)
    add("--seed", type=common.number(0), default=0)
    add("--stop", nargs="+", default=(), metavar="TEXT", help="stop at these texts")


def run(args: argparse.Namespace) -> None:
    """Stream a model's text, then one line of numbers."""
    if args.prompt is not None and args.file is not None:
        raise UserError("a prompt and --file: give one of them")
    from repro.engine.core import needs_weights
    from repro.generation import Engine
    from repro.generation.switching_engine import SwitchingEngine

    needs_weights(args.model)  # a shape's would take minutes to make
    text = _prompt(args)
    where = {name: getattr(args, name) for name in ("context", "device", "dtype", "scale", "build")}
    if args.memory is None and (args.draft is not None or not args.prefetch):
        raise UserError("--draft and --no-prefetch go with --memory, such as --memory 8GiB")
    if args.order is not None and args.precision is None:
        raise UserError("--order goes with --precision, such as --precision flexquant")
    if args.memory is not None:
        engine = _limited(args, where)
    elif args.precision is not None:
        engine = SwitchingEngine.load(args.model, args.recipe, precision=args.precision, order_file=args.order, **where)
    else:
        engine = Engine.load(args.model, args.recipe, **where)
    how = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop")
    sampling = {name: getattr(args, name) for name in how}
    prompt = engine.chat(text) if args.chat else text
    for piece in engine.generate(prompt, **sampling):
        print(piece, end="", flush=True)
    print(f"\n{engine.stats}")
    if args.precision is not None:
        print(_switched(engine, prompt, sampling))


def _limited(args: argparse.Namespace, where: dict[str, Any]) -> "Limited":
    """The engine under a memory limit. Warns if the model fits without a draft, or the draft is sharpened."""
    from repro.generation import Limited

    if args.precision is not None:
        raise UserError("--memory and --precision: give one of them")
    engine = Limited.load(args.model, args.memory, args.recipe, args.draft, prefetch=args.prefetch, **where)
    if args.draft and not engine.plan.streamed_bytes:
        print(
            f"{args.model} fits into {args.memory}: the draft is the model itself; leave out --draft", file=sys.stderr
        )
    if args.draft and args.temperature > 0 and (sharp := engine.draft.sampled_temperature) < 1:
        warning = f"sampled_temperature is {sharp:g}: a sharpened draft guesses worse what is drawn"
        print(f"{warning}; the text is the same, 1 is no sharpening", file=sys.stderr)
    return engine


def _switched(engine: "SwitchingEngine", prompt: str, sampling: dict[str, Any]) -> str:
    """What was switched, and the speed compared with the first width alone on the same number of tokens."""
    switching = engine.switching
    speed = engine.stats.tokens_per_s
    high = engine.config.path[0]
    if 3 in engine.config.path:
        return f"{switching} | no speed: 3 bits have no kernel"
    engine.hold(high)
    for _ in engine.generate(prompt, **sampling | {"max_new_tokens": engine.stats.new_tokens, "stop": ()}, eos=False):
        pass
    static = engine.stats.tokens_per_s
    comparison = f"{speed:.1f} tokens/s, {speed / static:.2f} times static {high} bits ({static:.1f} tokens/s)"
    return f"{switching} | {comparison}"


def _prompt(args: argparse.Namespace) -> str:
    """The text to continue: the argument, which may be empty, a file's content, or standard input.

    Raises:
        UserError: a file or standard input without text, or that cannot be read.
    """
    if args.prompt is not None:
        return args.prompt
    try:
        named = f"--file {args.file}"
        stream = sys.stdin if args.file is None else regular(args.file, named).open(encoding="utf-8")
        text = stream.read().removesuffix("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"--file {args.file or '-'}: no text that can be read ({error})") from None
    if not text:
        where = "standard input" if args.file is None else named
        raise UserError(f'{where}: no text to continue; give a prompt, or "" to begin a text')
    return text
