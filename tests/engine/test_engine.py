"""What a user of the engine sees: text, tokens and numbers; compressed models, shapes, and what is refused."""

import gc
import io
import itertools
import json
import math
import subprocess
import sys
from itertools import chain

import engines
import pytest
import small_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer

from repro import models
from repro.__main__ import main
from repro.baselines import gptq, grid, qera, rtn
from repro.core.errors import NotMeasurable, UserError
from repro.core.files import ROOT
from repro.engine import corrected, decoding, step, weights
from repro.engine.output import TextStream
from repro.generation import Engine
from repro.generation import engine as engines_by_name
from repro.jobs.target import Target
from repro.kernels import packing
from repro.models.lowbit import LowBitModel, block_linears
from repro.models.quantized import QuantizedWeight
from repro.specs import scale

PROMPT = "The history of the city"


@pytest.fixture(scope="module")
def engine():
    """pocket-3m in float32 with a context of 512."""
    return Engine.load("pocket-3m", context=512, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny Llama by name."""
    return engines.save("llama", tmp_path_factory.mktemp("tiny"))


def one(engine, prompt=PROMPT, count=24, **options):
    """The whole text of one prompt."""
    return next(engine.generate([prompt], count, **options))


# --- text -------------------------------------------------------------------------------------------------------------


def test_pieces_make_the_text_and_the_stats_count_it(engine):
    pieces = list(engine.generate(PROMPT, max_new_tokens=24))
    whole = one(engine)
    assert "".join(pieces) == whole and list(chain.from_iterable(piece.tokens for piece in pieces)) == whole.tokens
    assert [piece.ended for piece in pieces] == [""] * (len(pieces) - 1) + ["length"] and whole.ended == "length"
    prompt = engine.tokenizer(PROMPT)["input_ids"]
    assert engine.tokenizer.decode(prompt + whole.tokens, skip_special_tokens=True) == PROMPT + whole
    assert (engine.stats.prompt_tokens, engine.stats.new_tokens) == (len(prompt), 24)
    for name in ("prefill_s", "tokens_per_s", "ms_p50", "ms_p99", "mbu", "peak_bytes"):
        assert 0 < getattr(engine.stats, name) < math.inf, name
    assert engine.stats.ms_p50 <= engine.stats.ms_p99 and "tokens/s" in str(engine.stats)


def test_a_stop_text_across_tokens_ends_the_text_before_it(engine):
    whole = one(engine)
    pieces = list(engine.generate(PROMPT, 24))
    start = len(pieces[5]) - 1 + len("".join(pieces[:5]))
    stop = whole[start : start + 3]  # begins with the last character of a piece
    assert len(stop) == 3 and whole.find(stop) == start
    for stops in (stop, ["not in it", stop]):
        cut = one(engine, stop=stops)
        assert cut == whole[:start] and cut.ended == "stop" and len(cut.tokens) < 24
        assert "".join(engine.generate(PROMPT, 24, stop=stops)) == cut
        assert engine.stats.new_tokens == len(cut.tokens)  # what was decoded past it does not count
    assert one(engine, stop=whole[-1] + "never") == whole  # held back, then given


def test_the_end_of_text_ends_a_sequence_of_a_batch(engine, monkeypatch):
    whole, other = engine.generate([PROMPT, "In 1994 he"], 24)
    end = whole.tokens[7]
    monkeypatch.setattr(engine, "ends", frozenset({end}))
    cut, same = engine.generate([PROMPT, "In 1994 he"], 24)
    first = whole.tokens.index(end)
    assert cut.tokens == whole.tokens[: first + 1] and cut.ended == "eos" and whole.startswith(cut)
    assert same == other or end in other.tokens
    assert one(engine, eos=False) == whole


def test_every_end_that_the_generation_settings_name_ends_a_text(tmp_path):
    """Llama 3 and Qwen2 name more ends of a turn in generation_config.json than in config.json."""
    name = engines.save("llama", tmp_path)
    path = tmp_path / "generation_config.json"
    for named, ends in (([1, 17], {1, 17}), (0, {0}), ([], {1}), (None, {1})):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": named}))
        assert Engine.load(name, dtype="float32", device="cpu").ends == ends
    path.unlink()
    assert Engine.load(name, dtype="float32", device="cpu").ends == {1}


@given(st.text(min_size=1, max_size=30), st.integers(0, 20))
@settings(deadline=None, max_examples=60)
def test_text_comes_in_whole_characters(text, cut):
    tokenizer = models.tokenizer("pocket-3m")
    ids = tokenizer("x" + text)["input_ids"]
    cut = 2 + cut % (len(ids) - 1)
    while tokenizer.decode(ids[:cut]).endswith("\ufffd"):
        cut -= 1  # a prompt is whole text
    stream = TextStream(tokenizer, ids[:cut], ())
    pieces = [stream.push(token)[0] for token in ids[cut:]]
    whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    before = tokenizer.decode(ids[:cut], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert before + "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@given(st.lists(st.sampled_from("ab"), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=2))
@settings(deadline=None)
def test_stop_texts_are_found_wherever_tokens_end(letters, stop):
    class Letters:
        def decode(self, ids, **options):
            return "".join(map(chr, ids))

    stream, shown, stopped = TextStream(Letters(), [], stop), "", False
    for letter in letters:
        text, stopped = stream.push(ord(letter))
        shown += text
        if stopped:
            break
    whole = "".join(letters)
    ends = [whole.find(each) + len(each) for each in stop if each in whole]
    if not ends:
        assert not stopped and shown + stream.pending == whole
    else:  # the first that is complete, from where it begins
        done = whole[: min(ends)]
        assert stopped and shown == done[: min(done.find(each) for each in stop if each in done)]


def test_a_chat_is_the_tokenizers_template(engine, monkeypatch):
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[answer]"
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    assert engine.chat("Who?") == "<s>[user] Who?[answer]"
    assert engine._ids(engine.chat("Who?"))[:2] == [0, *engine.tokenizer("[", add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", [small_models.TEMPLATE, small_models.TEMPLATE.replace("bos_token + ", "")])
def test_the_ids_of_a_chat_are_those_of_transformers(tmp_path, adds_bos, template):
    """With or without BOS in the template, with or without BOS by the tokenizer."""
    folder = small_models.write_tokenizer(tmp_path / "chat", adds_bos, chat_template=template)
    small_models.llama(hidden_size=128).save_pretrained(folder)
    engine = Engine.load(str(folder), device="cpu", dtype="float32")
    turn = [{"role": "user", "content": "Once upon a time"}]
    wanted = AutoTokenizer.from_pretrained(folder).apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
    assert engine._ids(engine.chat("Once upon a time")) == wanted
    assert wanted.count(0) == 2 * ("bos_token" in template)
    text = "".join(engine.generate(engine.chat("Once upon a time"), 3))
    assert text == "".join(str(piece) for piece in engine.generate([wanted], 3))
    assert engine.stats.prompt_tokens == len(wanted)


BROKEN = {
    "{% for m in messages %}": "Unexpected end of template",
    "{{ messages.content.text }}": "'list object' has no attribute 'content'",
    "{{ raise_exception('only tools') }}": "only tools",
    "{{ 1 / 0 }}": "division by zero",
}


@pytest.mark.parametrize("template", BROKEN)
def test_a_broken_chat_template_is_a_sentence(engine, monkeypatch, template):
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    with pytest.raises(UserError, match="chat template of its tokenizer cannot be applied") as error:
        engine.chat("Who?")
    assert BROKEN[template] in str(error.value) and "\n" not in str(error.value)


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_a_draw_depends_on_seed_and_position_alone(engine):
    how = {"temperature": 1.0, "top_p": 0.95}
    prompts = [PROMPT, "In 1994 he", "x"]
    together = list(engine.generate(prompts, 16, seed=5, **how))
    assert [one(engine, p, 16, seed=5 + i, **how).tokens for i, p in enumerate(prompts)] == [t.tokens for t in together]
    again = list(engine.generate(prompts, 16, seed=[7, 6, 5], **how))
    assert again[1] == together[1] and again[0] != together[0]
    assert one(engine, seed=3, temperature=2.0, top_k=1) == one(engine)


def test_log_probabilities_are_scores(engine):
    text = one(engine, count=12, temperature=0.8, logprobs=True)
    prompt = engine.tokenizer(PROMPT)["input_ids"]
    scores = engine.score(prompt + text.tokens)[len(prompt) - 1 :]
    assert torch.allclose(torch.tensor(text.logprobs), scores, atol=1e-4)
    assert one(engine, count=2).logprobs is None
    pieces = list(engine.generate(PROMPT, 12, temperature=0.8, logprobs=True))
    assert sum((piece.logprobs for piece in pieces), []) == pytest.approx(text.logprobs, abs=1e-4)


def test_no_log_probability_is_computed_that_nobody_asked_for(engine, monkeypatch):
    """It reads the logits several times more: 8.6 % of a step of 1B shapes in W4 on an H100."""
    calls = []
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda *arguments: calls.append(arguments) or arguments[0].float())
    for how in ({}, {"temperature": 0.8}):
        one(engine, count=3, **how)
    assert not calls
    one(engine, count=3, logprobs=True)
    assert len(calls) == 3


def test_logits_and_scores_are_those_of_transformers(engine):
    ids = torch.randint(4096, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = models.load("pocket-3m")(ids[None]).logits[0]
    for engine.chunk in (7, 256):
        assert torch.allclose(engine.logits(ids), wanted, atol=1e-4)
        scores = wanted[:-1].log_softmax(1).gather(1, ids[1:, None])[:, 0]
        assert torch.allclose(engine.score(ids), scores, atol=1e-4)


# --- what a step costs on a CPU ---------------------------------------------------------------------------------------


def test_a_wide_weight_is_held_by_columns_once(engine):
    """Products of one token with more outputs than inputs take half the time so; a tied head is the embedding."""
    for block in engine.model.blocks:
        assert [p.weight.stride() for p in (block.qkv, block.gate_up)] == [(1, 512), (1, 1536)]
        assert block.out.weight.is_contiguous() and block.down.weight.is_contiguous()
    assert engine.model.embedding is engine.model.head.weight and engine.model.embedding.stride() == (1, 4096)
    x, weight, bias = torch.randn(3, 8), torch.randn(24, 8), torch.randn(24)
    assert torch.allclose(weights.Dense(weight, bias)(x), x @ weight.T + bias, atol=1e-5)
    assert weights.Dense(weight.bfloat16()).weight.is_contiguous()  # the library lays out 16-bit weights itself


class Calls(TorchDispatchMode):
    """Counts the operators of torch that are called."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        return operator(*args, **(kwargs or {}))


def test_a_step_calls_few_operators(engine):
    """At a small model their calls are half the time; views and conversions that do nothing count."""
    cache, at = step.Cache(engine.model, 1), torch.tensor([20], dtype=torch.int32)
    tokens = step.Tokens(torch.tensor([5]), torch.zeros(1, dtype=torch.int32), at, at, at + 1)
    with Calls() as calls:
        step.step(engine.model, cache, tokens)
    assert calls.count <= 90 * len(engine.model.blocks)


def test_a_step_takes_its_blocks_one_after_another_from_the_decoder(engine):
    class Reported(step.Decoder):
        """Says which block a step is given, and that the one before has been computed by then."""

        def in_turn(self):
            for index, block in enumerate(self.blocks):
                taken.append((index, bool(cache.keys[index - 1].any())))
                yield block

    taken = []
    reported = Reported(**vars(engine.model))
    cache = step.Cache(reported, 1)
    ids = torch.tensor([5, 6, 7])
    hidden = step.step(reported, cache, step.run_of(ids, 0, 0))
    assert taken == [(0, False), *((index, True) for index in range(1, len(engine.model.blocks)))]
    assert torch.equal(hidden, step.step(engine.model, step.Cache(engine.model, 1), step.run_of(ids, 0, 0)))


# --- one engine, many generations -------------------------------------------------------------------------------------


def test_an_interrupted_iterator_leaves_the_engine_usable(engine):
    whole = one(engine)
    pieces = engine.generate(PROMPT, 24)
    assert whole.startswith("".join(itertools.islice(pieces, 4)))
    assert one(engine) == whole
    with pytest.raises(UserError, match="another generation began"):
        next(pieces)
    pieces = engine.generate(PROMPT, 24)
    next(pieces)
    pieces.close()
    assert 1 <= engine.stats.new_tokens < 4 and one(engine) == whole
    pieces = engine.generate(PROMPT, 24)
    next(pieces)
    assert one(engine, count=7).ended == "length"
    del pieces  # ends after a later generation, whose stats stay
    assert engine.stats.new_tokens == 7


WITHOUT_TRITON = """
import importlib, pkgutil, sys
sys.modules["triton"] = None
from repro.generation import Engine
from repro.kernels import rms_norm
engine = Engine.load("pocket-3m", context=64, dtype="float32", device="cpu")
print("".join(engine.generate("Once upon a time", 4, temperature=0.8)))
assert rms_norm.unsupported("cuda")
assert not {"sklearn", "scipy.stats"} & set(sys.modules), "a second of every start"
for package in ("repro.engine", "repro.metrics"):
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
"""


def test_a_machine_without_triton_generates_and_has_every_metric(engine):
    """On macOS, on Arm and with PyTorch for CPUs there is none; the operators' references need none."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(engine.generate("Once upon a time", 4, temperature=0.8)) + "\n"


def test_a_thousand_tokens_take_no_more_memory(tiny):
    engine, sizes = Engine.load(tiny, context=1100, dtype="float32", device="cpu"), {}
    count = 0
    for piece in engine.generate("x", 1000, eos=False):
        count += len(piece.tokens)
        if (count > 100) not in sizes or piece.ended:
            gc.collect()
            tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
            sizes[count > 100 if not piece.ended else "end"] = sum(tensor.nbytes for tensor in tensors)
        last = piece
    assert engine.stats.new_tokens == 1000 and last.ended == "length"
    assert sizes["end"] <= sizes[True]


def test_captured_steps_are_plain_steps(tiny, monkeypatch):
    """The path of a GPU, with a graph that runs its step again: padding, capture, and state put back after it."""
    prompts = [[5, 6, 7], [8] * 30, [9]]
    wanted = [text.tokens for text in Engine.load(tiny, dtype="float32", device="cpu").generate(prompts, 9, eos=False)]
    advance, captured = decoding.advance, []

    class Graph:
        calls = ()

        def replay(self):
            advance(*self.calls)

    class Capture:
        def __init__(self, graph):
            captured.append(graph)

        def __enter__(self):
            monkeypatch.setattr(decoding, "advance", lambda *calls: setattr(captured[-1], "calls", calls))

        def __exit__(self, *error):
            monkeypatch.setattr(decoding, "advance", advance)

    class Stream:
        def wait_stream(self, other):
            pass

    for name, fake in {"CUDAGraph": Graph, "graph": Capture, "Stream": Stream, "current_stream": Stream,
                       "stream": lambda side: torch.inference_mode()}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    engine = Engine.load(tiny, dtype="float32", device="cpu")
    engine.steps = decoding.Steps(engine.model, 3)
    engine.steps.graphed = True
    for _ in range(2):
        assert [text.tokens for text in engine.generate(prompts, 9, eos=False)] == wanted
    assert one(engine, prompts[1], 9, eos=False).tokens == wanted[1]
    assert [len(graph.calls[2].ids) for graph in captured] == [4, 1]


# --- compressed models ------------------------------------------------------------------------------------------------


def compressed(tiny, monkeypatch, *steps, change=lambda lm: None):
    """An engine on a model that steps were applied to here, and that model as the harness runs it."""
    lm = LowBitModel(models.load(tiny))
    data = torch.randint(4096, (4, 64), generator=torch.Generator().manual_seed(0))
    for module, options in steps:
        module.apply(lm, data, module.Config(**options))
    change(lm)
    monkeypatch.setattr(engines_by_name, "compressed", lambda target, dtype, build: lm)
    return Engine.load(tiny, dtype="float32", device="cpu"), lm


RECIPES = {
    "w4 g128": [(rtn, {"bits": 4, "group": 128})],
    "w3 g64 symmetric": [(rtn, {"bits": 3, "group": 64, "symmetric": True})],
    "w8 pc": [(rtn, {"bits": 8, "group": 0, "symmetric": True})],
    "w2 g32": [(rtn, {"bits": 2, "group": 32})],
    "act order": [(gptq, {"bits": 4, "group": 32, "act_order": True})],
    "compensated": [(rtn, {"bits": 3, "group": 64}), (qera, {"rank": 4})],
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_compressed_model_says_what_the_harness_evaluates(tiny, monkeypatch, name):
    engine, lm = compressed(tiny, monkeypatch, *RECIPES[name])
    ids = torch.randint(4096, (30,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = lm.model(ids[None]).logits[0]
    assert torch.allclose(engine.logits(ids), wanted, atol=2e-3 * wanted.abs().max())
    if name == "compensated":
        assert isinstance(engine.model.blocks[0].qkv, corrected.Corrected)
        lm.attachments.clear()
        plain = Engine.load(tiny, dtype="float32", device="cpu")
        assert not torch.allclose(plain.logits(ids), wanted, atol=2e-3 * wanted.abs().max())


def test_layers_of_different_formats_stay_several_launches(tiny, monkeypatch):
    def wider(lm):
        name = "model.layers.0.self_attn.k_proj"
        lm.set_weight(name, grid.rtn(lm.full[name], grid.Grid(bits=8, group=0)))

    engine, lm = compressed(tiny, monkeypatch, *RECIPES["w4 g128"], change=wider)
    assert isinstance(engine.model.blocks[0].qkv, weights.Joined)
    assert isinstance(engine.model.blocks[1].qkv, weights.Dense)
    ids = torch.arange(20)
    with torch.no_grad():
        assert torch.allclose(engine.logits(ids), lm.model(ids[None]).logits[0], atol=1e-2)


@pytest.mark.parametrize("bits", [3, 4])
def test_packed_products_hold_the_codes(bits):
    """What a GPU would multiply: 3-bit codes in 4-bit slots, three layers in one weight, columns in GPTQ's order."""
    generator = torch.Generator().manual_seed(0)
    quantized, linears = [], []
    index = torch.randperm(128, generator=generator) // 32
    for rows in (48, 16, 16):
        codes = torch.randint(2**bits, (rows, 128), generator=generator, dtype=torch.uint8)
        scales = torch.rand(rows, 4, generator=generator).half().float() + 0.5
        zeros = torch.randint(2**bits, (rows, 4), generator=generator).float()
        quantized.append(QuantizedWeight(codes, scales, zeros, bits, 32, bits, 16, index.int()))
        linears.append(torch.nn.Linear(128, rows))
    packed, pack = [], packing.pack
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "pack", lambda *arguments: packed.append(pack(*arguments)) or packed[-1])
        product = weights._product(linears, quantized, None, torch.device("cpu"), torch.float32)
    assert len(packed) == 1 and (packed[0].bits, packed[0].rows) == (4, 80)
    x = torch.randn(3, 128, generator=generator)
    wanted = [x @ weight.dequantize().T + linear.bias for weight, linear in zip(quantized, linears)]
    assert torch.allclose(product(x), torch.cat(wanted, 1), rtol=1e-3, atol=0.1)


