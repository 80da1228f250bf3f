"""What another seed would change: the pool against a slow reference, who shares a draw, coverage by simulation."""

import dataclasses
import math

import numpy as np
import pytest
from scipy.signal import lfilter

from repro.results import stored_rows
from repro.specs import scale as scales
from repro.stats.quantity import Quantity, compose
from repro.stats.statistics import Draw
from repro.store import accepted
from repro.store.observations import Series
from repro.workflow import draws
from repro.workflow.workflow import Workflow

SETTINGS = 500  # simulated; the standard error of a coverage near 0.95 is 0.01
QUANTIZER, FOLLOWS, COMPENSATOR = 0.03, 0.55, 0.024  # of the logarithm of a damage, as pooled of losses
DAMAGE, LEFT = 0.04, 0.03  # nats a token that a quantizer costs, and that are left behind a compensator
EXPRESSIONS = {"b - f": DAMAGE, "b - s": DAMAGE - LEFT, "100 * (b - s) / (b - f)": 25.0}


@pytest.fixture(scope="module")
def pocket():
    return Workflow(scales.load(name="pocket"), stored=True)


# --- the pool ---------------------------------------------------------------------------------------------------------


def log_damages(measure):
    """By row, role and seed, straight from the stored series."""
    full, damages = {}, {}
    rows = accepted.of_table("spear/seeds")
    for row in rows:
        for seed in accepted.series(row):
            for name, one in seed.items():
                if name == "f:nll":
                    full[row.stand_in, one.group] = one.values.mean()
    for row in rows:
        for number, seed in enumerate(accepted.series(row)):
            for name, one in seed.items():
                role, _, kind = name.rpartition(":")
                if kind == measure and role != "f":
                    lost = one.values.mean() - (full[row.stand_in, one.group] if measure == "nll" else 0)
                    by_role = damages.setdefault((row.row, row.model, row.metric), {})
                    by_role.setdefault(role, {})[number] = math.log(lost)
    return damages


@pytest.mark.parametrize("measure, cells", [("nll", (30, 6)), ("kl", (15, 3))])
def test_the_pool_is_that_of_the_stored_seeds(measure, cells):
    both, alone, products, squares = [], [], 0.0, 0.0
    for roles in log_damages(measure).values():
        values = {}
        for role, seeds in roles.items():
            values[role] = np.array([seeds[number] for number in range(3)])
        if "" in values:
            alone.append(values[""].var(ddof=1))
            continue
        products += ((values["b"] - values["b"].mean()) * values["s"]).sum()
        squares += ((values["b"] - values["b"].mean()) ** 2).sum()
        both.append(values)
    assert (len(both), len(alone)) == cells
    follows = products / squares
    rest = sum((one["s"] - follows * one["b"]).var(ddof=1) * 2 for one in both)
    spread = draws.pooled(measure)
    assert spread.quantizer == pytest.approx(math.sqrt(np.mean([one["b"].var(ddof=1) for one in both])))
    assert spread.compensator == pytest.approx(math.sqrt(rest / (2 * len(both) - 1)))
    assert (spread.follows, spread.alone) == pytest.approx((follows, math.sqrt(np.mean(alone))))
    assert (spread.df, spread.df_alone) == (2 * len(both), 2 * len(alone))


def test_the_docstring_has_the_pool_of_today():
    loss, kl = draws.pooled("nll"), draws.pooled("kl")
    for what in ("quantizer", "compensator", "alone"):
        assert f"{getattr(loss, what):.3f}; {getattr(kl, what):.3f}" in draws.__doc__
    assert f"{loss.follows:.2f}; {kl.follows:.2f}" in draws.__doc__


def test_the_interval_that_is_shown_has_the_pool_of_today_not_the_rows(pocket, monkeypatch):
    """A row that was accepted before seeds were pooled says so; nothing of its interval is believed."""
    cells = [cell for cell in pocket.cells("spear", "1") if cell.unit == "ppl" and cell.recipe.startswith("omniquant")]
    row, cell = next((row, cell) for cell in cells if (row := accepted.find("pocket", cell)) and row.seeds == "0")
    before = dataclasses.replace(row, lo=row.value - 0.001, hi=row.value + 0.001, covers="windows only")
    monkeypatch.setattr(accepted, "find", lambda scale, one: before)
    shown = stored_rows.find(pocket, cell).measurement
    assert shown.covers == "windows and pooled seeds"
    assert shown.value == pytest.approx(row.value) and shown.hi - shown.lo > 0.1


def test_without_the_stored_seeds_nothing_is_added(monkeypatch, tmp_path):
    monkeypatch.setattr(accepted, "RESULTS", tmp_path)
    assert draws.pooled("nll") is None


# --- whose draw -------------------------------------------------------------------------------------------------------


