"""A GGUF that llama.cpp loads: what is written, and, with llama-cpp-python installed, that it computes what we do."""

import csv
import datetime
import importlib.metadata
import json
import os
import re
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import small_models
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as kinds
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from repro import models
from repro.__main__ import main
from repro.core.errors import UserError
from repro.core.files import ROOT
from repro.data import corpora
from repro.generation import export as module
from repro.generation.export import PATTERNS, export, pattern, shape, tensors, vocabulary
from repro.methods.spqt import q4_k
from repro.metrics import llamacpp
from repro.models.lowbit import block_linears
from repro.store import provenance

EQUAL = ROOT / "results" / "gguf-equal.csv"
KINDS = {"F16": "fp16", "Q4_K": "q4_k"}
SOME, MANY = 16, 100  # chunks in a run of the tests, and in the one that is accepted
# Logits and, on so few chunks, perplexity; with Q4_K llama.cpp rounds activations to 8 bits, and we do not.
FAR, NEAR = {"F16": 2e-2, "Q4_K": 1.0}, {"F16": 2e-4, "Q4_K": 5e-3}
NASTY = ["", " ", "\n\n\n", "a  b   c", "\t\tx\n y", "1234567.89", "x² ½ Ⅷ ٣", "don't I'LL we'Ve", "ſs 'ſ",
         "#$%^&*()_+-=[]{}", "naïve café 北京", "🙂👍🏽", "\u00a0\u2003\u3000x", "e\u0301", "\x00\x01", "\ufeffx",
         "a" * 300, "<s> </s>"]  # fmt: skip
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
LAYOUTS = {
    "scaled, untied, heads of their own": {"rope_parameters": SCALED, "tie_word_embeddings": False, "head_dim": 128},
    "biases, one head each": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "linear, tied": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
                     "tie_word_embeddings": True},
}  # fmt: skip