def test_a_recipe_is_built_once_or_named(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = {"recipe": "rtn-w4-g32", "dtype": "float32", "device": "cpu", "context": 64}
    with pytest.raises(UserError, match="not built here; run python -m repro compress .* --recipe 'rtn-w4-g32'"):
        Engine.load(tiny, build=False, **options)
    first = Engine.load(tiny, **options)
    assert "compress/" in capsys.readouterr().err
    again = Engine.load(tiny, build=False, **options)
    assert torch.equal(first.logits([1, 2, 3]), again.logits([1, 2, 3]))
    assert first.stats.stored_bytes < Engine.load(tiny, dtype="float32", device="cpu").stats.stored_bytes


# --- shapes -----------------------------------------------------------------------------------------------------------

PARAMETERS = {  # of the published checkpoints
    "Llama-3.2-1B": 1_235_814_400, "Llama-3.2-3B": 3_212_749_824, "Llama-2-7B": 6_738_415_616,
    "Llama-2-13B": 13_015_864_320, "Llama-2-70B": 68_976_648_192, "Llama-3-8B": 8_030_261_248,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-7B": 7_615_616_512, "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
}  # fmt: skip


def counted(name, recipe):
    """The decoder of a shape without memory for it."""
    target = Target(scale.load(name="pocket"), f"shape/{name}", recipe)
    config = engines_by_name.configuration(target)
    return engines_by_name.random_decoder(target.recipe, config, 16, torch.device("meta"), torch.bfloat16)


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_have_the_published_parameters(name):
    assert set(PARAMETERS) == set(engines_by_name.SHAPES)
    made, packed = (counted(name, recipe) for recipe in ("fp16", "rtn-w4-g128"))
    assert made.stored_bytes == 2 * PARAMETERS[name]
    blocks = made.read_bytes - packed.read_bytes  # from 2 bytes to half a byte and 4 of 128
    weights = sum(block.down.weight.numel() + block.qkv.weight.numel() + block.out.weight.numel()
                  + block.gate_up.weight.numel() for block in made.blocks)  # fmt: skip
    assert blocks == weights * 2 - weights // 2 - weights // 32


@pytest.fixture
def shape(monkeypatch):
    """The name of a shape small enough for a test."""
    config = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 128}
    monkeypatch.setitem(engines_by_name.SHAPES, "tiny", config)
    return "shape/tiny"


