"""One contract for every step: what is asked wrongly, saved, interrupted, or given to the engine.

What is a step's own (its equations, its paper's settings) is tested in tests/methods and tests/baselines.
"""

import answers
import pytest
import tiny
import torch

from repro.baselines import BASELINES, awq
from repro.core.errors import UserError
from repro.engine import weights
from repro.methods import METHODS
from repro.models import bits
from repro.models.lowbit import LowBitModel
from repro.models.quantized import FORMATS
from repro.recipes import recipe
from repro.store import job
from repro.train import end_to_end

pytestmark = pytest.mark.usefixtures("own_build_folder")  # where checkpoints lie
NAMES = sorted(answers.RECIPES)
ROTATED = "spinquant"  # trains rotations by a solver of its own in seconds, and keeps nothing in between
WITH_COLLECTIONS = (  # recipes whose options are lists and mappings
    "bitbybit(w=2, g=64, schedule=[w8a16, w2a16])",
    "bitbybit(w=2, g=32, any_precision, lambdas={2: 2.0, 8: 0.5}) + sliced-w4",
    "bitbybit(w=2, g=32, split=naive, split_metric=kurtosis, split_first=0.08, split_last=0.12, split_text=c4)",
    "matquant(g=0, lambdas={2: 1.0}) + sliced-w2",
)
# What the papers' own code or text sets, by step.
OFFICIAL = {
    "efficientqat": {
        **{"bits": 2, "group": 64, "lr": 2e-5, "quant_lr": 1e-4, "lr_final": 0.05, "epochs": 2, "batch": 2},
        "tokens": 4096 * 2048,
    },
    "e2e_qp": {"lr": 2e-5, "epochs": 1, "batch": 32, "tokens": 4096 * 4096, "warmup": 0.03, "clip": 0.3},
    "paretoq": {"bits": 2, "lr": 2e-5, "epochs": 1, "trained": "all", "act_levels": "seq", "tokens": 8192 * 2048},
    "bitdistiller": {
        **{"bits": 2, "group": 128, "lr": 8e-6, "batch": 128, "length": 1024, "clip_tokens": 512, "every": 4},
        **{"confidence": "maximum", "data": "sampled"},
    },
    "matquant": {"lambdas": {8: 1.0, 4: 1.0, 2: 1.0}},
    "smoothquant": {"bits": 8, "act_bits": 8, "group": 0, "symmetric": True, "alpha": 0.85},
    "spinquant": {
        **{"lr": 1.5, "batch": 8, "tokens": 800 * 2048, "epochs": 1, "bits": 4, "act_bits": 4, "group": 0},
        **{"solver": "gptq", "online": True},
    },
    "bitbybit": {"split": "rounding_aware"},  # the paper's method splits channels
}
TRAINED = [name for name in NAMES if name != ROTATED and recipe.parse(answers.RECIPES[name]).steps[-1].work]


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


@pytest.mark.parametrize("text", [*(answers.RECIPES[name] for name in NAMES), *WITH_COLLECTIONS])
def test_its_name_is_read_back_as_the_same_config(text):
    parsed = recipe.parse(text)
    assert recipe.parse(parsed.name).config == parsed.config


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_settings_are_the_defaults(name):
    config = recipe.STEPS[name].Config()
    assert {key: getattr(config, key) for key in OFFICIAL[name]} == OFFICIAL[name]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_computes_the_same_bits(name, made, tmp_path):
    lm, path = made(name), tmp_path / "model.safetensors"
    lm.save(path, {"of": "a test"})
    again = LowBitModel(answers.tiny_model(name))
    assert not torch.equal(logits(again), logits(lm)), "the step changes something"
    assert again.load(path) == {"of": "a test"}
    assert torch.equal(logits(again), logits(lm)) and bits.report(again) == bits.report(lm)
    assert again.dense.keys() == lm.dense.keys() and not again.full
    again.save(tmp_path / "again.safetensors", {"of": "a test"})
    assert path.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["phi", "qwen2"])
def test_so_it_is_of_other_layouts_and_dtypes(layout, dtype, tmp_path):
    """Of the step that changes the most beside its codes: norms, biases and weights that take scales in."""
    lm = LowBitModel(tiny.model(layout).to(dtype))
    awq.apply(lm, tiny.tokens(), awq.Config(group=32))
    lm.save(tmp_path / "model.safetensors", {})
    again = LowBitModel(tiny.model(layout).to(dtype))
    again.load(tmp_path / "model.safetensors")
    assert torch.equal(again.model(tiny.tokens()).logits, lm.model(tiny.tokens()).logits)


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_that_lacks_a_step_or_format_refuses_its_file(name, made, tmp_path, monkeypatch):
    lm = made(name)
    lm.save(tmp_path / "model.safetensors", {})
    attached = set()
    for attachments in lm.attachments.values():
        attached |= {attachment.step for attachment in attachments}
    formats = {weight.FORMAT for weight in lm.weights.values()}
    for known in (BASELINES, METHODS, FORMATS):
        for missing in attached | formats:
            monkeypatch.delitem(known, missing, raising=False)
    with pytest.raises(UserError, match="no method '|not a compressed model that this version reads"):
        LowBitModel(answers.tiny_model(name)).load(tmp_path / "model.safetensors")


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
