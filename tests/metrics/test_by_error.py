"""Loss by quartile of error: known answers, a slow reference, jobs."""

import numpy as np
import pytest
import tiny
import torch

from repro.core.errors import UserError
from repro.jobs.target import Target
from repro.metrics import by_error
from repro.metrics.by_error import ByError, quartiles
from repro.models.lowbit import block_linears
from repro.papers.cell import Cell
from repro.specs import scale
from repro.stats.quantity import compose
from repro.store.observations import Observations
from repro.workflow.workflow import Workflow


def shown(series, quartile):
    params = ByError("rtn-w4-pc", quartile)
    of_quartile = params.series({"tokens": Observations(series, {})}, None)
    return float(params.value({name: one.values.mean() for name, one in of_quartile.items()}))


def test_a_quartile_of_errors_has_the_mean_of_its_tokens():
    errors, nll = np.array([[1.0, 8, 3, 4], [5, 6, 7, 2]]), np.array([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    result = quartiles(errors, nll, "two windows")
    assert [shown(result, quartile) for quartile in (1, 2, 3, 4)] == [
        (1 + 8) / 2,
        (3 + 4) / 2,
        (5 + 6) / 2,
        (7 + 2) / 2,
    ]
    assert result["count 2"].values.tolist() == [2, 0] and result["nll 4"].values.tolist() == [2, 7]
    assert result["nll 1"].axis == "windows" and result["nll 1"].group == result["count 1"].group == "two windows"
    for odd in (0, 5):
        with pytest.raises(UserError, match=f"quartile is {odd}; it must be 1, 2, 3 or 4"):
            ByError("rtn-w4-pc", odd)


def test_tokens_against_a_slow_reference(monkeypatch, tmp_path):
    """Position by position: the states that predict a token decide its quartile, the recipe's own loss counts."""
    full, base, model = (tiny.model("llama") for _ in range(3))
    for rounded, steps in ((base, 4), (model, 16)):
        for linear in block_linears(rounded).values():
            linear.weight.data = (linear.weight.data * steps).round() / steps
    ids, kept = np.arange(130) * 7 % 96, {}
    monkeypatch.setattr(by_error.models, "load", lambda *_: full)
    monkeypatch.setattr(by_error.corpora, "load_tokens", lambda _: (ids, {"label": "counting"}))
    monkeypatch.setattr(by_error.compress, "load", lambda _, path: type("lm", (), {"model": path}))
    monkeypatch.setattr(by_error.observations, "save", lambda path, series, origin: kept.update(series))
    words = {"model": "tiny", "device": "cpu", "dtype": "float32", "hub": False}
    words |= {"length": 20, "windows": 6, "label": "gptq-20"}
    job = type("job", (), {"parsed_options": lambda self: words})()
    by_error.ByError.run(job, {"text": tmp_path, "base": base, "weights": model}, tmp_path, {})

    rows = []
    for w in range(6):
        window = torch.from_numpy(ids[20 * w : 20 * w + 20])[None]
        with torch.no_grad():
            a, b = (m.base_model(window).last_hidden_state[0].double() for m in (full, base))
            logits = model(window).logits[0].double()
        for t in range(19):
            error = 1 - (a[t] @ b[t] / a[t].norm() / b[t].norm()).item()
            rows.append((error, w, -torch.log_softmax(logits[t], 0)[window[0, t + 1]].item()))
    of = np.searchsorted(np.quantile([row[0] for row in rows], [0.25, 0.5, 0.75]), [row[0] for row in rows]) + 1
    for quartile in (1, 2, 3, 4):
        for w in range(6):
            inside = [row[2] for row, q in zip(rows, of) if (q, row[1]) == (quartile, w)]
            assert kept[f"count {quartile}"].values[w] == len(inside)
            assert kept[f"nll {quartile}"].values[w] == pytest.approx(sum(inside), abs=1e-4)
    assert kept["nll 1"].group == "gptq-20 on counting"


def test_eight_windows_settle_a_difference_and_no_loss_by_itself():
    random, flow = np.random.default_rng(0), Workflow(scale.load(name="pocket"), stored=False)
    errors, nll = random.random((8, 50)), random.normal(3, 1, (8, 50))
    cell = Cell(*[""] * 7, measure="by_error", params=ByError("rtn-w4-pc", 2), recipe="rtn-w4-pc")
    one, other = (
        flow.of_series(cell, [cell.params.series({"tokens": Observations(quartiles(errors, x, "c4"), {})}, None)])
        for x in (nll, nll + 0.5)
    )
    assert one.interval().lo is None
    result = compose("b - a", {"a": one, "b": other}).interval()
    assert (result.lo, result.hi) == pytest.approx((0.5, 0.5)) and result.n == 8


def test_one_job_for_all_quartiles_and_another_for_another_base():
    at = Target(scale.load({"perplexity": {"windows": 8}}, "pocket"), "pocket-3m", "rtn-w4-pc + spear")
    first, last, other = (
        params.jobs(at)["tokens"]
        for params in (ByError("rtn-w4-pc", 1), ByError("rtn-w4-pc", 4), ByError("rtn-w3-pc", 1))
    )
    assert first.id == last.id != other.id and first.parsed_options()["windows"] == 8
    assert [role for role, _ in first.needs] == ["text", "base", "weights"]
    plain = ByError("rtn-w4-pc", 1).jobs(at.under("fp16"))["tokens"]
    assert [role for role, _ in plain.needs] == ["text", "base"]
    assert ByError("rtn-w4-pc", 1).jobs(Target(scale.load({"perplexity": None}, "pocket"), "pocket-3m", "fp16")) is None
    with pytest.raises(UserError, match="calibrated on wikitext2-train-part"):
        ByError("rtn-w4-pc", 1, corpus="wikitext2-train-part").jobs(at.under("gptq-w4-pc"))