def test_a_shape_has_speed_and_memory_only(shape):
    engine = Engine.load(shape, "rtn-w3-g128", dtype="float32", device="cpu")
    stats = engine.time(prompt=20, new=6, batch=2)
    assert (stats.prompt_tokens, stats.new_tokens) == (40, 12) and stats.tokens_per_s > 0
    weights = 2 * (256 * 128 + 128 * 128 + 512 * 128 + 128 * 256)
    rest = 4 * (2 * 512 * 128 + 5 * 128)
    assert stats.stored_bytes == weights * 3 // 8 + weights // 128 * (16 + 3) // 8 + rest
    assert torch.isfinite(engine.cache.keys).all() and engine.cache.keys.abs().max() > 0
    for ask in (lambda: engine.generate("text"), lambda: engine.logits([1]), lambda: engine.score([1, 2])):
        with pytest.raises(UserError, match="random weights: they have speed and memory, but no text and no quality"):
            ask()
    with pytest.raises(UserError, match="give spear a rank, and placement=full, or placement=random and a k_share"):
        Engine.load(shape, "rtn-w4-g128 + spear", device="cpu")
    for recipe in ("spinquant-w4-g128-a16-epochs=0", "bitbybit-w4-g128"):  # they store more than a grid
        with pytest.raises(UserError, match="name one weight quantizer, fp16, q4_k with spqt"):
            Engine.load(shape, recipe, device="cpu")
    with pytest.raises(UserError, match="name one weight quantizer, fp16, q4_k with spqt"):
        Engine.load(shape, "smoothquant-w4-a4-g128", device="cpu")
    with pytest.raises(UserError, match="unknown shape 'Llama-2-7'"):
        Engine.load("shape/Llama-2-7")


