"""Recipes: the grammar, its errors, and what every entry of the registries has."""

import dataclasses
import json
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.baselines import BASELINES
from repro.core.errors import UserError
from repro.methods import METHODS
from repro.recipes.recipe import STEPS, Step, parse, with_options, with_seed


def only(text):
    (step,) = parse(text).steps
    return step


def test_full_precision_is_no_step():
    recipe = parse(" fp16 ")
    assert recipe.name == "fp16"
    assert recipe.steps == ()
    assert not recipe.calibrated
    assert recipe.slug == "fp16"
    assert recipe.config == [] and recipe.before == "" and not recipe.seeded


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
    assert recipe.name == "rtn-w4-pc + gptq-w3-g128 + rtn-w8-pc"
    assert recipe.slug == "rtn-w4-pc_gptq-w3-g128_rtn-w8-pc"
    assert recipe.before == "rtn-w4-pc + gptq-w3-g128" and parse("rtn").before == ""
    assert parse("awq-w4 + spear").before == "", "awq rescales"


def test_calibrated_when_any_step_is():
    assert not parse("rtn-w4").calibrated
    assert parse("gptq-w4").calibrated and parse("rtn-w8 + gptq-w4").calibrated
    assert not parse("q4_k").calibrated and parse("q4_k-importance=mean_square").calibrated, "its config says"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "unknown step ''"),
        ("gtpq-w4", "did you mean 'gptq'?"),
        ("rtn-w4 +", "unknown step ''"),
        ("rtn-w4 + fp16", "fp16 is full precision, alone and without options"),
        ("fp16-w4", "fp16 is full precision, alone and without options"),
        ("rtn--w4", "rtn has no option ''"),
        ("rtn-w", "rtn has no option 'w'; options: bits, clip, group, scale_dtype, symmetric"),
        ("rtn-q4", "rtn has no option 'q4'; options: bits"),
        ("rtn-act_order", "rtn has no option 'act_order'; options: bits"),
        ("rtn-a8", "rtn has no option 'a8'; options: bits"),
        ("rtn-bits", "option 'bits' of rtn needs a value: bits=..."),
        ("rtn-bits=true", "bits: expected int, got bool True"),
        ("rtn-nosuch=1", "rtn has no option 'nosuch'; options: bits"),
        ("rtn-w4-w3", "bits of rtn is given twice"),
        ("rtn-pc-g128", "group of rtn is given twice"),
        ("rtn-sym-asym", "symmetric of rtn is given twice"),
        ("gptq-act_order-act_order=false", "act_order of gptq is given twice"),
        ("rtn-bits=four", "bits: expected int, got str 'four'"),
        ("rtn-bits=[", "unbalanced brackets or quotes: ']' is missing"),
        ("rtn-clip=none2", "unknown value 'none2'"),
        ("gptq-percdamp=", "percdamp: expected float, got NoneType None"),
        ("rtn-w9", "bits is 9; a uniform grid has 2 to 8"),
        ("gptq-percdamp=.nan2", "percdamp: expected float"),
        ("gptq-percdamp=.nan", "'.nan' is no value for percdamp of gptq"),
        ("gptq(percdamp=1e999)", "'1e999' is no value for percdamp of gptq"),
        ("gptq-percdamp=-0.5", "percdamp is -0.5"),
        ("rtn(a=8)", "rtn has no option 'a'; options: bits"),
        ("rtn(w=4, bits=3)", "bits of rtn is given twice"),
        ("rtn(w=4,)", "rtn has no option ''"),
        ("rtn(bits)", "option 'bits' of rtn needs a value"),
        ("rtn(w=4", "unbalanced brackets or quotes: ')' is missing"),
        ("rtn(w=4))", "unbalanced brackets: ')' closes nothing"),
        ("rtn(w=4)(g=32)", "unbalanced brackets: ')' closes nothing"),
        ("rtn(w=4]", "unbalanced brackets: ']' closes nothing"),
        ("rtn(clip='mse)", 'unbalanced brackets or quotes: "\'" is missing'),
        ("rtn(w=4) g128", "' g128' follows the closing bracket of 'rtn'"),
        ("rtn(w=!!python/object/apply:os.getcwd [])", "is no value for bits of rtn"),
        ("rtn(w=!!binary aa)", "is no value for bits of rtn"),
        ("rtn(w=[4])", "bits: expected int, got list [4]"),
        ("fp16()", "fp16 is full precision, alone and without options"),
    ],
)
def test_every_error_is_one_sentence_with_the_recipe(text, reason):
    with pytest.raises(UserError) as error:
        parse(text)
    assert reason in str(error.value) and "\n" not in str(error.value)
    assert f"recipe {text!r}: " in str(error.value)


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
    assert again == recipe and again.name == recipe.name
    calls = []
    for part in parts:
        name, *options = part.strip().split("-")
        calls.append(f"{name}({', '.join(options)})")
    called = parse(" + ".join(calls))
    assert called == recipe and called.name == recipe.name and called.config == recipe.config
    assert again.slug == recipe.slug and set(recipe.slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.=-")


# --- values, forms and names ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Made:
    """Fields of every type that a method of the papers needs."""

    bits: int = 4
    act_bits: int = 16
    group: int = 0
    symmetric: bool = False
    rank: int = 0
    lr1: float = 1e-3
    flag: bool = True
    text: str = "plain"
    ranks: tuple[int, ...] = (8,)
    nested: tuple[tuple[float, ...], ...] = ()
    maybe: int | None = None
    mixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0


@pytest.fixture(scope="module")
def made():
    """A step `made` in the registry."""
    module = ModuleType("made")
    module.Config, module.CALIBRATED = Made, False
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "made", module)
        yield


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("made(w=4, g=128, lr1=5e-05, ranks=[8, 4, 2])", {"group": 128, "lr1": 5e-05, "ranks": (8, 4, 2)}),
        ("made(a=8, r=3, sym, flag=false)", {"act_bits": 8, "rank": 3, "symmetric": True, "flag": False}),
        ("made(pc, asym, flag)", {}),
        ("made ( w = 3 ,\n g = 32 )", {"bits": 3, "group": 32}),
        ("made-lr1=5e-05-w3", {"lr1": 5e-05, "bits": 3}),
        ("made-lr1=1e+5-w3", {"lr1": 1e5, "bits": 3}),
        ("made-lr1=-2.5-w3", {"lr1": -2.5, "bits": 3}),
        ("made-lr1=-.5E-3", {"lr1": -0.0005}),
        ("made-seed=-3-g32", {"seed": -3, "group": 32}),
        ("made(lr1=1e+5)", {"lr1": 1e5}),
        ("made(lr1=5E-05)", {"lr1": 5e-05}),
        ("made(lr1=2)", {"lr1": 2.0}),
        ("made(text='a + b, (c')", {"text": "a + b, (c"}),
        ("made-text='a - b + (c'-w3", {"text": "a - b + (c", "bits": 3}),
        ("made(text='it''s')", {"text": "it's"}),
        ('made(text="q\\"]")', {"text": 'q"]'}),
        ("made(text=it's)", {"text": "it's"}),
        ("made(text=a=b)", {"text": "a=b"}),
        ("made(text=2024-01-01)", {"text": "2024-01-01"}),
        ("made(text='null')", {"text": "null"}),
        ("made(maybe=null)", {}),
        ("made(maybe=3)", {"maybe": 3}),
        ("made(nested=[[1, 2e-3], []])", {"nested": ((1.0, 0.002), ())}),
        ("made(mixed={a: [1, true, null], b: {c: x}})", {"mixed": {"a": [1, True, None], "b": {"c": "x"}}}),
    ],
)
def test_values_are_those_of_yaml(made, text, wanted):
    config = only(text).config
    assert config == Made(**wanted)
    assert all(type(getattr(config, key)) is type(value) for key, value in wanted.items())
    assert only(parse(text).name).config == config


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtn", "rtn-w4-pc"),
        ("rtn(symmetric=true, g=64, bits=2)", "rtn-w2-g64-sym"),
        ("rtn-scale_dtype=float16-clip=mse-w3", "rtn-w3-pc-clip=mse"),
        ("gptq(percdamp=1, act_order)", "gptq-w4-pc-percdamp=1.0-act_order"),
        ("awq-search_clip=false", "awq-w4-pc-search_clip=false"),
        ("rtn + spear(effort=0.1, lr1=0.00005, r=8, seed=0)", "rtn-w4-pc + spear-r8-effort=0.1"),
        ("made(lr1=0.00005, a=8)", "made-w4-a8-pc-lr1=5e-05"),
        ("made-lr1=-0.0", "made-w4-pc-lr1=0.0"),
        ("made-lr1=-1e+16", "made-w4-pc-lr1=-1e+16"),
        ("gptq-w4-g-1", "gptq-w4-pc"),
        ("gptq(w=4, g=-1)", "gptq-w4-pc"),
        ("gptq-group=-1-act_order", "gptq-w4-pc-act_order"),
        ("made(ranks=[8, 4], w=3)", "made(w=3, pc, ranks=[8, 4])"),
        ("made(text=a-b, g=32, flag=no)", "made(w=4, g=32, flag=false, text=a-b)"),
        ("made(text='true')", 'made(w=4, pc, text="true")'),
        ("made(mixed={b: 1, a: 2})", "made(w=4, pc, mixed={a: 2, b: 1})"),
    ],
)
def test_the_name_is_canonical(made, text, name):
    assert parse(text).name == name
    assert parse(name) == parse(text) and parse(parse(text).name).name == parse(text).name


