"""SpQt in the engine: prefill is dense, decoded tokens are sparse. They give what the second protocol gives, where the
first half of a window is dense (TEAL). On a CPU, and with graphs on a GPU."""

import copy

import engines
import pytest
import torch

from repro import models
from repro.__main__ import main
from repro.baselines import gptq, q4_k, qera, rtn
from repro.data import corpora
from repro.engine import corrected, decoding, weights
from repro.generation import Engine
from repro.generation import engine as engines_by_name
from repro.methods.spqt import sparse_inputs
from repro.models import bits
from repro.models.lowbit import LowBitModel

LENGTH = 40  # of the text: a dense first half, then decoded tokens
NEAR = 1e-5  # an input this close to its threshold, relative to it, could be rounded to either side
MODELS = ["pocket-3m", "tiny"]
ROW, ZIGZAG = (q4_k, {}), (q4_k, {"layout": "zigzag"})
TEAL = {"thresholds": "teal", "step": 0.25}
RECIPES = {
    "full precision, unified": ([], {}),
    "q4_k, unified": ([ROW], {}),
    "q4_k, teal": ([ROW], TEAL),
    "zigzag, unified": ([ZIGZAG], {}),
    "zigzag, teal": ([ZIGZAG], TEAL),
    "zigzag, TEAL itself": ([ZIGZAG], TEAL | {"shared": False}),  # q, k and v have thresholds of their own
    "compensated": ([ZIGZAG, (qera, {"rank": 4})], TEAL),
}


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """pocket-3m, and a random model of 256 channels, which rows of Q4_K need, with biases and grouped heads."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {"hidden_size": 256, "initializer_range": 0.08}.items():
            patch.setitem(engines.SHAPE, key, value)
        return {"pocket-3m": "pocket-3m", "tiny": engines.save("qwen2", tmp_path_factory.mktemp("tiny"))}


@pytest.fixture(scope="module")
def text():
    """Token ids."""
    return torch.as_tensor(corpora.token_ids("tiny-wikitext", models.tokenizer("pocket-3m")))


def sparse(name, text, steps=(), positions="second_half", **options):
    """A model under steps and SpQt, and a copy from before SpQt."""
    lm, data = LowBitModel(models.load(name)), text[-2048:].view(8, 256)
    for module, config in steps:
        module.apply(lm, data, module.Config(**config))
    dense = copy.deepcopy(lm.model)
    sparse_inputs.apply(lm, data, sparse_inputs.Config(tokens=2048, search=256, positions=positions, **options))
    return lm, dense


def loaded(lm, name, device="cpu", dtype="float32"):
    """An engine on a model that was made here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines_by_name, "compressed", lambda target, dtype, build: lm)
        return Engine.load(name, context=256, dtype=dtype, device=device)


@pytest.fixture(scope="module")
def cases(names, text):
    """Of a model and a recipe, by name, what `sparse` makes; once."""
    made = {}

    def case(model, recipe):
        steps, options = RECIPES[recipe]
        if (model, recipe) not in made:
            made[model, recipe] = sparse(names[model], text, steps, **options)
        return made[model, recipe]

    return case