# --- bad input --------------------------------------------------------------------------------------------------------


def test_nothing_runs_beyond_the_context(engine):
    before = engine.cache.lengths.tolist()
    for ask in (
        lambda: engine.generate([[1] * 500, [1] * 501], 12),
        lambda: engine.generate([[1] * 512]),
        lambda: engine.logits([1] * 513),
    ):
        with pytest.raises(NotMeasurable, match="more than the context of 512; shorten the prompt") as refused:
            ask()
        assert refused.value.status == "too_long"
    assert engine.cache.lengths.tolist() == before
    assert one(engine, [1] * 500, 12, eos=False).ended == "length"
    with pytest.raises(NotMeasurable, match="context 4096: pocket-3m has 1 to 2,048 tokens"):
        Engine.load("pocket-3m", context=4096)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda e: e.generate([[]], 4), "a prompt of no tokens"),
        (lambda e: e.generate([], 4), "0 prompts; 1 to 64 are decoded together"),
        (lambda e: e.generate("x", 0), "max_new_tokens is 0"),
        (lambda e: e.generate("x", 4, top_p=0.0), "a top-p above 0 and up to 1"),
        (lambda e: e.generate("x", 4, temperature=-1.0), "a temperature and top-k of 0 or more"),
        (lambda e: e.generate("x", 4, stop=""), "stop: an empty text"),
        (lambda e: e.generate(["x", "y"], 4, seed=[1]), "seed: 1 for 2 prompts"),
        (lambda e: e.generate([[1, 4096]], 4), "token 4096: pocket-3m has ids from 0 to 4,095"),
        (lambda e: e.generate([[5, -3]], 4), "token -3: pocket-3m has ids from 0 to 4,095"),
        (lambda e: e.generate([1, 2, 3], 4), "prompt 1: give text in UTF-8 or a list of token ids"),
        (lambda e: e.generate("a\udcff", 4), r"prompt 'a.udcff': give text in UTF-8"),
        (lambda e: e.logits([[1, 2]]), "prompt .*1, 2.*: give text"),
        (lambda e: e.score([1.5, 2.0]), "prompt .*1.5, 2.0.: give text"),
        (lambda e: e.tree(0, 510, torch.tensor([1, 2, 3]), [-1, 0, 1]), "3 nodes behind 510 slots of row 0: the cache"),
        (lambda e: e.tree(99, 5, torch.tensor([1]), [-1]), "1 nodes behind 5 slots of row 99: the cache has"),
        (lambda e: e.tree(0, 5, torch.tensor([1, 2]), [1, -1]), "parents .1, -1. of 2 nodes: one for each, an earlier"),
        (lambda e: e.tree(0, 5, torch.tensor([1, 2]), [-1]), "parents .-1. of 2 nodes: one for each"),
        (lambda e: e.chat("x"), "its tokenizer has no chat template"),
    ],
)
def test_what_means_nothing_is_refused(engine, ask, message):
    with pytest.raises(UserError, match=message):
        ask(engine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "phi"}, "the engine does not run phi; choose Llama, Mistral or Qwen2"),
        ({"head_dim": 32}, "heads of size 32"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary embedding dynamic"),
    ],
)
def test_what_the_engine_does_not_run_is_refused_by_its_config(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        Engine.load(engines.save("llama", tmp_path, **change))


def test_a_sliding_window_bounds_the_context(tmp_path):
    name = engines.save("mistral", tmp_path, sliding_window=100)
    assert Engine.load(name, device="cpu").context == 100
    with pytest.raises(NotMeasurable, match="has 1 to 100 tokens"):
        Engine.load(name, context=101)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "codes of 5 bits have no packed format; choose 2, 3 .in 4-bit slots., 4 or 8 bits"),
        ({"bits": 4, "group": 16}, "groups of 16 columns: expected one of"),
    ],
)
def test_a_grid_without_a_packed_format_names_its_layer(tiny, monkeypatch, shape, options, message):
    with pytest.raises(UserError, match=f"model.layers.0.self_attn.q_proj: {message}"):
        compressed(tiny, monkeypatch, (rtn, options))
    text = "-".join(["rtn", *(f"{key[0]}{value}".replace("b", "w") for key, value in options.items())])
    with pytest.raises(UserError, match=message):
        Engine.load(shape, text, device="cpu")


