"""Token classes: known answers, their sum is the window's own mean, and what a derived cell reads of them."""

import numpy as np
import pytest
import tiny
import torch

from repro.metrics import token_class
from repro.models import perplexity
from repro.models.lowbit import block_linears
from repro.results import stored_rows
from repro.specs import scale, tables
from repro.store.observations import Observations, Series
from repro.workflow.workflow import Workflow


@pytest.mark.parametrize(
    ("text", "name"),
    [("\n", "breaks"), ("\n\n", "breaks"), (" ", "punctuation"), (" ,", "punctuation"), ("_", "punctuation"),
     ("", "punctuation"), (" \n", "punctuation"), ("7", "digits"), (" 19th", "digits"), (" the", "starts"),
     ("ing", "inside"), ("é", "inside")],
)  # fmt: skip
def test_the_class_of_a_text(text, name):
    assert token_class.CLASSES[token_class.class_of(text)] == name


def test_classes_add_up_to_the_window_and_each_is_the_sum_over_its_own_tokens():
    """Against the scoring of whole windows, and against a loop over tokens."""
    full, low, ids = tiny.model("llama"), tiny.model("llama"), tiny.tokens(1, 40)
    for linear in block_linears(low).values():
        linear.weight.data = (linear.weight.data * 4).round() / 4
    of = np.arange(full.config.vocab_size) % 4  # no token of the last class
    result = token_class.by_class(full, low, ids[0], of)
    (whole,) = perplexity.score(low, ids, full, 1).itertuples()
    for show in ("nll", "kl"):
        parts = [result[f"{name}/{show}"] for name in token_class.CLASSES]
        assert sum(parts) == pytest.approx(getattr(whole, show), rel=1e-5) and parts[4] == 0 < min(parts[:4])
    with torch.no_grad():
        log = torch.log_softmax(low(input_ids=ids).logits[0].double(), -1)
    slow = sum(-float(log[t - 1, ids[0, t]]) for t in range(1, 40) if of[ids[0, t]] == 2) / 39
    assert result["digits/nll"] == pytest.approx(slow, rel=1e-5)
    alone = token_class.by_class(full, None, ids[0], of)
    assert alone.keys() == {f"{name}/nll" for name in token_class.CLASSES}
    assert sum(alone.values()) == pytest.approx(perplexity.score(full, ids)["nll"][0], rel=1e-5)


def test_what_is_shown_is_one_class_and_full_precision_has_no_kl_of_its_own():
    values = {f"{name}/nll": Series(np.asarray([i, i + 2.0]), "windows") for i, name in enumerate(token_class.CLASSES)}
    needs = {"classes": Observations(values, {})}
    params = token_class.TokenClass("wikitext2", "starts")
    ((name, one),) = params.series(needs, None).items()
    assert params.value({name: one.values.mean()}) == 4.0
    kl = token_class.TokenClass("wikitext2", "starts", "kl")
    assert kl.series(needs, None) == {} and kl.itself == 0.0 and kl.reference


def test_the_spec_asks_every_class_of_every_text_with_one_job_a_recipe():
    at = Workflow(scale.load(name="pocket"), stored=False)
    cells = at.cells("spear", "tokens")
    assert {dict(cell.variables)["class"] for cell in cells} == set(token_class.CLASSES)
    assert len(cells) == 5 * 3 * 3 * len(tables.table("spear", "tokens").measure)
    jobs = set()
    for cell in cells:
        jobs |= {job.id for job in stored_rows.jobs(at, cell)}
    assert len(jobs) == 3 * 3 * 3, "a model, a text, and full precision, RTN or SPEAR"
