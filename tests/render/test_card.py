"""The card's measurements: token classes add up to the perplexity, and the targets of the layout are judged right."""

import copy
import json

import pytest
import torch

from repro import models
from repro.data import corpora
from repro.models import perplexity
from repro.render import card


@pytest.fixture(scope="module")
def measured():
    tokenizer = models.tokenizer("pocket-3m")
    text = "\n\n = Title = \n\n\n\n\n One paragraph , with 1 @,@ 000 words . \n\n\n"
    ids = torch.tensor([tokenizer(text * 12)["input_ids"][:256]] * 3)
    model = models.load("pocket-3m")
    return card.token_classes(model, ids, tokenizer, batch=2), model, ids, tokenizer


def test_token_classes_add_up_to_the_perplexity(measured):
    result, model, ids, _ = measured
    assert sum(c["share"] for c in result.values()) == pytest.approx(1, abs=2e-5)
    mean = sum(c["nats"] * c["share"] for c in result.values())
    assert mean == pytest.approx(perplexity.score(model, ids)["nll"].mean(), abs=1e-3)


def test_each_token_is_in_its_class(measured):
    result, _, ids, tokenizer = measured
    texts = [tokenizer.decode([i]) for i in ids[:, 1:].flatten().tolist()]
    newline = sum(text.strip("\n") == "" for text in texts) / len(texts)
    blank = sum(text.strip(" ") == "" for text in texts) / len(texts)
    assert result["newline"]["share"] == pytest.approx(newline, abs=1e-5) and newline > 0.1
    assert result["blank"]["share"] == pytest.approx(blank, abs=1e-5) and blank > 0.01


def test_a_class_without_a_token(measured):
    _, model, _, tokenizer = measured
    ids = corpora.token_ids("tiny-wikitext", tokenizer)
    plain = torch.tensor([[i for i in ids.tolist() if tokenizer.decode([i]).strip()][:64]])
    result = card.token_classes(model, plain, tokenizer)
    assert result["newline"] == result["blank"] == {"nats": 0.0, "share": 0.0} and result["other"]["share"] == 1


BEFORE = {
    "wikitext2_token_classes": {
        "newline": {"nats": 7.2, "share": 0.02},
        "blank": {"nats": 3.3, "share": 0.01},
        "other": {"nats": 3.6, "share": 0.97},
    },
    "ppl": {"wikitext2@2048": 40.2, "held-out@512": 20.0, "held-out@2048": 18.0},
    "rounding_on_held_out_512": {"rtn-w4-pc": 1.1, "rtn-w3-pc": 1.5},
    "rounding_on_wikitext2_512": {"rtn-w4-pc": 1.05, "rtn-w3-pc": 1.3},
}


@pytest.mark.parametrize(
    ("path", "value", "row", "cell"),
    [
        (("wikitext2_token_classes", "newline", "nats"), 0.53, 0, "7.2 → 0.53, met"),
        (("wikitext2_token_classes", "newline", "nats"), 1.2, 0, "7.2 → 1.2, **missed**"),
        (("ppl", "held-out@512"), 20.4, 4, "20.0 → 20.4, met"),
        (("ppl", "held-out@512"), 20.5, 4, "20.0 → 20.5, **missed**"),
        (("ppl", "held-out@2048"), 17.0, 5, "18.0 → 17.0, met"),
        (("rounding_on_held_out_512", "rtn-w4-pc"), 1.091, 6, "×1.1 → ×1.091, met"),
        (("rounding_on_held_out_512", "rtn-w3-pc"), 1.44, 7, "×1.5 → ×1.44, **missed**"),
        (("rounding_on_wikitext2_512", "rtn-w3-pc"), 1.1, 9, "×1.3 → ×1.1"),
    ],
)
def test_what_the_layout_changed(path, value, row, cell):
    after = copy.deepcopy(BEFORE)
    facts = after
    for key in path[:-1]:
        facts = facts[key]
    facts[path[-1]] = value
    assert card.layout_rows({"m": BEFORE}, {"m": after})[row][2] == cell


def test_the_card_is_filled_from_logs_and_measurements():
    folder = models.POCKET
    logs = {n: json.loads((folder / n / "training-log.json").read_text()) for n in models.pocket_names()}
    logs = {n: log | {"starts": 1, "training": log["training"] | {"wikitext_every": 5}} for n, log in logs.items()}
    facts = json.loads((folder / "attempts" / "before-layout.json").read_text())
    text = card.markdown(logs, facts)
    assert "{" not in text and text.count("| every 5th") == len(logs) and text.count(", **missed**") == len(logs)
    older = {}
    for name, log in logs.items():
        training = {key: value for key, value in log["training"].items() if key != "wikitext_every"}
        older[name] = log | {"training": training}
    assert "in WikiText's layout | none | none | none |" in card.markdown(older, facts)
    assert "| pocket-10m | 16 |" in text, "every run with the layout is listed, the dropped ones too"
    assert text.partition("## Attempts")[2].count("| taken |") == 1, (
        "the attempts are the sweep's, not the figures before the layout"
    )
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|"))