def test_bits_without_a_packed_format_are_refused_before_anything_is_built(monkeypatch):
    built = []
    monkeypatch.setattr(engines_by_name, "compressed", lambda *arguments: built.append(arguments))
    for name in ("pocket-3m", "shape/Llama-3.2-1B"):
        with pytest.raises(
            UserError, match="codes of 5 bits have no packed format; choose 2, 3 .in 4-bit slots., 4 or 8"
        ):
            Engine.load(name, "rtn-w5-g128 + qera", device="cpu")
    assert built == []


def test_a_batch_of_64_unequal_prompts_is_64_single_ones(engine):
    prompts = [[5 + i] * (1 + i * 37 % 300) for i in range(64)]
    how = {"temperature": 0.8, "top_p": 0.95, "stop": "e"}
    together = list(engine.generate(prompts, 4, seed=11, **how))
    for i in (0, 17, 40, 63):
        alone = one(engine, prompts[i], 4, seed=11 + i, **how)
        assert (alone, alone.tokens, alone.ended) == (together[i], together[i].tokens, together[i].ended)
    assert len({text.ended for text in together}) == 2
    with pytest.raises(UserError, match="65 prompts; 1 to 64 are decoded together"):
        engine.generate([*prompts, "x"])


def test_a_dtype_that_the_processor_does_not_compute_in(monkeypatch):
    native = lambda: False  # noqa: E731
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", native, raising=False)
    with pytest.raises(UserError, match="dtype bfloat16: this CPU does not compute in it; load with dtype float32"):
        Engine.load("pocket-3m", dtype="bfloat16", device="cpu")
    assert Engine.load("pocket-3m", device="cpu").model.embedding.dtype == torch.float32