@torch.no_grad()
def logits(model, ids):
    """`[T, V]` of the model as the harness runs it, and whether no input is `NEAR` its threshold."""
    gaps, hooks = [], []

    def gap(layer, args):
        x = args[0][:, layer.first(args[0].shape[1]) :].abs()
        gaps.append((x - layer.threshold).abs().min().item() / layer.threshold)

    for layer in model.modules():
        if isinstance(layer, sparse_inputs.SparseLinear) and layer.threshold > 0:
            hooks.append(layer.register_forward_pre_hook(gap))
    of_ids = model(input_ids=ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return of_ids, min(gaps, default=1) > NEAR


def window(lm, text, length=LENGTH):
    """The first window of the text without an input `NEAR` its threshold, and the model's logits."""
    for ids in text.split(length):
        wanted, apart = logits(lm.model, ids)
        if apart:
            return ids, wanted
    raise AssertionError("no window is clear")


def chain(engine, ids, half):
    """Logits of the second half behind a prefill of the first, decoded at once: a node's parent is the one before."""
    engine.logits(ids[:half])
    return engine.tree(0, half, ids[half:], list(range(-1, len(ids) - half - 1)))


def agree(actual, wanted):
    """Within the tolerance, and of the same most likely tokens."""
    torch.testing.assert_close(actual.cpu(), wanted, rtol=0, atol=1e-4)
    assert torch.equal(actual.argmax(1).cpu(), wanted.argmax(1))


# --- the two protocols ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [pytest.param(LENGTH, marks=pytest.mark.slow), LENGTH - 7])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", [pytest.param("pocket-3m", marks=pytest.mark.slow), "tiny"])
def test_decoding_is_the_second_protocol_token_by_token(cases, names, text, model, recipe, length):
    """The first half of a window in a prefill, then each token of the second fed alone, then all of them at once."""
    (lm, dense), half = cases(model, recipe), length // 2
    engine, (ids, wanted) = loaded(lm, names[model]), window(lm, text, length)
    agree(engine.logits(ids[:half]), wanted[:half])
    for t in range(half, length):
        agree(engine.tree(0, t, ids[t : t + 1], [-1]), wanted[t : t + 1])
    agree(chain(engine, ids, half), wanted[half:])
    assert (wanted - logits(dense, ids)[0])[half:].abs().max() > 0.1


@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("model", MODELS)
def test_a_prefill_is_dense(cases, names, text, model, chunk):
    lm, dense = cases(model, "zigzag, TEAL itself")
    engine, ids = loaded(lm, names[model]), text[:LENGTH]
    engine.chunk, wanted = chunk, logits(dense, ids)[0]
    agree(engine.logits(ids), wanted)
    scores = wanted[:-1].log_softmax(1).gather(1, ids[1:, None].long())[:, 0]
    torch.testing.assert_close(engine.score(ids.long()), scores, rtol=0, atol=1e-4)


def test_where_the_harness_is_sparse_does_not_change_the_engine(names, text):
    """The first protocol makes every scored position sparse; what is decoded has no position in a window."""
    name, half = names["tiny"], LENGTH // 2
    (everywhere, dense), (second, _) = (sparse(name, text, [ZIGZAG], at) for at in ("all", "second_half"))
    engine, (ids, wanted) = loaded(everywhere, name), window(second, text)
    assert (logits(everywhere.model, ids)[0] - wanted).abs().max() > 0.1
    agree(engine.logits(ids), logits(dense, ids)[0])
    agree(chain(engine, ids, half), wanted[half:])


def compared(lm, prompts, results):
    """How many greedy texts could be compared with the second protocol on twice their prompt's length; all agree."""
    count = 0
    for prompt, (tokens, logprobs) in zip(prompts, results, strict=True):
        n = len(prompt)
        wanted, apart = logits(lm.model, torch.tensor(prompt + tokens[:n]))
        if apart:
            assert wanted[n - 1 :].argmax(1).tolist() == tokens[: n + 1]
            assert wanted[n - 1 :].log_softmax(1).amax(1).tolist() == pytest.approx(logprobs[: n + 1], abs=1e-4)
            count += 1
    return count


def generated(engine, prompts):
    """Tokens and log probabilities of a batch, of every prompt at least one more than it has."""
    count = max(map(len, prompts)) + 1
    return [(t.tokens, t.logprobs) for t in engine.generate(prompts, count, eos=False, logprobs=True)]


def prompts(text, *lengths):
    """Prompts of these lengths."""
    return [part.tolist() for part in text[: sum(lengths)].split(lengths)]


@pytest.mark.parametrize("recipe", ["full precision, unified", "zigzag, teal"])
@pytest.mark.parametrize("model", MODELS)
def test_generated_tokens_are_those_of_the_second_protocol_also_in_a_batch(cases, names, text, model, recipe):
    lm, pair = cases(model, recipe)[0], (16, 11)
    engine, clear = loaded(lm, names[model]), 0
    for start in range(0, 200, 50):
        some = prompts(text[start:], *pair)
        together = generated(engine, some)
        clear += compared(lm, some, together)
        for prompt, (tokens, _) in zip(some, together):
            (alone, _) = generated(engine, [prompt])[0]
            assert alone == tokens[: len(alone)]
    assert clear >= 4


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantizer", "kind"),
    [(None, weights.Dense), ((q4_k, {}), weights.Dense),
     pytest.param((rtn, {"bits": 4, "group": 64}), weights.Dense, marks=pytest.mark.slow),
     ((gptq, {"bits": 4, "group": 32, "act_order": True}), weights.Dense),
     ((qera, {"rank": 4}), corrected.Corrected)],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, TEAL | {"shared": False}], ids=["unified", "TEAL itself"])
