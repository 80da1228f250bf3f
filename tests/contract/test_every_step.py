"""One contract for every step: what is asked wrongly, saved, interrupted, or given to the engine.

What is a step's own (its equations, its paper's settings) is tested in tests/methods and tests/baselines.
"""

import answers
import pytest
import torch

from repro.core.errors import UserError
from repro.engine import weights
from repro.models.lowbit import LowBitModel
from repro.recipes import recipe
from repro.store import job
from repro.train import end_to_end

NAMES = sorted(answers.RECIPES)
ROTATED = "spinquant"  # trains rotations by a solver of its own in seconds, and keeps nothing in between
TRAINED = [name for name in NAMES if name != ROTATED and recipe.parse(answers.RECIPES[name]).steps[-1].work]


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Checkpoints of these tests lie in a folder of their own."""
    monkeypatch.setattr(job, "BUILD", tmp_path / "build")


def applied(name: str) -> LowBitModel:
    """A tiny model after the recipe of a step."""
    lm = LowBitModel(answers.tiny_model(name))
    for one in recipe.on_device(recipe.parse(answers.RECIPES[name]).steps, "cpu"):
        one.module.apply(lm, answers.token_ids()[:6], one.config)
    return lm


@pytest.fixture(scope="module")
def made():
    """What each step makes, made once for all of these tests."""
    known = {}

    def of(name: str) -> LowBitModel:
        if name not in known:
            known[name] = applied(name)
        return known[name]

    return of


@torch.no_grad()
def logits(lm: LowBitModel) -> torch.Tensor:
    return lm.model(answers.token_ids()[6:], use_cache=False).logits


def test_every_step_has_a_recipe_here():
    assert set(NAMES) | {"load"} == set(recipe.STEPS), "the last reads what was stored"


@pytest.mark.parametrize("name", sorted(recipe.STEPS))
def test_an_unknown_option_is_one_sentence_with_those_that_there_are(name):
    with pytest.raises(UserError, match=f"{name} has no option 'nonsense'; options: ") as refused:
        recipe.parse(f"{name}(nonsense=1)")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", NAMES)
def test_its_name_is_read_back_as_the_same_config(name):
    parsed = recipe.parse(answers.RECIPES[name])
    assert recipe.parse(parsed.name).config == parsed.config


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_computes_the_same_bits(name, made, tmp_path):
    lm = made(name)
    lm.save(tmp_path / "model.safetensors", {"of": "a test"})
    again = LowBitModel(answers.tiny_model(name))
    assert not torch.equal(logits(again), logits(lm)), "the step changes something"
    assert again.load(tmp_path / "model.safetensors") == {"of": "a test"}
    assert torch.equal(logits(again), logits(lm))


@pytest.mark.parametrize("name", TRAINED)
def test_a_killed_training_goes_on_with_the_same_bits(name, monkeypatch):
    """It is killed in its last step of the optimizer; what it had finished is not done again."""
    monkeypatch.setattr(end_to_end, "SAVE_EVERY", 0.0)
    steps, last = [], [None]
    true_step = torch.optim.AdamW.step

    def counted(self, *args, **kwargs):
        steps.append(None)
        if len(steps) == last[0]:
            raise KeyboardInterrupt
        return true_step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    want = applied(name)
    whole = len(steps)
    assert whole > 1
    last[0] = 2 * whole
    with pytest.raises(KeyboardInterrupt):
        applied(name)
    assert list(job.BUILD.rglob("*.safetensors")), "what was trained is kept"
    lm = applied(name)
    assert torch.equal(logits(lm), logits(want)) and lm.facts == want.facts
    assert whole < len(steps) - whole < 2 * whole, "not all of it is done again"
    assert not list(job.BUILD.rglob("*.safetensors")), "nothing is left"


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_takes_it_or_says_why_not(name, made):
    """Its products of single layers equal the layers; a step that it does not run is refused in one sentence."""
    lm = made(name)
    x = torch.randn(3, lm.model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    layer = "model.layers.0.self_attn.q_proj"
    try:
        product = weights.product(lm, [layer], torch.device("cpu"), torch.float32)
    except UserError as refused:
        assert "engine" in str(refused) and "\n" not in str(refused)
        return
    with torch.no_grad():
        want = lm.model.get_submodule(layer)(x)
    torch.testing.assert_close(product(x), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