def test_a_gpu_with_too_little_memory_says_what_is_missing(tiny, shape, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    for name in (shape, tiny):
        message = r"needs [\d,]{7,} bytes for its weights and 64 tokens of one sequence, cuda has 1,000 free"
        with pytest.raises(NotMeasurable, match=message) as refused:
            Engine.load(name, context=64, device="cuda", dtype="float16")
        assert refused.value.status == "oom"


def test_weights_that_are_dequantized_take_their_bytes_in_full():
    """In float32 no kernel takes packed weights, so that the memory that is needed is that of the whole model."""
    lm = LowBitModel(models.load("pocket-3m"))
    rtn.apply(lm, None, rtn.Config(bits=4, group=128))
    count = sum(parameter.numel() for parameter in lm.model.parameters())
    sizes = [engines_by_name.packed_bytes(lm, dtype) for dtype in (torch.float32, torch.float16)]
    assert sizes[0] == 4 * count and sizes[1] < 1.5 * count


def test_damaged_weights_are_seen_at_the_first_token(tiny, monkeypatch):
    engine = Engine.load(tiny, dtype="float32", device="cpu")
    engine.model.norm.fill_(math.nan)
    with pytest.raises(UserError, match="the logits are not finite"):
        one(engine, "x")


# --- command ----------------------------------------------------------------------------------------------------------


def test_the_command_streams_text_and_ends_with_numbers(engine, capsys, monkeypatch, tmp_path):
    words = ["generate", "--model", "pocket-3m", "--context", "512", "--dtype", "float32", "--max-new-tokens", "24"]
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    for more in ([PROMPT], ["--file", str(tmp_path / "prompt.txt")], []):
        assert main([*words, *more]) == 0
        text, numbers, _ = capsys.readouterr().out.rsplit("\n", 2)
        assert text == one(engine) and numbers.split(" | ")[0] == str(engine.stats).split(" | ")[0]
        assert "tokens/s" in numbers and "MBU" in numbers and "p99" in numbers


@pytest.mark.parametrize("text", ["", "\n"])
def test_nothing_on_standard_input_or_in_a_file_is_no_prompt(text, capsys, monkeypatch, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(text)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    for more, where in ((["--file", str(path)], f"--file {path}"), ([], "standard input")):
        assert main(["generate", "--model", "pocket-3m", *more]) == 2
        message = f'error: {where}: no text to continue; give a prompt, or "" to begin a text\n'
        assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["x", "--chat"], "its tokenizer has no chat template"),
        (["x", "--file", "there"], "give one of them"),
        (["--file", "not/there"], "no text that can be read"),
        (["x", "--context", "9999"], "context 9999: pocket-3m has 1 to 2,048 tokens"),
        (["x", "--recipe", "rtn-w4-pc", "--no-build"], "run python -m repro compress pocket-3m --recipe 'rtn-w4-pc'"),
        (["x", "--device", "cuda"], "this machine has no CUDA device"),
        (["x\udcff"], "give text in UTF-8"),
    ],
)
def test_bad_words_are_one_sentence(capsys, tmp_path, monkeypatch, more, message):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "--model", "pocket-3m", *more]) == 2
    out = capsys.readouterr()
    assert message in out.err and out.err.count("\n") == 1 and out.out == ""


