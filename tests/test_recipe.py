"""Recipes: the grammar, its errors, and what every entry of the registries has."""

import dataclasses
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.baselines import BASELINES
from repro.errors import UserError
from repro.methods import METHODS
from repro.recipe import STEPS, parse


def only(text):
    (step,) = parse(text).steps
    return step


def test_full_precision_is_no_step():
    recipe = parse(" fp16 ")
    assert recipe.name == "fp16" and recipe.steps == () and not recipe.calibrated and recipe.slug == "fp16"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("rtn", {"bits": 4, "group": 0, "symmetric": False}),
        ("rtn-w3-pc", {"bits": 3, "group": 0}),
        ("rtn-w2-g128-sym", {"bits": 2, "group": 128, "symmetric": True}),
        ("rtn-w8-asym", {"bits": 8, "symmetric": False}),
        ("rtn-clip=mse", {"clip": "mse"}),
        ("gptq-w4-g128-act_order", {"bits": 4, "group": 128, "act_order": True}),
        ("gptq-act_order=false", {"act_order": False}),
        ("gptq-percdamp=0.05", {"percdamp": 0.05}),
        ("gptq-percdamp=1", {"percdamp": 1.0}),
        ("gptq-blocksize=64", {"blocksize": 64}),
    ],
)
def test_words_become_fields(text, wanted):
    step = only(text)
    assert step.name == text.split("-")[0] and step.module is STEPS[step.name]
    assert {key: getattr(step.config, key) for key in wanted} == wanted
    untouched = {f.name: f.default for f in dataclasses.fields(step.config) if f.name not in wanted}
    assert {key: getattr(step.config, key) for key in untouched} == untouched


def test_steps_keep_their_order():
    recipe = parse("rtn-w4-pc+gptq-w3-g128 +  rtn-w8")
    assert [step.name for step in recipe.steps] == ["rtn", "gptq", "rtn"]
    assert [step.config.bits for step in recipe.steps] == [4, 3, 8]
    assert recipe.name == "rtn-w4-pc + gptq-w3-g128 + rtn-w8"
    assert recipe.slug == "rtn-w4-pc_gptq-w3-g128_rtn-w8"


def test_calibrated_when_any_step_is():
    assert not parse("rtn-w4").calibrated
    assert parse("gptq-w4").calibrated and parse("rtn-w8 + gptq-w4").calibrated


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "unknown step ''"),
        ("gtpq-w4", "unknown step 'gtpq': did you mean 'gptq'?"),
        ("rtn-w4 +", "unknown step ''"),
        ("rtn-w4 + fp16", "fp16 is full precision, alone and without options"),
        ("fp16-w4", "fp16 is full precision, alone and without options"),
        ("rtn--w4", "'' says nothing to rtn"),
        ("rtn-w", "'w' says nothing to rtn, whose config has bits, clip, group, scale_dtype, symmetric"),
        ("rtn-q4", "'q4' says nothing to rtn"),
        ("rtn-act_order", "'act_order' says nothing to rtn"),
        ("rtn-a8", "'a8' says nothing to rtn"),
        ("rtn-bits", "'bits' says nothing to rtn"),
        ("rtn-bits=true", "'bits=true' says nothing to rtn"),
        ("rtn-nosuch=1", "'nosuch=1' says nothing to rtn"),
        ("rtn-w4-w3", "bits of rtn is given twice"),
        ("rtn-pc-g128", "group of rtn is given twice"),
        ("rtn-sym-asym", "symmetric of rtn is given twice"),
        ("gptq-act_order-act_order=false", "act_order of gptq is given twice"),
        ("rtn-bits=four", "bits: expected int, got str 'four'"),
        ("rtn-bits=[", "'[' is no value for bits of rtn"),
        ("rtn-clip=none2", "unknown value 'none2': did you mean 'none'?"),
        ("gptq-percdamp=", "percdamp: expected float, got NoneType None"),
        ("rtn-w9", "bits is 9; a uniform grid has 2 to 8"),
        ("gptq-percdamp=.nan2", "percdamp: expected float"),
    ],
)
def test_every_error_is_one_sentence_with_the_recipe(text, reason):
    with pytest.raises(UserError) as error:
        parse(text)
    assert reason in str(error.value) and "\n" not in str(error.value)
    assert "9; a uniform" in reason or f"recipe {text!r}: " in str(error.value)


words = st.sampled_from(["w2", "w3", "w4", "w8", "g32", "g128", "pc", "sym", "asym", "clip=mse", "scale_dtype=float32"])
blanks = st.sampled_from(["", " ", "  ", "\t"])


@st.composite
def recipes(draw):
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(["rtn", "gptq"]))
        parts.append("-".join([name, *draw(st.lists(words, max_size=3, unique=True))]))
    return [draw(blanks) + part + draw(blanks) for part in parts]


@given(recipes())
def test_blanks_change_nothing_and_the_name_is_stable(parts):
    try:
        recipe = parse("+".join(parts))
    except UserError as error:
        assert "given twice" in str(error)
        return
    again = parse(recipe.name)
    assert again == recipe and again.name == " + ".join(part.strip() for part in parts)
    assert again.slug == recipe.slug and set(recipe.slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.=-")


def test_no_name_is_in_both_registries():
    assert not set(BASELINES) & set(METHODS) and set(BASELINES | METHODS) == set(STEPS)
    assert "fp16" not in STEPS


@pytest.mark.parametrize("name", STEPS)
def test_every_entry_has_the_face_of_a_step(name):
    module = STEPS[name]
    assert isinstance(module, ModuleType) and isinstance(module.CALIBRATED, bool) and callable(module.apply)
    assert dataclasses.is_dataclass(module.Config) and module.Config.__dataclass_params__.frozen
    assert module.__doc__ and module.apply.__doc__
    assert only(name).config == module.Config()
    assert "-" not in name and "+" not in name and " " not in name
