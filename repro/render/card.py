"""The pocket models' card: how they were trained, what they score, what rounding costs them.

`python -m repro card` measures every model that has no `card.json` yet (it needs `$REPRO_DATA`) and writes
repro/pocket/README.md and its loss curves from the training logs and those measurements.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from repro import models
from repro.core.files import write_text
from repro.data import corpora
from repro.models import perplexity
from repro.models.lowbit import LowBitModel
from repro.recipes import recipe
from repro.render import plot

TEXTS = ("held-out", "wikitext2", "c4-local")
ROUNDINGS = ("rtn-w8-pc", "rtn-w4-pc", "rtn-w3-pc", "rtn-w2-pc", "rtn-w4-g128", "rtn-w3-g128", "rtn-w2-g128")
WIKITEXT_ROUNDINGS = ("rtn-w4-pc", "rtn-w3-pc")
WIKITEXT_WINDOWS = 150  # of 512, as before the layout
NEWLINE_NATS, PERPLEXITY_SLACK, DAMAGE_KEPT = 1.0, 0.02, 0.9  # the targets of the corpus share in WikiText's layout
WINDOWS = {512: 600, 2048: 150}  # the first so many windows of a text, or all
EDGES = (1, 256, 512, 768, 1024, 1280, 1536, 1792, 2048)


def measure(name: str, device: str = "cpu") -> dict:
    """Every number of one model's card that is measured on text; a rounding's is perplexity over full precision.

    Raises:
        UserError: a text that is not there.
    """
    model = models.load(name, device)
    tokenizer = models.tokenizer(name)
    ids = {text: corpora.token_ids(text, tokenizer) for text in TEXTS}
    facts: dict = {"model": name, "ppl": {}, "rounding_on_held_out_512": {}}
    for text in TEXTS:
        for length, limit in WINDOWS.items():
            frame = perplexity.score(model, perplexity.windows(ids[text], length, limit))
            facts["ppl"][f"{text}@{length}"] = round(perplexity.perplexity(frame), 3)
    by = perplexity.by_position(model, perplexity.windows(ids["held-out"], 2048, WINDOWS[2048]), EDGES)
    spans = by.itertuples(index=False)
    facts["held_out_by_position"] = {f"{a}-{b - 1}": round(float(np.exp(nll)), 2) for a, b, _, nll in spans}
    long = perplexity.windows(ids["wikitext2"], 2048, WINDOWS[2048])
    facts["wikitext2_token_classes"] = token_classes(model, long, tokenizer)
    rounded = {"held_out": perplexity.windows(ids["held-out"], 512, WINDOWS[512])}
    rounded["wikitext2"] = perplexity.windows(ids["wikitext2"], 512, WIKITEXT_WINDOWS)
    for text, windows in rounded.items():
        full = perplexity.perplexity(perplexity.score(model, windows))
        ratios = facts[f"rounding_on_{text}_512"] = {}
        for rounding in ROUNDINGS if text == "held_out" else WIKITEXT_ROUNDINGS:
            lm = LowBitModel(models.load(name, device))
            step = recipe.parse(rounding).steps[0]
            step.module.apply(lm, None, step.config)
            ratios[rounding] = round(perplexity.perplexity(perplexity.score(lm.model, windows)) / full, 3)
    return facts


@torch.inference_mode()
def token_classes(model: Any, windows: torch.Tensor, tokenizer: Any, batch: int = 4) -> dict[str, dict[str, float]]:
    """Mean negative log likelihood and share of the targets of three token classes.

    Args:
        model: a Hugging Face causal LM.
        windows: int64 `[W, L]`; the targets are the last L - 1 ids of each.
        tokenizer: the model's own.
        batch: windows in one forward pass.

    Returns:
        `newline` (the token's text is line breaks only), `blank` (spaces only) and `other`, each with `nats` per token
        and `share` of all targets; a class without a token has 0 nats.
    """
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    classes = torch.tensor([{"\n": 0, " ": 1}.get("".join(set(text)), 2) for text in texts], device=model.device)
    total = torch.zeros(3, dtype=torch.float64, device=model.device)
    count = torch.zeros(3, dtype=torch.int64, device=model.device)
    for start in range(0, len(windows), batch):
        ids = windows[start : start + batch].to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        of = classes[ids[:, 1:].flatten()]
        total.index_add_(0, of, F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none").double())
        count += torch.bincount(of, minlength=3)
    nats = (total / count.clamp(min=1)).tolist()
    share = (count / count.sum()).tolist()
    return {
        name: {"nats": round(nats[i], 4), "share": round(share[i], 5)}
        for i, name in enumerate(("newline", "blank", "other"))
    }


def card(folder: Path = models.POCKET, device: str = "cpu") -> None:
    """Measure every pocket model without a `card.json` in `folder`, then write the card and the loss curves there.

    Raises:
        UserError: a text that is not there.
    """
    logs, facts = {}, {}
    for name in models.pocket_names():
        logs[name] = json.loads((models.POCKET / name / "training-log.json").read_text(encoding="utf-8"))
        path = folder / name / "card.json"
        if not path.is_file():
            write_text(path, json.dumps(measure(name, device), indent=1) + "\n")
        facts[name] = json.loads(path.read_text(encoding="utf-8"))
    order = sorted(logs, key=lambda name: logs[name]["parameters"])
    plot.loss_curves({name: logs[name]["losses"] for name in order}, folder / "loss.svg")
    write_text(folder / "README.md", markdown({n: logs[n] for n in order}, {n: facts[n] for n in order}))


def markdown(logs: dict[str, dict], facts: dict[str, dict]) -> str:
    """The card's text: the template, filled from training logs, attempts' logs and measurements."""
    names = list(logs)
    log, fact = logs[names[0]], facts[names[0]]

    def every(label: str, cell: Callable[[str], object]) -> list[object]:
        return [label, *(cell(name) for name in names)]

    overview = [
        every("parameters", lambda n: f"{logs[n]['parameters']:,}"),
        every("layers", lambda n: logs[n]["architecture"]["layers"]),
        every("tokens seen", lambda n: f"{logs[n]['tokens']:,}"),
        every("tokens per parameter", lambda n: logs[n]["tokens_per_parameter"]),
        every("Wikipedia documents in WikiText's layout", lambda n: _layout_share(logs[n])),
        every("seed", lambda n: logs[n]["training"]["seed"]),
        every("epochs over the corpus", lambda n: f"{logs[n]['tokens'] / logs[n]['corpus_tokens']:.1f}"),
        every("seconds", lambda n: f"{logs[n]['seconds']:.0f}"),
        every("tokens/s", lambda n: f"{logs[n]['tokens_per_s']:,}"),
        every("MFU, of 790 TFLOP/s", lambda n: f"{logs[n]['mfu']:.1%}"),
        every("process starts", lambda n: logs[n].get("starts", "")),
        every("last training loss", lambda n: logs[n]["losses"][-1][1]),
    ]
    overview += [every(f"perplexity {key}", lambda n, k=key: facts[n]["ppl"][k]) for key in fact["ppl"]]
    rounded = "rounding_on_held_out_512"
    overview += [every(f"`{key}`", lambda n, k=key: f"×{facts[n][rounded][k]}") for key in fact[rounded]]
    spans = [every(key, lambda n, k=key: facts[n]["held_out_by_position"][k]) for key in fact["held_out_by_position"]]
    corpus = json.loads((models.POCKET / "corpus.json").read_text(encoding="utf-8"))
    before = json.loads((models.POCKET / "attempts" / "before-layout.json").read_text(encoding="utf-8"))
    tried = [json.loads(p.read_text()) for p in sorted((models.POCKET / "attempts").glob("sweep-*.json"))]
    best = min(attempt["valid"]["ppl_512"] for attempt in tried)
    verdicts = [
        [
            attempt["training"]["learning_rate"],
            attempt["valid"]["ppl_512"],
            f"×{attempt['valid']['rtn_w3_pc']}",
            "taken"
            if attempt["valid"]["ppl_512"] == best
            else f"dropped: {attempt['valid']['ppl_512'] / best - 1:+.1%}",
        ]
        for attempt in tried
    ]
    with open(models.POCKET / "attempts" / "layout.csv", encoding="utf-8", newline="") as file:
        layouts = list(csv.reader(file))
    template = (models.POCKET / "README.template.md").read_text(encoding="utf-8")
    return template.format(
        **log["architecture"] | log["training"],
        overview=_table(["", *names], overview),
        positions=_table(["position", *names], spans),
        corpus=_table(
            ["file", "bytes", "SHA-256"],
            [[n, f"{f['bytes']:,}", f"`{f['sha256']}`"] for n, f in corpus["files"].items()],
        ),
        overlap=corpus["13_grams_shared_with_wikitext2"],
        wikitext_ngrams=corpus["13_grams_of_wikitext2"],
        layout=_table(["", "target", *names], layout_rows(before, facts)),
        layout_attempts=_table(layouts[0], layouts[1:]),
        attempts=_table(["learning rate", "perplexity at 512", "`rtn-w3-pc`", "verdict"], verdicts),
        short=WINDOWS[512],
        wikitext_windows=WIKITEXT_WINDOWS,
        long=WINDOWS[2048],
        torch=log["versions"]["torch"],
        device=log["device"],
        corpus_tokens=log["corpus_tokens"],
        attempt_tokens=tried[0]["tokens"],
    )


def layout_rows(before: dict[str, dict], after: dict[str, dict]) -> list[list[str]]:
    """The effect of the share in WikiText's layout: label, target, and `before → after` for each model of `after`.

    Args:
        before, after: what `measure` returns, by model.
    """

    def row(label: str, target: str, get: Callable[[dict], float], sign: str, met: Callable | None = None) -> list[str]:
        cells = []
        for name in after:
            old, new = get(before[name]), get(after[name])
            verdict = ""
            if met is not None:
                verdict = ", met" if met(old, new) else ", **missed**"
            cells.append(f"{sign}{old} → {sign}{new}{verdict}")
        return [label, target, *cells]

    share = {k: v["share"] for k, v in next(iter(after.values()))["wikitext2_token_classes"].items()}
    rows = []
    for key, label in (("newline", "`\\n`"), ("blank", "blank"), ("other", "all other tokens")):
        met = (lambda _, new: new < NEWLINE_NATS) if key == "newline" else None
        target = f"below {NEWLINE_NATS:g}" if met else ""
        text = f"nats per {label} of WikiText-2 ({share[key]:.1%})"
        rows.append(row(text, target, lambda f, k=key: round(f["wikitext2_token_classes"][k]["nats"], 2), "", met))
    rows.append(row("perplexity wikitext2@2048", "", lambda f: f["ppl"]["wikitext2@2048"], ""))
    for key in ("held-out@512", "held-out@2048"):
        limit = f"at most +{PERPLEXITY_SLACK:.0%}"
        kept = lambda old, new: new <= (1 + PERPLEXITY_SLACK) * old  # noqa: E731
        rows.append(row(f"perplexity {key}", limit, lambda f, k=key: f["ppl"][k], "", kept))
    for text in ("held_out", "wikitext2"):
        for key in WIKITEXT_ROUNDINGS:
            kept = (lambda old, new: new - 1 >= DAMAGE_KEPT * (old - 1)) if text == "held_out" else None
            target = f"damage at least {DAMAGE_KEPT:.0%} of before" if kept else ""
            label = f"`{key}` on {text.replace('_', '-')}@512"
            rows.append(row(label, target, lambda f, t=text, k=key: f[f"rounding_on_{t}_512"][k], "×", kept))
    return rows


def _layout_share(log: dict) -> str:
    every = log["training"].get("wikitext_every", 0)  # logs from before the layout do not have it
    return f"every {every}th" if every else "none"


def _table(head: list, rows: list[list]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
