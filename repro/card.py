"""The pocket models' card: how they were trained, what they score, what rounding costs them.

`python -m repro card` measures every model that has no `card.json` yet (it needs `$REPRO_DATA`) and writes
repro/pocket/README.md and its loss curves from the training logs and those measurements.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from repro import corpora, models, perplexity, plot, recipe
from repro.files import write_text
from repro.lowbit import LowBitModel

TEXTS = ("held-out", "wikitext2", "c4-local")
ROUNDINGS = ("rtn-w8-pc", "rtn-w4-pc", "rtn-w3-pc", "rtn-w2-pc", "rtn-w4-g128", "rtn-w3-g128", "rtn-w2-g128")
WINDOWS = {512: 600, 2048: 150}  # the first so many windows of a text, or all
EDGES = (1, 256, 512, 768, 1024, 1280, 1536, 1792, 2048)


def measure(name: str, device: str = "cpu") -> dict:
    """Every number of one model's card that is measured on text; a rounding's is perplexity over full precision.

    Raises:
        UserError: a text that is not there.
    """
    model, tokenizer = models.load(name, device), models.tokenizer(name)
    ids = {text: corpora.token_ids(text, tokenizer) for text in TEXTS}
    facts: dict = {"model": name, "perplexity": {}, "rounding_on_held_out_512": {}}
    for text in TEXTS:
        for length, limit in WINDOWS.items():
            frame = perplexity.score(model, perplexity.windows(ids[text], length, limit))
            facts["perplexity"][f"{text}@{length}"] = round(perplexity.perplexity(frame), 3)
    by = perplexity.by_position(model, perplexity.windows(ids["held-out"], 2048, WINDOWS[2048]), EDGES)
    spans = by.itertuples(index=False)
    facts["held_out_by_position"] = {f"{a}-{b - 1}": round(float(np.exp(nll)), 2) for a, b, _, nll in spans}
    short = perplexity.windows(ids["held-out"], 512, WINDOWS[512])
    for text in ROUNDINGS:
        lm = LowBitModel(models.load(name, device))
        step = recipe.parse(text).steps[0]
        step.module.apply(lm, None, step.config)
        ratio = perplexity.perplexity(perplexity.score(lm.model, short)) / facts["perplexity"]["held-out@512"]
        facts["rounding_on_held_out_512"][text] = round(ratio, 3)
    return facts


def card(folder: Path = models.POCKET, device: str = "cpu") -> None:
    """Measure every pocket model without a `card.json` in `folder`, then write the card and the loss curves there.

    Raises:
        UserError: a text that is not there.
    """
    logs, facts = {}, {}
    for name in models.pocket_names():
        path = folder / name / "card.json"
        if not path.is_file():
            write_text(path, json.dumps(measure(name, device), indent=1) + "\n")
        facts[name] = json.loads(path.read_text(encoding="utf-8"))
        logs[name] = json.loads((models.POCKET / name / "training-log.json").read_text(encoding="utf-8"))
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
        every("epochs over the corpus", lambda n: f"{logs[n]['tokens'] / logs[n]['corpus_tokens']:.1f}"),
        every("seconds, all three side by side", lambda n: f"{logs[n]['seconds']:.0f}"),
        every("tokens/s then", lambda n: f"{logs[n]['tokens_per_s']:,}"),
        every("MFU then, of 790 TFLOP/s", lambda n: f"{logs[n]['mfu']:.1%}"),
        every("last training loss", lambda n: logs[n]["losses"][-1][1]),
    ]
    overview += [every(f"perplexity {key}", lambda n, k=key: facts[n]["perplexity"][k]) for key in fact["perplexity"]]
    rounded = "rounding_on_held_out_512"
    overview += [every(f"`{key}`", lambda n, k=key: f"×{facts[n][rounded][k]}") for key in fact[rounded]]
    spans = [every(key, lambda n, k=key: facts[n]["held_out_by_position"][k]) for key in fact["held_out_by_position"]]
    files = json.loads((models.POCKET / "corpus.json").read_text(encoding="utf-8"))
    tried = [json.loads(p.read_text()) for p in sorted((models.POCKET / "attempts").glob("*.json"))]
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
    template = (models.POCKET / "README.template.md").read_text(encoding="utf-8")
    return template.format(
        **log["architecture"] | log["training"],
        overview=_table(["", *names], overview),
        positions=_table(["position", *names], spans),
        corpus=_table(
            ["file", "bytes", "SHA-256"], [[n, f"{f['bytes']:,}", f"`{f['sha256']}`"] for n, f in files.items()]
        ),
        attempts=_table(["learning rate", "perplexity", "`rtn-w3-pc`", "verdict"], verdicts),
        short=WINDOWS[512],
        long=WINDOWS[2048],
        torch=log["versions"]["torch"],
        device=log["device"],
        corpus_tokens=log["corpus_tokens"],
        attempt_tokens=tried[0]["tokens"],
    )


def _table(head: list, rows: list[list]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
