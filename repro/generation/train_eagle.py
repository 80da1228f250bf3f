"""Train the draft head of EAGLE-2 for a model: `python -m repro.generation.train_eagle --model pocket-10m`.

As in EAGLE (Li et al. 2024, section 4.2): the target is frozen, its last hidden states of a text are the inputs and
what the head is to give one token later. The loss is a smooth L1 distance of states plus 0.1 times the cross entropy of
the tokens' distributions; uniform noise is added to the input states. The text is the pocket models' own training text
in place of ShareGPT. The head is written with a card of what it was trained on and what it scores on held-out text.

On an H200 the defaults take about two minutes for pocket-10m; a run that was stopped begins again.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repro import models
from repro.core.errors import UserError, at_least
from repro.data import corpora
from repro.engine import eagle, head_files

MOST_BYTES = 2_500_000  # of a head's file, which lies in the repository
HELD_OUT = "held-out"


@dataclass(frozen=True)
class EagleSettings:
    """How a head is trained.

    Attributes:
        steps, batch, length: optimizer steps, sequences of each and tokens of a sequence.
        rate: of AdamW, after `warm_up` steps, falling to 0 on a cosine. EAGLE has 3e-5 for states of 4,096 numbers and
            several days; ours is that of small models.
        noise: the width of the uniform noise on input states.
        token_weight: of the cross entropy next to the states' distance.
        clip: of the gradient's norm.
        seed: of initial weights, crops and noise.
    """

    steps: int = 4000
    batch: int = 16
    length: int = 512
    rate: float = 1e-3
    warm_up: int = 200
    noise: float = 0.2
    token_weight: float = 0.1
    clip: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, steps=1, batch=1, length=4, warm_up=0)


def main(words: Sequence[str] | None = None) -> None:
    """Train a head and write it with its card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a pocket model or a local folder")
    parser.add_argument("--out", type=Path, help="the head's file; by default where the acceptance cells look for it")
    parser.add_argument("--corpus", default="training-wiki-part", help="the text, a key of corpora.yaml")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    for name, default in asdict(EagleSettings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = vars(parser.parse_args(words))
    try:
        settings = EagleSettings(**{name: args[name] for name in asdict(EagleSettings())})
        model = models.load(args["model"], args["device"])
        tokenizer = models.tokenizer(args["model"])
        ids = corpora.token_ids(args["corpus"], tokenizer)
        held_out = corpora.calibration(corpora.token_ids(HELD_OUT, tokenizer), 16, settings.length, 0)
        head, losses = train(model, torch.from_numpy(ids).long(), settings, report_progress)
        facts = card(model, head, held_out, settings) | {"corpus": args["corpus"], "losses": losses}
        write(args["out"] or eagle.path_of(args["model"]), args["model"], head, facts)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def report_progress(line: str) -> None:
    """Print a line of progress at once."""
    print(line, flush=True)


def train(
    model: nn.Module, ids: Tensor, settings: EagleSettings, progress: Callable[[str], None]
) -> tuple[eagle.EagleHead, list[float]]:
    """A head for a frozen model.

    Args:
        model: of Transformers.
        ids: int64 `[N]`, the text.
        settings: how.
        progress: is told of the loss, about twenty times.

    Returns:
        The head, and the loss of every twentieth of the steps in the mean.

    Raises:
        UserError: the loss is not finite, or the text is too short.
    """
    torch.manual_seed(settings.seed)
    device = next(model.parameters()).device
    head = eagle.EagleHead(model).to(device)
    optimizer = torch.optim.AdamW(head.parameters(), settings.rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, settings))
    losses: list[float] = []
    recent: list[float] = []
    began = time.perf_counter()
    for step in range(1, settings.steps + 1):
        rows = corpora.calibration(ids.numpy(), settings.batch, settings.length, settings.seed + step).to(device)
        loss = loss_of(model, head, rows, settings.noise, settings.token_weight)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        recent.append(loss.detach())
        if step % max(settings.steps // 20, 1) == 0 or step == settings.steps:
            losses.append(torch.stack(recent).mean().item())
            recent = []
            if not losses[-1] < float("inf"):
                raise UserError(f"training of the draft head diverged at step {step}; choose a smaller --rate")
            progress(f"step {step} of {settings.steps}: loss {losses[-1]:.4f}, {time.perf_counter() - began:.0f} s")
    return head.eval(), losses


def factor(step: int, settings: EagleSettings) -> float:
    """The factor on the learning rate at a step: a linear warm-up, then a cosine to 0."""
    if step < settings.warm_up:
        return (step + 1) / settings.warm_up
    done = (step - settings.warm_up) / max(settings.steps - settings.warm_up, 1)
    return 0.5 * (1 + float(torch.cos(torch.tensor(done * torch.pi))))


def loss_of(model: nn.Module, head: eagle.EagleHead, rows: Tensor, noise: float, token_weight: float) -> Tensor:
    """Smooth L1 of the states and `token_weight` times the cross entropy, over sequences of token ids `[B, T]`."""
    states, logits, guessed = passes(model, head, rows, noise)
    distance = F.smooth_l1_loss(guessed, states)
    chances = logits.softmax(-1)
    ours = model.get_output_embeddings()(guessed).log_softmax(-1)
    return distance - token_weight * (chances * ours).sum(-1).mean()


def passes(model: nn.Module, head: eagle.EagleHead, rows: Tensor, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """The target's states and logits of all tokens but the first, and the head's guess of these states."""
    with torch.no_grad():
        all_states = model.base_model(rows).last_hidden_state
        states = all_states[:, 1:]
        logits = model.get_output_embeddings()(states).float()
        embeddings = model.get_input_embeddings()(rows[:, 1:])
        before = all_states[:, :-1]
        before = before + noise * (torch.rand_like(before) - 0.5)
    return states, logits, head(before, embeddings)


@torch.no_grad()
def card(model: nn.Module, head: eagle.EagleHead, rows: Tensor, settings: EagleSettings) -> dict:
    """The facts of a head's training, and how often its most likely token is the target's on held-out text."""
    _, logits, guessed = passes(model, head, rows.to(next(model.parameters()).device), 0.0)
    ours = model.get_output_embeddings()(guessed)
    agreement = (ours.argmax(-1) == logits.argmax(-1)).float().mean().item()
    tokens = settings.steps * settings.batch * settings.length
    return {"settings": asdict(settings), "trained_tokens": tokens, "held_out_top1_agreement": agreement}


def write(path: Path, name: str, head: eagle.EagleHead, facts: dict) -> None:
    """A head in 16 bits with its card next to it.

    Raises:
        UserError: a pocket model's head is larger than the repository takes.
    """
    size = head_files.write(path, "eagle2", name, head.trained(), facts, MOST_BYTES)
    report_progress(
        f"{path}: {size:,} bytes, agrees with the target on {facts['held_out_top1_agreement']:.1%} of held-out tokens"
    )


if __name__ == "__main__":
    main()
