"""FlexQuant's own ideas: the signal, the order, the rule, the log; slow references and properties."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import papers
from repro.core.errors import UserError
from repro.methods.flexquant import order, schedule
from repro.methods.flexquant.config import Config
from repro.methods.flexquant.order import Move
from repro.methods.flexquant.pple import fault_tolerance, pple
from repro.methods.flexquant.schedule import Controller, Switch
from repro.specs import tables

LAYERS = ["a", "b", "c"]
SIZES = {"a": 10, "b": 30, "c": 60}
EQUAL = {bits: dict.fromkeys(LAYERS, 0.0) for bits in (8, 4)}  # the layers' own order


# --- the signal -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pple_is_1_when_certain_and_the_vocabulary_when_uniform(dtype):
    certain, uniform = torch.full((1, 4096), -1e4), torch.zeros(1, 4096)
    certain[0, 7] = 1e4
    assert pple(certain.to(dtype)).item() == 1
    assert pple(uniform.to(dtype)).item() == pytest.approx(4096, rel=1e-5)
    two = torch.full((1, 4096), -math.inf)
    two[0, 3] = two[0, 4000] = 5.0
    assert pple(two.to(dtype)).item() == pytest.approx(2, rel=1e-6)


@given(st.integers(0, 2**31), st.floats(0.01, 30), st.integers(2, 300))
@settings(deadline=None, max_examples=40)
def test_pple_is_that_of_float64_and_between_1_and_the_vocabulary(seed, scale, size):
    logits = scale * torch.randn(3, size, generator=torch.Generator().manual_seed(seed))
    shares = logits.double().softmax(1).numpy()
    slow = [math.exp(scipy.stats.entropy(row)) for row in shares]
    assert pple(logits).tolist() == pytest.approx(slow, rel=1e-4)
    assert all(1 - 1e-6 <= value <= size * (1 + 1e-5) for value in pple(logits).tolist())
    ranked = np.sort(shares, 1)
    assert fault_tolerance(logits).tolist() == pytest.approx((ranked[:, -1] - ranked[:, -2]).tolist(), abs=1e-5)


# --- the order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["quantized", "full"])
def test_a_divergence_is_that_of_two_histograms(direction):
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(40, 50, generator=generator)
    rounded = (full * 2).round() / 2
    config = Config(direction=direction, bins=37, pseudocount=0.5)
    edges = np.histogram_bin_edges(torch.cat([full, rounded]).numpy().ravel(), 37)
    p, q = (np.histogram(w.double().numpy().ravel(), edges)[0] + 0.5 for w in (full, rounded))
    wanted = scipy.stats.entropy(q, p) if direction == "quantized" else scipy.stats.entropy(p, q)
    assert order.weight_divergence(full, rounded, config) == pytest.approx(wanted, rel=1e-9)
    assert order.weight_divergence(full, full, config) == 0
    assert order.weight_divergence(torch.ones(2, 3), torch.ones(2, 3), config) == 0


def test_the_smallest_divergence_goes_first_and_every_control_is_another_order():
    divergence = {8: {"a": 0.3, "b": 0.1, "c": 0.2}, 4: {"a": 1.0, "b": 3.0, "c": 2.0}}

    def made(**how):
        return [(move.layer, move.bits) for move in order.moves(divergence, LAYERS, Config(**how))]

    assert made() == [("b", 8), ("c", 8), ("a", 8), ("a", 4), ("c", 4), ("b", 4)]
    assert made(order="reversed") == [("a", 8), ("c", 8), ("b", 8), ("b", 4), ("c", 4), ("a", 4)]
    assert made(order="model") == [("a", 8), ("b", 8), ("c", 8), ("a", 4), ("b", 4), ("c", 4)]
    assert made(advance="layer") == [("b", 8), ("b", 4), ("c", 8), ("c", 4), ("a", 8), ("a", 4)]
    drawn = {tuple(made(order="random", seed=seed)) for seed in range(20)}
    assert len(drawn) > 3 and made(order="random", seed=3) == made(order="random", seed=3)
    for moves in drawn:
        layers = [layer for layer, _ in moves]
        assert layers[:3] == layers[3:]


# --- the rule ---------------------------------------------------------------------------------------------------------


def run(config, signals, prompt=(5.0,), rule=None):
    """A generation whose tokens 0, 1, … have these PPLEs: the controller after it."""
    made = Controller(config, order.moves(EQUAL, LAYERS, config), rule)
    made.start(list(prompt))
    for token, value in enumerate(signals):
        made.observe(value, token)
    return made


def slow_log(config, signals, threshold):
    """Algorithm 1 written out: the means of every token's own window, with the weights that computed it."""
    ahead, log, since = order.moves(EQUAL, LAYERS, config), [], 1
    for token in range(1, len(signals)):
        own = signals[max(since, token - config.window + 1) : token + 1]
        if token >= since and len(own) == config.window and np.mean(own) < threshold and ahead:
            taken, ahead = ahead[: config.layers], ahead[config.layers :]
            since = token + 2
            log += [Switch(since, move.layer, move.bits) for move in taken]
    return log


