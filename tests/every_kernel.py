"""Every kernel on its small cases, with launch configurations of every kind in its space, against its reference.

python tests/every_kernel.py [--part 0/4] [kernel ...]     on a GPU; `.ci/sanitize` runs it under compute-sanitizer
"""

import argparse
import contextlib
import itertools
import math
import sys
from collections.abc import Iterator
from types import ModuleType

import torch

from repro.bench import kernel_list
from repro.bench.task import tensors
from repro.kernels import quantize_activation
from repro.kernels.active_inputs import in_order

SMALL = 3 << 17  # weights of a case; tools that watch every access are slow
SIZES = ("bytes", "rows", "columns", "N", "K", "T", "H", "F", "V", "B", "n", "context", "Hk", "D", "L")
LISTS = ("active_inputs",)  # whose last output is a list in any order
CONFIGURATIONS = 16  # of a case, or one of each kind where those are more
CODE = ("WGS", "PAIR", "PRODUCER", "SCALED", "swap")  # constants whose values choose code, not the size of a tile
SPLITS = ("SPLIT", "split", "splits")  # thread blocks that share a tile's columns


def size(case: dict) -> int:
    """Weights, bytes, or values of an operator's inputs."""
    outputs = sum(case.get("layers", [1]))  # of a product of several layers
    return outputs * math.prod(case.get(name, 1) for name in SIZES)


def small_cases(module: ModuleType) -> list[dict]:
    """Of a kernel's own cases those that run here."""
    return [case for case in module.CASES if size(case) <= SMALL]


def kind(config: dict) -> tuple:
    """The same for configurations that run the same code, on tiles of other sizes."""
    values = tuple(config.get(name) for name in CODE)
    is_split = any(config.get(name, 1) > 1 for name in SPLITS)
    return tuple(sorted(config)), values, is_split


def chosen(space: list[dict], number: int, cases: int) -> list[dict]:
    """The configurations for one of a kernel's small cases: as many of each kind, at least one.

    Those of all cases together lie evenly between the first and the last of their kind.
    """
    kinds: dict[tuple, list[dict]] = {}
    for config in space:
        kinds.setdefault(kind(config), []).append(config)
    of_each = max(1, CONFIGURATIONS // len(kinds))
    configs = []
    for members in kinds.values():
        if len(members) <= of_each:
            configs += members
            continue
        last, steps = len(members) - 1, max(1, of_each * cases - 1)
        for turn in range(of_each):
            config = members[last * (number + cases * turn) // steps]
            if config not in configs:
                configs.append(config)
    return configs


def error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative."""
    return float((output.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-30))


def others(module: ModuleType, inputs: dict, want: list[torch.Tensor]) -> Iterator[tuple[dict, float]]:
    """(configuration, its error) of more sources than the default one, as far as the device runs them."""
    for config in getattr(module, "CHECKED", ()):
        with contextlib.suppress(ValueError):
            outputs = tensors(module.launch(**inputs, config=config))
            yield config, max(error(*pair) for pair in zip(outputs, want, strict=True))


def behind_quantizer(module: ModuleType, inputs: tuple, config: dict, case: str) -> list[tuple[str, float]]:
    """The same of `w8a8`, whose sums the program that comes last to a tile adds up, or a launch of their own."""
    _, _, w_q, s_w = inputs
    x = torch.randn(len(inputs[0]), w_q.shape[1], dtype=torch.bfloat16, device="cuda")
    want, errors = module.reference(*quantize_activation.reference(x), w_q, s_w), []
    for joined in (True, False):
        output = module.behind_quantizer(x, w_q, config, joined)(x, w_q, s_w)
        errors.append((f"{case} joined {joined} {config}", error(output, want)))
    return errors


def runs(name: str, part: int = 0, parts: int = 1) -> list[tuple[str, float]]:
    """(what ran, its error) of one kernel; of every `parts`-th of its cases, from number `part` on."""
    module, result = kernel_list.load(name), []
    types = (
        [{"dtype": torch.float16}, {"dtype": torch.bfloat16}] if name == "wna16_gemv" else [{}]
    )  # else the case's own
    cases = small_cases(module)
    for number, more in itertools.product(range(part, len(cases), parts), types):
        case = cases[number]
        inputs = module.make_inputs(case, "cuda", **more)
        if isinstance(inputs, dict):
            want_inputs = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in inputs.items()}
            want = tensors(module.reference(**want_inputs))
            output = tensors(module.launch(**inputs))
            if name in LISTS:
                output[-1] = in_order(output[-1])
            written = [(inputs[n], want_inputs[n]) for n in ("keys", "values") if n in inputs]
            result.append((str(case), max(error(*pair) for pair in (*zip(output, want), *written))))
            result += [(f"{case} {config}", off) for config, off in others(module, inputs, want)]
        elif name == "dequantize":
            dtype = getattr(torch, case["dtype"])
            output = module.launch(inputs, dtype)
            result.append((str(case), error(output, module.reference(inputs))))
        elif name == "quantize_activation":
            want_q, want_s = module.reference(inputs)
            q, s = module.quantize_activation(inputs)
            result.append((str(case), max(error(s, want_s), float((q != want_q).float().mean()))))
        else:
            for config in chosen(module.SPACE, number, len(cases)):
                if name == "read_floor":
                    inputs[1].zero_()
                try:
                    output = module.launch(*inputs, config=dict(config))
                except ValueError:
                    continue  # not for this shape, or not for this device
                if name == "read_floor":
                    off = float(module.reference(inputs[0]) != module.reference(inputs[1]))
                else:
                    off = error(output, module.reference(*inputs))
                result.append((f"{case} {more or ''} {config}", off))
                if name == "w8a8_gemm" and config["split"] > 1:
                    result += behind_quantizer(module, inputs, config, str(case))
    return result


def main(words: list[str]) -> int:
    """Print what ran; 1 if anything is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="0/1", help="of the cases, such as 0/4 for every fourth from the first on")
    parser.add_argument("kernels", nargs="*", default=kernel_list.CHECKED)
    arguments = parser.parse_args(words)
    part, parts = map(int, arguments.part.split("/"))
    wrong = 0
    for name in arguments.kernels:
        results = runs(name, part, parts)
        torch.cuda.synchronize()
        wrong += sum(not off <= 6e-3 for _, off in results)
        for what, off in results:
            if not off <= 6e-3:
                print(f"{name} {what}: off by {off:.2g}")
        print(f"{name}: {len(results)} runs, worst error {max((off for _, off in results), default=0):.1e}")
        wrong += parts == 1 and not results  # else another part may have the only case
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