finite = st.floats(allow_nan=False, allow_infinity=False)
small = st.integers(-(2**40), 2**40)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "null",
        "yes",
        "5e-05",
        "1",
        "a-b",
        "a + b",
        "x, y",
        "#",
        "'",
        '"',
        "\\",
        "",
        " ",
        "=",
        "<<",
        "{",
        "]",
        "~",
        "é",
        "\x85",
    ]
)
anything = st.recursive(
    st.none() | st.booleans() | small | finite | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
configs = st.fixed_dictionaries(
    {},
    optional={
        **{"bits": small, "act_bits": small, "group": small, "symmetric": st.booleans(), "rank": small, "lr1": finite},
        **{"flag": st.booleans(), "text": texts, "ranks": st.lists(small, max_size=3), "seed": small},
        **{"nested": st.lists(st.lists(finite, max_size=2), max_size=2), "maybe": st.none() | small},
        "mixed": st.dictionaries(texts, anything, max_size=3),
    },
)


@given(values=configs)
def test_every_config_is_named_and_the_name_parses_to_it(made, values):
    tuples = {"ranks": tuple, "nested": lambda rows: tuple(map(tuple, rows))}
    config = Made(**{key: tuples.get(key, lambda v: v)(value) for key, value in values.items()})
    recipe = dataclasses.replace(parse("made"), steps=(Step("made", METHODS["made"], config),))
    again = parse(recipe.name)
    assert again == recipe and again.name == recipe.name and again.slug == recipe.slug
    assert len(recipe.slug) <= 80 and set(recipe.slug) <= ALLOWED
    both = parse(f"{recipe.name}+rtn-w3+{recipe.name}")
    assert [step.name for step in both.steps] == ["made", "rtn", "made"] and both.steps[2] == recipe.steps[0]
    if not recipe.name.startswith("made("):
        words = ", ".join(f"{key}={json.dumps(value)}" for key, value in again.config[0][1].items())
        assert parse(f"made({words})") == recipe


ALLOWED = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.=-")


@given(
    st.text(max_size=40) | st.text("rtnmade()[]{},=+-'\" :#&*!?|>@%w4e5.\n\t", max_size=40).map("made(text=".__add__)
)
def test_any_text_is_a_recipe_or_one_sentence(made, text):
    try:
        recipe = parse(text)
    except UserError as error:
        assert str(error).startswith("recipe ") and "\n" not in str(error)
    else:
        assert parse(recipe.name) == recipe


@pytest.mark.parametrize(
    "text",
    [
        "x" * 5000,
        "rtn-clip=" + "x" * 3900,
        "rtn-" + "x" * 3900,
        "[" * 5000,
        "[" * 900,
        "rtn(w=" + "[" * 900,
        "rtn(w=" + "[" * 900 + "]" * 900 + ")",
        "rtn(w=" + "{a: " * 900 + "}" * 900 + ")",
        "rtn(w=" + "- " * 1900 + ")",
        "rtn(w=" + "? " * 1900 + ")",
        "rtn(w=" + "a: " * 1300 + ")",
        "rtn(w=" + "9" * 3900 + ")",
        "rtn(w=0x" + "f" * 3900 + ")",
        "rtn(w=" + "1:" * 1900 + "1)",
        "gptq(percdamp=" + "9" * 3900 + ")",
        "+" * 3999,
        "rtn-x=" + "1e+" * 1300,
        "rtn(w='" * 500,
        "rtn-w4\x00",
        "rtn(w=4\x1b[2J)",
        "rtn(clip='\x7f')",
        "rtn\u2028-w4",
        "rtn-\ud800",
    ],
)
def test_hostile_text_is_one_short_sentence(text):
    with pytest.raises(UserError) as error:
        parse(text)
    message = str(error.value)
    assert message.isprintable() and message.startswith("recipe ") and len(message) < 400
    assert len(text) < 70 or f"recipe {text[:57] + '...'!r}: " in message


def test_minus_zero_has_the_name_of_zero_which_it_equals(made):
    assert with_options("made", {"made": {"lr1": -0.0}}) == "made-w4-pc-lr1=0.0" == parse("made-lr1=-0").name
    assert str(parse("made(lr1=-0.0)").config[0][1]["lr1"]) == "0.0"


def test_config_has_every_field_and_is_json(made):
    assert parse("rtn-w3 + made(ranks=[2, 1])").config == [
        ["rtn", {"bits": 3, "group": 0, "symmetric": False, "clip": "none", "scale_dtype": "float16"}],
        ["made", json.loads(json.dumps(dataclasses.asdict(Made(ranks=(2, 1)))))],
    ]
    assert parse("rtn-w3").config == parse("rtn(bits=3, group=0, asym)").config != parse("rtn-w4").config


def test_a_long_slug_is_cut_and_keeps_names_apart(made):
    slugs = {parse(f"made(text={'a' * 100}, seed={seed})").slug for seed in range(3)}
    assert len(slugs) == 3 and {len(slug) for slug in slugs} == {80}
    assert all(slug.startswith("made-w4-pc-text=aaa") and slug[71] == "." for slug in slugs)


def test_options_are_added_except_where_they_are_given(made):
    options = {"spear": {"effort": 0.1, "cka_samples": 16}, "made": {"ranks": [4, 2], "lr1": 5e-05}}
    assert with_options("rtn-w4-pc + spear", options) == "rtn-w4-pc + spear-cka_samples=16-effort=0.1"
    assert parse(with_options("rtn + spear(effort=1.0)", options)) == parse("rtn + spear-cka_samples=16")
    assert with_options("made(lr1=1)", options) == "made(w=4, pc, lr1=1.0, ranks=[4, 2])"
    assert with_options("fp16", options) == "fp16" and with_options("rtn", {}) == "rtn-w4-pc"
    with pytest.raises(UserError, match="rtn has no option 'effort'; options: bits"):
        with_options("rtn", {"rtn": {"effort": 1}})


def test_a_seed_goes_where_none_is_given(made):
    recipe = parse("rtn + made + made-seed=0 + made-seed=4")
    assert [getattr(step.config, "seed", None) for step in with_seed(recipe, 3).steps] == [None, 3, 0, 4]
    assert with_seed(recipe, 0) == recipe and with_seed(parse("fp16"), 3) == parse("fp16")
    assert with_seed(with_seed(recipe, 3), 5) == with_seed(recipe, 3)
    assert with_seed(parse("made"), 3).name == "made-w4-pc-seed=3"
    kept = parse(with_options("made-seed=0", {"made": {"rank": 2}}))
    assert with_seed(kept, 3) == kept, "with_options keeps what the text gives"


def test_seeded_is_calibrated_or_has_a_seed(made):
    assert parse("gptq").seeded and parse("made").seeded and parse("rtn + made").seeded
    assert not parse("rtn-w4").seeded and not parse("fp16").seeded


def test_registries_are_seen_live(made, monkeypatch):
    assert STEPS["made"] is METHODS["made"] and "made" in list(STEPS)
    with pytest.raises(UserError, match="unknown step 'mode'.*made"):
        parse("mode")
    assert parse("made").steps[0].module is METHODS["made"] and with_options("made", {}) == parse("made").name
    monkeypatch.setitem(METHODS, "made", BASELINES["rtn"])  # under the same name, after it was read
    assert parse("made").steps[0].module is BASELINES["rtn"]


def test_no_name_is_in_both_registries():
    assert not set(BASELINES) & set(METHODS) and set(BASELINES | METHODS) == set(STEPS)
    assert "fp16" not in STEPS


@pytest.mark.parametrize("name", STEPS)
def test_every_entry_has_the_interface_of_a_step(name):
    module = STEPS[name]
    assert isinstance(module, ModuleType) and isinstance(module.CALIBRATED, bool) and callable(module.apply)
    assert dataclasses.is_dataclass(module.Config) and module.Config.__dataclass_params__.frozen
    assert module.__doc__ and module.apply.__doc__
    follows = " + rtn" if hasattr(module, "PREPARES") else ""
    assert parse(name + follows).steps[0].config == module.Config()
    assert "-" not in name and "+" not in name and " " not in name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bitbybit-w2a16", "bitbybit-w2-g32"),
        ("bitbybit-w2a2", "bitbybit-w2-a2-g32"),
        ("bitbybit(w2a8, g=64)", "bitbybit-w2-a8-g64"),
        ("efficientqat-w3a16-g128", "efficientqat-w3-g128"),
        ("gptq-w4a16-g128", "gptq-w4-g128"),
    ],
)
def test_both_widths_in_one_word(text, name):
    """As the papers write them; a16 is what a step without low-bit inputs does anyhow."""
    assert parse(text).name == name


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rtn-w4a8", "rtn has no option 'a8'"),
        ("bitbybit-w2a16-w2", "bits of bitbybit is given twice"),
        ("bitbybit-w2a16-a16", "act_bits of bitbybit is given twice"),
        ("bitbybit-w2a", "no option 'w2a'"),
        ("spear-w2a16", "spear has no option 'w2'"),
    ],
)
def test_a_word_of_both_widths_that_does_not_fit(text, named):
    with pytest.raises(UserError, match=named):
        parse(text)