@given(st.lists(st.floats(1, 9), max_size=60), st.integers(1, 8), st.integers(1, 4), st.floats(1, 9))
@settings(deadline=None, max_examples=150)
def test_switches_are_those_of_algorithm_1_one_way_in_order_and_once_a_window(signals, window, layers, threshold):
    config = Config(window=window, layers=layers, threshold=threshold)
    made = run(config, signals)
    assert made.log == slow_log(config, signals, threshold)
    assert [Move(s.layer, s.bits) for s in made.log] == order.moves(EQUAL, LAYERS, config)[: len(made.log)]
    steps = sorted({switch.step for switch in made.log})
    assert all(later - earlier >= window + 1 for earlier, later in zip(steps, steps[1:]))
    width = dict.fromkeys(LAYERS, 16)
    for switch in made.log:
        assert switch.bits < width[switch.layer]
        width[switch.layer] = switch.bits
    assert width == made.state.bits


@given(st.lists(st.floats(1, 9), max_size=40), st.integers(0, 40))
@settings(deadline=None, max_examples=60)
def test_a_generation_that_goes_on_has_the_same_schedule(signals, cut):
    """What has been decided depends on the tokens so far alone."""
    config = Config(window=3, threshold=5.0)
    whole, begun = run(config, signals), run(config, signals[:cut])
    assert begun.log == [switch for switch in whole.log if switch.step < min(cut, len(signals)) + schedule.BEHIND]


def test_thresholds_are_fixed_the_prompts_mean_or_a_multiple_of_it():
    prompt, signals = [100.0, 2.0, 4.0], [9.0] + [3.5] * 9
    for config, switches in [
        (Config(window=2, prompt_tokens=2), 0),  # a mean of 3.0 is not undercut
        (Config(window=2, prompt_tokens=3), 3),
        (Config(window=2, prompt_tokens=2, multiple=1.2), 3),
        (Config(window=2, threshold=3.6), 3),
        (Config(window=2, threshold=3.5), 0),  # below, not at
    ]:
        assert len(run(config, signals, prompt).log) == switches, config


def test_no_window_and_all_layers_at_once_switch_before_the_first_step():
    made = run(Config(window=0, threshold=1e30, layers=100), [5.0] * 4)
    assert made.log == [Switch(1, move.layer, move.bits) for move in order.moves(EQUAL, LAYERS, Config())]
    assert made.state.bits == dict.fromkeys(LAYERS, 4)
    assert run(Config(window=0, threshold=1.0), [1.0] * 50).log == []


def test_an_interval_switches_whatever_the_signal_is():
    made = run(Config(interval=5), [1e3] * 22)
    assert [(s.step, s.layer) for s in made.log] == [(6, "a"), (11, "b"), (16, "c"), (21, "a")]


def test_a_rule_of_ones_own_says_which_layers_are_switched():
    """Here: the last layer as soon as a token is certain."""

    def rule(pple, step, state):
        return [state.ahead[-1].layer] if pple < 1.5 else []

    made = run(Config(path=[16, 4]), [9, 9, 1.2, 9, 1.1], rule=rule)
    assert made.log == [Switch(4, "c", 4), Switch(6, "b", 4)]
    with pytest.raises(UserError, match="the rule names 'x', which has no move left"):
        run(Config(), [1, 1], rule=lambda pple, step, state: ["x"])


# --- the log ----------------------------------------------------------------------------------------------------------