def drawn(flow, recipe, seeds=(0,), measure="nll", values=(1.0, 1.2)):
    """The draws of a cell of Table 1 under a recipe, one mapping of series a seed."""
    cell = next(c for c in flow.cells("spear", "1") if c.row == "GPTQ pc" and c.unit == "ppl" and c.stand_in)
    cell = dataclasses.replace(cell, recipe=recipe, seeds=tuple(seeds))
    reference = flow.full_precision(cell)
    group = next(iter(accepted.series(accepted.find("pocket", dataclasses.replace(reference, row="FP16")))[0].values()))
    series = {measure: Series(np.asarray(values), "windows", group.group)}
    return draws.of(flow, cell, [series] * len(seeds))


def test_a_compensator_follows_its_quantizers_draw(pocket):
    alone, both = drawn(pocket, "gptq-w4-pc"), drawn(pocket, "gptq-w4-pc + spear")
    assert len(alone) == 1 and len(both) == 2 and alone.keys() < both.keys()
    (shared,) = alone
    assert both[shared].effects["nll"] == pytest.approx(draws.pooled("nll").follows * alone[shared].effects["nll"])
    assert not alone.keys() & drawn(pocket, "gptq-w4-pc", seeds=(1,)).keys(), "another seed is another draw"


def test_who_draws_nothing_or_has_seeds_gets_no_pooled_variance(pocket):
    assert drawn(pocket, "rtn-w4-pc") == {} == drawn(pocket, "gptq-w4-pc", seeds=(0, 1))
    assert len(drawn(pocket, "rtn-w4-pc + spear")) == 1, "rounding to nearest draws nothing"


def test_the_effect_is_a_share_of_the_damage(pocket):
    spread = draws.pooled("kl")
    (kl,) = drawn(pocket, "gptq-w4-pc", measure="kl", values=(0.1, 0.3)).values()
    (top,) = drawn(pocket, "gptq-w4-pc", measure="top1", values=(0.8, 1.0)).values()
    assert kl.effects["kl"] == pytest.approx(0.2 * spread.quantizer)
    assert top.effects["top1"] == pytest.approx(-0.1 * spread.quantizer), "what costs KL costs agreement"
    assert drawn(pocket, "gptq-w4-pc", measure="correct") == {}, "of accuracy nothing is pooled"


def test_agreement_ends_at_100_percent(pocket):
    cell = next(c for c in pocket.cells("spear", "1") if c.row == "RTN pc" and c.unit == "%" and c.stand_in)
    one = pocket.of_series(cell, [{"top1": Series(np.array([1.0, 1.0, 0.99, 1.0, 1.0, 1.0, 1.0, 1.0]), "windows")}])
    assert one.interval().hi == 100 > one.interval().value > one.interval().lo


# --- coverage ---------------------------------------------------------------------------------------------------------


def correlated(random, rho, n=213):
    """An AR(1) series of unit variance, after 50 values to settle in."""
    return lfilter([np.sqrt(1 - rho**2)], [1, -rho], random.normal(size=n + 50))[50:]


def setting(random, spread):
    """Full precision, a quantizer and a compensator of one seed, and what is pooled of others' seeds."""
    quantizer = QUANTIZER * random.normal()
    compensator = FOLLOWS * quantizer + COMPENSATOR * random.normal()
    full = 2 + 0.25 * correlated(random, 0.6)
    means = {"f": 0.0, "b": DAMAGE * np.exp(quantizer), "s": LEFT * np.exp(compensator)}
    parts = {}
    for name, lost in means.items():
        nll = full + (lost + 0.1 * lost * correlated(random, 0.35) if lost else 0)
        effects = {}
        if name == "b":
            effects = {"draw": Draw({"nll": spread[0] * lost}, 60)}
        elif name == "s":
            effects = {
                "draw": Draw({"nll": FOLLOWS * spread[0] * lost}, 60),
                "own": Draw({"nll": spread[1] * lost}, 60),
            }
        parts[name] = Quantity([{"nll": Series(nll, "windows", "text")}], lambda mean: mean["nll"], draws=effects)
    return parts


def test_one_seed_covers_what_other_seeds_would_give():
    random = np.random.default_rng(20261125)
    inside, bare = dict.fromkeys(EXPRESSIONS, 0), 0
    for _ in range(SETTINGS):
        spread = np.array([QUANTIZER, COMPENSATOR]) * np.sqrt(random.chisquare(60, 2) / 60)
        parts = setting(random, spread)
        for expression, truth in EXPRESSIONS.items():
            interval = compose(expression, parts).interval()
            inside[expression] += interval.lo <= truth <= interval.hi
        without = compose("b - f", {name: dataclasses.replace(one, draws={}) for name, one in parts.items()}).interval()
        bare += without.lo <= EXPRESSIONS["b - f"] <= without.hi
    assert (interval.covers, without.covers) == ("windows and pooled seeds", "windows only")
    assert all(0.92 <= count / SETTINGS <= 0.97 for count in inside.values()), inside
    assert bare / SETTINGS < 0.7, "what one seed covers by its windows alone"