def tokenizer_of(name, folder, size=384):
    """A byte-level BPE cut by the pattern `name`, trained on a short text, with BOS, saved in `folder`."""
    steps = {
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "llama-bpe": [
            pre_tokenizers.Split(Regex(PATTERNS["llama-bpe"][0][0]["pattern"]["Regex"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }[name]
    made = Tokenizer(kinds.BPE(ignore_merges=PATTERNS[name][1]))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size - 1, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    made.train_from_iterator(corpora.text("tiny-c4-docs").splitlines(keepends=True), trainer)
    made.add_tokens([AddedToken("@@", normalized=False)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return fast


def llama(folder, pre="smollm", **more):
    """A random Llama with every parameter random, saved with a tokenizer; K is 256 everywhere."""
    sizes = {"vocab_size": 400, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes | heads | {"initializer_range": 0.1} | more))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) if parameter.ndim == 1 else 0
    model.save_pretrained(folder)
    tokenizer_of(pre, folder)
    return str(folder)


# --- what is written --------------------------------------------------------------------------------------------------


def restored(rows, heads):
    """Rows of a matrix or vector back in Hugging Face's order, one by one."""
    size, back = len(rows) // heads, rows.clone()
    for head in range(heads):
        for i in range(size // 2):
            back[head * size + i] = rows[head * size + 2 * i]
            back[head * size + size // 2 + i] = rows[head * size + 2 * i + 1]
    return back


@pytest.mark.parametrize("quantized", [False, True])
def test_every_parameter_is_written_once(tmp_path, quantized):
    """Row order, type and value of each; q and k interleaved, and their Q4_K blocks those of the codec, moved."""
    model = models.load(llama(tmp_path, attention_bias=True, tie_word_embeddings=True))
    result, linears = dict(tensors(model, quantized)), block_linears(model)
    wanted = dict(model.named_parameters())
    assert list(result) == list(wanted) and "lm_head.weight" not in result
    for name, parameter in wanted.items():
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
        value = restored(result[name], heads) if heads else result[name]
        if quantized and name.removesuffix(".weight") in linears:
            assert value.dtype == torch.uint8 and (value == q4_k.quantize(parameter.data)).all(), name
        else:
            dtype = torch.float32 if parameter.ndim == 1 else torch.float16
            assert value.dtype == dtype and (value == parameter.to(dtype)).all(), name
    assert quantized == any(value.dtype == torch.uint8 for value in result.values())


def test_scaled_rope_becomes_factors(tmp_path):
    """Frequency over factor is the scaled frequency; without scaling there are none."""
    model = models.load(llama(tmp_path, rope_parameters=SCALED))
    name, factors = next(tensors(model, False))
    plain = torch.tensor([1e4 ** (-2 * i / 64) for i in range(32)])
    assert name == "rope_freqs.weight" and factors.dtype == torch.float32 and factors[0] == 1
    assert factors[-1].item() == pytest.approx(8, rel=1e-6) and 1 < factors[5] < 8
    assert torch.allclose(plain / factors, model.base_model.rotary_emb.inv_freq, rtol=1e-6)


@pytest.mark.parametrize("name", PATTERNS)
def test_the_vocabulary_is_the_tokenizers_padded(name, tmp_path):
    tokenizer = tokenizer_of(name, tmp_path)
    result = vocabulary(tokenizer, 390)
    assert (result["tokenizer_pre"], result["add_bos_token"], result["add_eos_token"]) == (name, True, False)
    assert (result["bos_token_id"], result["eos_token_id"]) == (0, 1)
    assert result["token_list"][:384] == tokenizer.convert_ids_to_tokens(range(384))
    assert result["token_list"][384:] == [f"[PAD{i}]" for i in range(384, 390)]
    assert result["token_types"] == [3, 3, *380 * [1], 1, 4, *6 * [5]]
    merge = result["token_merges"][-1].split(" ")
    assert len(merge) == 2 and "".join(merge) in result["token_list"]
    with pytest.raises(UserError, match="has an id 383, the model 383 ids"):
        vocabulary(tokenizer, 383)


@pytest.mark.parametrize(("single", "added"), [("$A", (0, 0)), ("$A </s>", (0, 1)), ("<s> $A </s>", (1, 1))])
def test_what_is_put_around_a_text(single, added, tmp_path):
    tokenizer = tokenizer_of("gpt-2", tmp_path)
    special = [("<s>", 0), ("</s>", 1)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    result = vocabulary(tokenizer, 384)
    assert (result["add_bos_token"], result["add_eos_token"]) == added
    other = processors.TemplateProcessing(single="<s> </s> </s> $A", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = other
    with pytest.raises(UserError, match=r"puts the ids \[0, 1, 1\] around a text"):
        vocabulary(tokenizer, 384)


def change(definition, *path, to):
    """A tokenizer.json with one value changed."""
    changed = at = json.loads(json.dumps(definition))
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    return changed


def test_patterns_are_llamacpps_or_refused(tmp_path):
    """Of each pattern everything counts that changes ids; what changes offsets alone does not."""
    for name, (steps, whole) in PATTERNS.items():
        known = json.loads(tokenizer_of(name, tmp_path).backend_tokenizer.to_str())
        where = ("pre_tokenizer", "pretokenizers", len(steps) - 1) if len(steps) > 1 else ("pre_tokenizer",)
        assert pattern(known) == pattern(change(known, *where, "trim_offsets", to=False)) == name
        for other in (
            change(known, *where, "add_prefix_space", to=True),
            change(known, *where, "use_regex", to=name == "llama-bpe"),
            change(known, "normalizer", to={"type": "NFC"}),
            change(known, "model", "ignore_merges", to=not whole),
            change(known, "model", "byte_fallback", to=True),
            change(known, "model", "merges", to=[]),
            change(known, "model", "type", to="Unigram"),
            change(known, "pre_tokenizer", to=None),
        ):
            with pytest.raises(UserError, match="llama.cpp has no pattern for the tokenizer"):
                pattern(other)


def test_shapes_that_llamacpps_llama_has():
    config = models.load("pocket-3m").config
    result = shape(config)
    assert (result["rope_freq_base"], result["head_count"], result["head_count_kv"]) == (5e5, 4, 2)
    assert (result["embedding_length"], result["feed_forward_length"], result["block_count"]) == (256, 768, 2)
    for rope in ("dynamic", "yarn", "longrope"):
        config.rope_parameters["rope_type"] = rope
        with pytest.raises(UserError, match=f"RoPE {rope} is not exported"):
            shape(config)


# --- with the gguf package: the file ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package():
    """The package that writes and reads GGUF files."""
    return pytest.importorskip("gguf", reason="gguf is not installed; pip install gguf==0.19.0")


@pytest.mark.parametrize(("kind", "recipe"), KINDS.items())
def test_the_file_holds_what_the_codec_made(package, tmp_path, capsys, kind, recipe):
    """Decoded by the package's own decoder; a second export is the same bytes, another recipe is not."""
    out = tmp_path / "pocket.gguf"
    assert main(["export", "pocket-3m", "--recipe", recipe, "--gguf", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{out}: {module.MIXES[recipe]}; {out.stat().st_size:,} bytes\n"
    reader, model = package.GGUFReader(out), models.load("pocket-3m")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama" and fields["general.description"] == module.MIXES[recipe]
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    read = {tensor.name: tensor for tensor in reader.tensors}
    assert "output.weight" not in read and len(read) == 20
    types = {name: tensor.tensor_type.name for name, tensor in read.items()}
    assert types["token_embd.weight"] == "F16"
    assert types["blk.1.attn_norm.weight"] == types["output_norm.weight"] == "F32"
    assert {types[name] for name in types if name.startswith("blk.") and "norm" not in name} == {kind}
    dense = weights(package, out, model)
    for name, linear in block_linears(model).items():
        right = linear.weight.data
        right = q4_k.dequantize(q4_k.quantize(right), right.shape[1]) if recipe == "q4_k" else right.half().float()
        assert (dense[f"{name}.weight"] == right).all(), name
    before = out.read_bytes()
    assert main(["export", "pocket-3m", "--recipe", recipe, "--gguf", str(out), "--check"]) == 0
    export("pocket-3m", recipe, out)
    assert out.read_bytes() == before and os.listdir(tmp_path) == ["pocket.gguf"]
    other = next(name for name in KINDS.values() if name != recipe)
    capsys.readouterr()
    assert main(["export", "pocket-3m", "--recipe", other, "--gguf", str(out), "--check"]) == 2
    assert "another model, recipe or version" in capsys.readouterr().err and out.read_bytes() == before


@pytest.mark.parametrize("several", [False, True])
def test_a_chat_template_is_in_the_file(package, tmp_path, several):
    template = small_models.TEMPLATE
    of_model = (
        [{"name": "default", "template": template}, {"name": "tools", "template": "{{ 1 }}"}] if several else template
    )
    folder = small_models.write_tokenizer(tmp_path / "chat", chat_template=of_model)
    small_models.llama().save_pretrained(folder)
    out = tmp_path / "chat.gguf"
    export(str(folder), "fp16", out)
    assert package.GGUFReader(out).get_field("tokenizer.chat_template").contents() == template
    export(str(folder), "fp16", out, check=True)
    small_models.write_tokenizer(folder, chat_template=template.replace("role", "name"))
    with pytest.raises(UserError, match="another model, recipe or version"):
        export(str(folder), "fp16", out, check=True)


def test_a_chat_template_is_among_what_is_written(tmp_path):
    """The same without the package: the facts of the vocabulary that the writer is given."""
    folder = small_models.write_tokenizer(tmp_path / "chat", chat_template=small_models.TEMPLATE)
    small_models.llama().save_pretrained(folder)
    assert vocabulary(models.tokenizer(str(folder)), 4096)["chat_template"] == small_models.TEMPLATE
    assert "chat_template" not in vocabulary(models.tokenizer("pocket-3m"), 4096)


def test_the_template_of_a_tokenizer():
    def of(template):
        return module.chat_template(SimpleNamespace(chat_template=template))

    assert of(None) is None
    assert of("") is None
    assert of("x") == "x"
    assert of({"default": "x", "rag": "y"}) == "x"
    with pytest.raises(UserError, match="chat templates rag, tools and none is the default"):
        of({"tools": "x", "rag": "y"})


def test_a_file_of_somebody_else_is_not_replaced(package, tmp_path):
    out = tmp_path / "mine.gguf"
    export("pocket-3m", "fp16", out)
    cut = out.read_bytes()[:100_000]
    for content in (b"", b"words", b"GGUF" + bytes(100), cut.replace(b"all matrices F16", b"all matrices F61")):
        out.write_bytes(content)
        with pytest.raises(UserError, match="mine.gguf: exists, and this command did not write it"):
            export("pocket-3m", "fp16", out)
        assert out.read_bytes() == content
    out.write_bytes(cut)  # its own, cut short
    export("pocket-3m", "fp16", out)
    assert len(out.read_bytes()) > len(cut)


def weights(package, path, model):
    """The parameters of `model` as the file has them, float32, in Hugging Face's order of rows."""
    config = model.config
    names = package.get_tensor_name_map(package.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    read = {t.name: package.quants.dequantize(t.data, t.tensor_type) for t in package.GGUFReader(path).tensors}
    heads, result = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}, {}
    for key, _ in model.named_parameters():
        value = torch.from_numpy(np.array(read[names.get_name(key, (".weight", ".bias"))], dtype=np.float32))
        layer = key.split(".")[-2]
        result[key] = restored(value, heads[layer]) if layer in heads else value
    return result


# --- with llama.cpp ---------------------------------------------------------------------------------------------------


class Loaded:
    """A GGUF file in llama.cpp, on one thread."""

    def __init__(self, library, path, **options):
        self.library = library
        threads = {"n_threads": 1, "n_threads_batch": 1}
        self.llama = self.library.Llama(str(path), n_ctx=512, logits_all=True, verbose=False, **threads, **options)

    def ids(self, text, special=False):
        """The token ids of a text; `special`: also of special tokens written in it."""
        return self.llama.tokenize(text.encode(), add_bos=True, special=special)

    def logits(self, ids):
        """float32 `[L, V]` after each id."""
        self.llama.reset()
        self.llama.eval(ids)
        return self.llama.scores[: len(ids)].copy()

    def chunks(self, text, count, chunk=512):
        """Nats a token of the first `count` chunks, as its own program scores them."""
        ids, result = self.ids(text), []
        for i in range(count):
            total = 0.0
            some = ids[i * chunk : (i + 1) * chunk]
            if self.library.llama_vocab_get_add_bos(self.llama._model.vocab):
                some[0] = self.llama.token_bos()
            logits = self.logits(some).astype(np.float64)
            for position in range(chunk // 2, chunk - 1):
                z = logits[position]
                total += z.max() + np.log(np.exp(z - z.max()).sum()) - z[some[position + 1]]
            result.append(total / len(range(chunk // 2, chunk - 1)))
        return np.asarray(result)

    def close(self):
        """Free it before the interpreter ends."""
        self.llama.close()


@pytest.fixture
def load(package):
    """Loads GGUF files in llama.cpp, and frees them."""
    library = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed; it is built in 19 min")
    opened = []
    yield lambda path, **options: opened.append(Loaded(library, path, **options)) or opened[-1]
    for each in opened:
        each.close()


def documents(name, count=200):
    """Evenly spaced sentences of a corpus."""
    some = [text for text in re.split(r"\n|(?<=[.!?]) ", corpora.text(name)) if text.strip()]
    return some[:: len(some) // count][:count]


def unlike(loaded, tokenizer, texts):
    """The texts whose token ids differ."""
    return [text for text in texts if loaded.ids(text, special="<s>" in text) != tokenizer(text)["input_ids"]]


@pytest.mark.parametrize("name", [*PATTERNS, "pocket"])
def test_token_ids_are_ours(load, tmp_path, name):
    """200 documents, and texts made to break a pattern; a tokenizer of each pattern, and the pocket models'."""
    out, model = tmp_path / "it.gguf", "pocket-3m"
    if name != "pocket":
        model = llama(tmp_path / "model", name)
    export(model, "fp16", out)
    loaded, tokenizer = load(out, vocab_only=True), models.tokenizer(model)
    some = documents("tiny-c4-docs")
    assert len(some) == 200 and sum(len(tokenizer(text)["input_ids"]) for text in some) > 2_000
    assert unlike(loaded, tokenizer, some) == []
    assert unlike(loaded, tokenizer, NASTY) == [] and unlike(loaded, tokenizer, ["@@ x@@y 1@@2"]) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_of_other_layouts(load, tmp_path, layout):
    """Scaled RoPE, untied heads, biases: what the pocket models do not have."""
    model, out = llama(tmp_path / "model", **LAYOUTS[layout]), tmp_path / "it.gguf"
    export(model, "fp16", out)
    ids = torch.randint(2, 380, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    far, ours = spread(models.load(model), ids, load(out))
    assert far < FAR["F16"] and ours > 1  # the model says something


def spread(model, ids, loaded):
    """The 99.9th percentile of the difference of logits to ours in float32, and the standard deviation of ours."""
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0].numpy()
    return float(np.quantile(np.abs(ours - loaded.logits(ids)), 0.999)), float(ours.std())


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", models.pocket_names())
def test_llamacpp_computes_what_we_do(package, load, tmp_path, name, kind, request):
    """Logits, and perplexity by its protocol; with $GGUF_EQUAL on WikiText-2, and a line to that file."""
    kept, out = os.environ.get("GGUF_EQUAL"), tmp_path / "it.gguf"
    if kept:
        request.getfixturevalue("mirror")
    corpus, count = ("wikitext2-raw", MANY) if kept else ("tiny-wikitext", SOME)
    text, tokenizer, model = corpora.text(corpus), models.tokenizer(name), models.load(name)
    export(name, KINDS[kind], out)
    loaded, some = load(out), documents(corpus)
    assert unlike(loaded, tokenizer, some) == [] and len(some) == 200
    ids = np.asarray(tokenizer(text)["input_ids"])[: count * 512]
    if kind == "Q4_K":
        for key, value in weights(package, out, model).items():
            model.get_parameter(key).data.copy_(value)
    far, theirs = spread(model, ids[:512].tolist(), loaded)[0], loaded.chunks(text, count)
    assert far < FAR[kind]
    ours = llamacpp.score(model, torch.from_numpy(ids.reshape(-1, 512)), llamacpp.added_bos(tokenizer))
    assert abs(np.exp((theirs - ours).mean()) - 1) < (0.002 if kept else NEAR[kind])
    if kept:
        values = *np.exp([ours.mean(), theirs.mean()]), (theirs - ours).std(ddof=1) / count**0.5, far
        line = (name, kind, models.fingerprint(name), corpus, count, len(some), *(f"{x:.5f}" for x in values))
        line += (*versions(), torch.__version__, provenance.commit(), datetime.date.today())
        with open(kept, "a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(line)


def versions():
    """Of llama-cpp-python and of gguf."""
    return importlib.metadata.version("llama-cpp-python"), importlib.metadata.version("gguf")


def test_the_accepted_comparison_has_every_model_in_both_kinds():
    """The last run on WikiText-2, in results/: today's weights, within the bars."""
    with open(EQUAL, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["model"], row["kind"]) for row in rows] == list(product(models.pocket_names(), KINDS))
    for row in rows:
        assert row["weights"] == models.fingerprint(row["model"]) and row["corpus"] == "wikitext2-raw"
        assert abs(float(row["llama_cpp"]) / float(row["ours"]) - 1) < 0.002
        assert row["documents"] == "200" and int(row["chunks"]) == MANY
        assert float(row["logits_p999"]) < FAR[row["kind"]]