def test_a_shape_has_no_text_before_its_weights_are_made(monkeypatch, capsys):
    monkeypatch.setattr(Engine, "load", lambda *arguments, **how: pytest.fail("its weights take minutes"))
    assert main(["generate", "--model", "shape/Llama-2-70B", "x"]) == 2
    assert "shape/Llama-2-70B has random weights: they have speed and memory" in capsys.readouterr().err


def test_every_layer_of_a_block_is_in_a_product(tiny):
    named = set(chain.from_iterable(weights.LAYERS.values()))
    quantized = {name.split(".", 3)[3] for name in block_linears(models.load(tiny))}
    assert named == quantized


def test_the_launchers_take_what_the_step_gives_them(tiny, monkeypatch):
    """What a GPU runs: each operator with its check of types, shapes and layouts in front, here on its reference."""
    called = set()

    def launcher(device, kernel):
        name = kernel.__name__.rpartition(".")[2]
        return lambda *arguments: (called.add(name), getattr(kernel, name)(*arguments))[1]

    prompts, how = [[5] * 9, [6, 7]], {"temperature": 1.0, "eos": False}
    wanted = [t.tokens for t in Engine.load(tiny, dtype="float32", device="cpu").generate(prompts, 5, **how)]
    for module in (step, decoding):
        monkeypatch.setattr(module, "on", launcher)
    engine = Engine.load(tiny, dtype="float32", device="cpu")
    assert [text.tokens for text in engine.generate(prompts, 5, **how)] == wanted
    assert called == {"rms_norm", "rope_append", "attention", "silu_product", "sample"}
    list(engine.generate(prompts, 2, eos=False))
    assert "argmax" in called
    engine.tree(0, 3, torch.tensor([4, 5, 6]), [-1, 0, 0])