def test_a_product_is_that_of_its_layers(names, text, quantizer, kind, options):
    """As the harness computes each layer, and dense without the threshold; several launches only where these differ."""
    steps = [] if quantizer is None else [ROW, quantizer] if quantizer[0] is qera else [quantizer]
    lm, _ = sparse(names["tiny"], text, steps, "all", **options)
    for kinds in weights.LAYERS.values():
        layers = [f"model.layers.1.{layer}" for layer in kinds]
        joined = weights.product(lm, layers, torch.device("cpu"), torch.float32)
        modules = [lm.model.get_submodule(name) for name in layers]
        x = torch.randn(5, modules[0].in_features, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for product, inside in ((joined, lambda m: m), (joined.dense, lambda m: m.linear)):
                wanted = torch.cat([inside(module)(x[:, None])[:, 0] for module in modules], 1)
                torch.testing.assert_close(product(x), wanted, rtol=0, atol=2e-3 * wanted.abs().max().item())
        alike = len({module.threshold for module in modules}) == 1
        assert isinstance(joined, weights.SparseInputs if alike else weights.Joined)
        assert not alike or isinstance(joined.dense, kind)


def test_a_layer_without_a_threshold_stays_dense_beside_others(names, text):
    lm, dense = sparse(names["tiny"], text)
    name = "model.layers.0.self_attn.v_proj"
    lm.model.set_submodule(name, lm.model.get_submodule(name).linear)
    del lm.attachments[name]
    engine, (ids, wanted) = loaded(lm, names["tiny"]), window(lm, text)
    assert isinstance(engine.model.blocks[0].qkv, weights.Joined)
    agree(engine.logits(ids), logits(dense, ids)[0])
    agree(chain(engine, ids, LENGTH // 2), wanted[LENGTH // 2 :])


@pytest.mark.parametrize("steps", [[], [ROW], [ZIGZAG]], ids=["full precision", "row", "zigzag"])
def test_stored_bytes_are_those_of_the_format_and_read_bytes_those_of_the_weights(names, text, steps):
    lm, _ = sparse(names["tiny"], text, steps)
    model, read = loaded(lm, names["tiny"]).model, dict(lm.model.named_parameters())
    del read["model.embed_tokens.weight"]
    assert model.stored_bytes == bits.report(lm, float_bits=16)["bytes"]
    assert model.read_bytes == 4 * sum(value.numel() for value in read.values())


# --- command ----------------------------------------------------------------------------------------------------------


def test_the_command_generates_under_spqt(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["generate", "--model", "pocket-3m", "--dtype", "float32", "--max-new-tokens", "12", "The history of"]
    printed = {}
    for recipe in ("q4_k(layout=zigzag)", "q4_k(layout=zigzag) + spqt(sparsity=0.8, tokens=1024)"):
        assert main([*words, "--recipe", recipe]) == 0
        printed[recipe] = capsys.readouterr().out.rsplit("\n", 2)[0]
    assert len(set(printed.values())) == 2
    engine = Engine.load("pocket-3m", recipe, dtype="float32", device="cpu", build=False)
    assert "".join(engine.generate(words[-1], 12)) == printed[recipe]


# --- GPU --------------------------------------------------------------------------------------------------------------


def gpu(test):
    """Marks a test that needs a CUDA device."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


def same_bits(engine, some):
    """What graphs generate; captured steps, whose batch is padded to a power of two, and plain ones give its bits."""
    graphed = generated(engine, some)
    assert len(engine.steps.graphs) == 1
    engine.steps = decoding.Steps(engine.model, len(some))
    engine.steps.graphed = False
    assert generated(engine, some) == graphed and not engine.steps.graphs
    return graphed


@gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", MODELS)
def test_graphs_decode_the_second_protocol_on_a_gpu(cases, names, text, model, recipe):
    lm, dense = cases(model, recipe)
    engine, (ids, wanted), half = loaded(lm, names[model], "cuda"), window(lm, text), LENGTH // 2
    agree(engine.logits(ids.cuda()), logits(dense, ids)[0])
    agree(chain(engine, ids.cuda(), half), wanted[half:])
    some = prompts(text, 16, 11, 5)
    assert compared(lm, some, same_bits(engine, some)) > 0


@gpu
def test_packed_weights_with_sparse_inputs_have_the_same_bits_in_graphs(names, text):
    lm, _ = sparse(names["tiny"], text, [(rtn, {"bits": 4, "group": 64})])
    engine, some = loaded(lm, names["tiny"], "cuda", "float16"), prompts(text, 16, 11, 5)
    assert isinstance(engine.model.blocks[0].qkv.dense, weights.Packed)
    tokens = same_bits(engine, some)
    for block in range(2):
        products = {name: getattr(engine.model.blocks[block], name).dense for name in weights.LAYERS}
        engine.replace(block, **products)
    assert generated(engine, some) != tokens
