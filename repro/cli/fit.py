"""Estimate what a memory budget holds of a model, and its tokens/s, before anything is loaded."""

import argparse

from repro.cli import options as common


def options(parser: argparse.ArgumentParser) -> None:
    """The model, the budget, and the draft."""
    add = parser.add_argument
    add("--model", required=True, help="pocket-10m, a local folder, hub-id@revision, or shape/Llama-3.1-8B")
    add("--memory", required=True, metavar="BYTES", help="such as 8GiB")
    add("--draft", default="subspec", help="subspec, subspec(bits=3, depth=32), or none")
    add("--context", type=common.number(1), help="tokens of prompt and answer; default the model's, at most 2048")
    add("--scale", help="default $SCALE, else pocket")
    add("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    add("--dtype", choices=["float32", "float16", "bfloat16"], help="default: the checkpoint's")
    add("--acceptance", type=common.number(1, float), default=25.0, help="assumed acceptance length")
    add("--bus", type=common.number(1, float), metavar="GB/s", help="default: measured for a second")
    add(
        "--read",
        type=common.number(1, float),
        metavar="GB/s",
        help="that a step reads on the device; default: measured",
    )


def run(args: argparse.Namespace) -> None:
    """Print the plan of what stays on the device, and the estimated tokens/s."""
    from repro.generation import fit, limited

    draft = None if args.draft == "none" else limited.parse_draft(args.draft)
    where = {name: getattr(args, name) for name in ("context", "device", "dtype", "scale", "acceptance")}
    rates = {name: value * 1e9 for name in ("bus", "read") if (value := getattr(args, name)) is not None}
    print(fit.of(args.model, args.memory, draft, **where, **rates))
