"""Train PMPD's scheduler.

    python -m repro.generation.train_pmpd --model pocket-10m --recipe gptq-w2-g128-sym --path 3 2

Labels come from the quantized models along 256 texts of C4, as PMPD's first 256 documents. Which point is right is not
said by the paper: here the earliest one at which the text's next 255 tokens cost at most a share of `--tolerance` more
nats than at the high precision throughout. Tokens before the point cost what the high precision gives them, those
behind it what the low one gives. Weights that are not built yet are built first (GPTQ with its calibration).

The four points of PMPD are 0, 85, 170 and 255 tokens. A fifth of the prompts is held out; the card says how often the
scheduler is right there, and how often always naming the most frequent point would be.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from repro import models
from repro.core.errors import UserError, at_least
from repro.data import corpora
from repro.engine import head_files, pmpd, weights
from repro.engine.pmpd import POINTS, Scheduler
from repro.engine.prefill import together
from repro.engine.step import Cache, Decoder
from repro.generation.engine import activations, compressed, configuration
from repro.jobs.target import Target
from repro.recipes import precision_schedules
from repro.specs import scale as scales

MOST_BYTES = 500_000  # of a scheduler's file, which lies in the repository
CORPUS = "c4-prefix"
NEW = POINTS[-1]  # tokens along which the points are compared


@dataclass(frozen=True)
class PmpdSettings:
    """How a scheduler is trained.

    Attributes:
        prompts: texts, a fifth of which is held out (PMPD: the first 256 C4 validation documents).
        length: tokens of a prompt. PMPD cuts documents at 2,048; the tasks' prompts have a few hundred here.
        tolerance: by which share more nats a point may cost.
        epochs, rate: of AdamW over the whole batch; not given.
        seed: of crops, initial weights and which prompts are held out.
    """

    prompts: int = 256
    length: int = 256
    tolerance: float = 0.01
    epochs: int = 200
    rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, prompts=5, length=2, epochs=1)


def main(words: Sequence[str] | None = None) -> None:
    """Train a scheduler and write it with its card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a pocket model or a local folder")
    parser.add_argument("--recipe", required=True, help="the quantizer, at any width")
    parser.add_argument("--path", nargs=2, type=int, required=True, metavar=("HIGH", "LOW"), help="two widths")
    parser.add_argument("--out", type=Path, help="the file; by default where the switching cells look for it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    for name, default in asdict(PmpdSettings()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = vars(parser.parse_args(words))
    try:
        settings = PmpdSettings(**{name: args[name] for name in asdict(PmpdSettings())})
        high, low = args["path"]
        recipes = [precision_schedules.recipe_at(args["recipe"], bits) for bits in (high, low)]
        loaded = decoders(args["model"], recipes, settings, args["device"])
        ids = corpora.token_ids(CORPUS, models.tokenizer(args["model"]))
        rows = corpora.calibration(ids, settings.prompts, settings.length + NEW, settings.seed).tolist()
        examples = labelled(*loaded, rows, settings)
        scheduler, facts = train(examples, settings)
        path = args["out"] or pmpd.path_of(args["model"], high, low)
        write(path, args["model"], scheduler, facts | {"recipes": recipes, "corpus": CORPUS})
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def decoders(model: str, recipes: Sequence[str], settings: PmpdSettings, device: str) -> list[Decoder]:
    """The engine's decoders of a model under recipes; all weights are there before the first one is on the device."""
    targets = [Target(scales.load(name="pocket").on(device), model, recipe) for recipe in recipes]
    config, at = configuration(targets[0]), torch.device(device)
    context = weights.check(model, config, settings.length + NEW)
    dtype = activations(config, at, None)
    built = [compressed(target, dtype, build=True) for target in targets]
    return [weights.decoder(lm, context, at, dtype) for lm in built]


Example = tuple[Tensor, Tensor, int]  # keys, values, the number of the right point


def labelled(high: Decoder, low: Decoder, rows: Sequence[Sequence[int]], settings: PmpdSettings) -> list[Example]:
    """Features and the right point of every text: token ids of a prompt and the 255 that follow."""
    examples = []
    for row in rows:
        ((keys, values),) = pmpd.features(high, [row[: settings.length]])
        label = right_point(nll(high, row, settings.length), nll(low, row, settings.length), settings.tolerance)
        examples.append((keys, values, label))
    return examples


@torch.inference_mode()
def nll(model: Decoder, row: Sequence[int], prompt: int) -> np.ndarray:
    """Nats of each token after a prompt, float64 `[T]`."""
    (hidden,) = together(model, Cache(model, 1), [row])
    logits = model.head(hidden[prompt - 1 : -1]).float()
    targets = torch.tensor(row[prompt:], device=logits.device)
    return F.cross_entropy(logits, targets, reduction="none").double().cpu().numpy()


def right_point(high: np.ndarray, low: np.ndarray, tolerance: float) -> int:
    """The number of the earliest point that costs at most a share more than the high precision throughout."""
    most = (1 + tolerance) * high.sum()
    costs = [high[:point].sum() + low[point:].sum() for point in POINTS]
    return next(number for number, cost in enumerate(costs) if cost <= most or number == len(POINTS) - 1)


def train(examples: Sequence[Example], settings: PmpdSettings) -> tuple[Scheduler, dict]:
    """A scheduler of examples of one length, and what its card says of it."""
    torch.manual_seed(settings.seed)
    keys = torch.stack([example[0] for example in examples])
    values = torch.stack([example[1] for example in examples])
    labels = torch.tensor([label for _, _, label in examples])
    order = torch.randperm(len(examples))
    validation = order[: len(order) // 5]
    training = order[len(order) // 5 :]
    scheduler = Scheduler(keys.shape[-1])
    optimizer = torch.optim.AdamW(scheduler.parameters(), settings.rate)
    losses = []
    for _ in range(settings.epochs):
        loss = F.cross_entropy(scheduler(keys[training], values[training]), labels[training])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        right = scheduler(keys[validation], values[validation]).argmax(-1) == labels[validation]
    counts = Counter(labels[training].tolist())
    most = counts.most_common(1)[0][0]
    facts = {"settings": asdict(settings), "loss": [losses[0], losses[-1]], "labels": [counts[n] for n in range(4)]}
    facts |= {"held_out_right": right.float().mean().item()}
    return scheduler.eval(), facts | {"held_out_most_frequent": (labels[validation] == most).float().mean().item()}


def write(path: Path, name: str, scheduler: Scheduler, facts: dict) -> None:
    """A scheduler in 16 bits with its card next to it.

    Raises:
        UserError: a pocket model's scheduler is larger than the repository takes.
    """
    size = head_files.write(path, "pmpd", name, scheduler.state_dict(), facts, MOST_BYTES)
    right, frequent = facts["held_out_right"], facts["held_out_most_frequent"]
    print(f"{path}: {size:,} bytes; right on {right:.0%} of held-out prompts, the most frequent on {frequent:.0%}")


if __name__ == "__main__":
    main()