def test_mean_bits_are_those_of_every_step_written_out():
    log = [Switch(3, "c", 8), Switch(5, "a", 8), Switch(5, "a", 4), Switch(9, "b", 8)]
    by_hand = [16, 16, 0.6 * 8 + 0.4 * 16, 0.6 * 8 + 0.4 * 16, 0.6 * 8 + 0.1 * 4 + 0.3 * 16]
    assert schedule.bits_by_step(log, SIZES, 16, 5) == pytest.approx(by_hand)
    assert schedule.mean_bits(log, SIZES, 16, 5) == pytest.approx(np.mean(by_hand))
    assert schedule.mean_bits(log, SIZES, 16, 5, prefill=8) == pytest.approx((sum(by_hand) + 8) / 6)
    assert schedule.mean_bits([], SIZES, 16, 0) == 16


@given(st.integers(1, 6), st.integers(10, 200), st.floats(0, 1), st.booleans(), st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_controls_have_the_mean_bits_of_what_they_stand_against(count, steps, share, drawn, seed):
    """As near as one step of one switch can bring them."""
    config = Config(path=[16, 8, 4])
    ahead = order.moves(EQUAL, LAYERS, config)[:count]

    def cost(times):
        return schedule.mean_bits([Switch(t, m.layer, m.bits) for t, m in zip(times, ahead)], SIZES, 16, steps)

    def steps_of(parameter):
        if drawn:
            return schedule.random_steps(count, parameter, steps, seed)
        return schedule.even_steps(count, parameter, steps)

    low, high = (1e-3, 1e3) if drawn else (1e-2, 2.0 * steps)
    least, most = sorted((cost(steps_of(low)), cost(steps_of(high))))
    target = least + share * (most - least)
    times = schedule.matched(steps_of, cost, target, low, high)
    assert times == sorted(times) and all(schedule.EARLIEST <= t <= steps + 1 for t in times)
    assert abs(cost(times) - target) <= 8 * count / steps + 1e-9


def test_planned_switches_come_at_their_steps():
    config = Config()
    made = run(config, [9.0] * 30, rule=schedule.planned_rule([3, 4, 4, 20], 1))
    assert [(s.step, s.layer, s.bits) for s in made.log] == [(3, "a", 8), (4, "b", 8), (4, "c", 8), (20, "a", 4)]


@pytest.mark.parametrize(
    "how, message",
    [
        ({"path": [4, 8]}, "path is [4, 8]; it goes down only"),
        ({"path": [8]}, "two widths or more"),
        ({"path": [16, 5]}, "path has 5 bits; choose from 16, 8, 4, 3, 2"),
        ({"threshold": 0.9}, "threshold is 0.9; PPLE is never below 1"),
        ({"threshold": math.nan}, "PPLE is never below 1"),
        ({"threshold": 2.0, "multiple": 2.0}, "give one of them"),
        ({"layers": 0}, "layers is 0; it must be 1 or more"),
        ({"window": -1}, "window is -1; it must be 0 or more"),
        ({"pseudocount": 0.0}, "pseudocount is 0.0; it must be above 0"),
    ],
)
def test_settings_that_mean_nothing_are_a_sentence(how, message):
    with pytest.raises(UserError) as error:
        Config(**how)
    assert message in str(error.value)


# --- the paper's claims -----------------------------------------------------------------------------------------------

BACKGROUND = {"F03", "F04", "F05", "F08"}  # figures of other papers that it cites, and its own constant of 20 tokens


def test_every_claim_of_the_paper_has_a_predicate_or_a_line_among_its_own_numbers():
    every = [*tables.headline().claims]
    for paper, name in tables.specified():
        every += tables.table(paper, name).claims if paper == "flexquant" else ()
    named = set()
    for claim in every:
        if claim.claim.startswith("flexquant"):
            named |= set(claim.claim.split()[1:])
    lines = papers.claims("flexquant")
    by_arithmetic = {name for name, line in lines.items() if line["consistent"] in ("yes", "no") and line["recomputed"]}
    assert set(lines) - named - by_arithmetic == BACKGROUND
    assert {"F01", "F02", "F06", "F07", "F09", "F10", "F11", "F12", "F13", "F14", "F15", "F17", "F20"} <= named
    assert {"F11", "F18", "F19", "F20"} <= {name for name, line in lines.items() if line["consistent"] == "no"}
