"""The pocket models that the repository carries: whole, of the decided shape, really trained and really damaged."""

import json
import math

import pytest
import torch
from safetensors import safe_open

from repro import models
from repro.core.files import sha256
from repro.data import corpora
from repro.models import perplexity
from repro.models.lowbit import LowBitModel, block_linears
from repro.recipes import recipe

NAMES = models.pocket_names()
MIB = 2**20


def sums(folder):
    return dict(reversed(line.split(maxsplit=1)) for line in (folder / "SHA256SUMS").read_text().splitlines())


def weights():
    return sorted(models.POCKET.glob("**/*.safetensors"))


def config(name):
    return json.loads((models.POCKET / name / "config.json").read_text())


def log(name):
    return json.loads((models.POCKET / name / "training-log.json").read_text())


def test_every_weight_file_and_the_tokenizer_are_listed_with_their_hash():
    listed = sums(models.POCKET)
    on_disk = {str(p.relative_to(models.POCKET)) for p in [*weights(), models.POCKET / "tokenizer" / "tokenizer.json"]}
    assert on_disk <= set(listed)
    assert {name: sha256(models.POCKET / name) for name in listed} == listed


def test_weights_are_small_and_in_small_shards():
    assert all(path.stat().st_size <= 15 * MIB for path in weights())
    assert sum(path.stat().st_size for path in weights()) < 40e6


def test_three_sizes_one_tokenizer():
    assert {"pocket-3m", "pocket-5m", "pocket-10m"} <= set(NAMES)
    one = {(models.POCKET / name / "tokenizer.json").resolve() for name in NAMES}
    assert one == {models.POCKET / "tokenizer" / "tokenizer.json"}


@pytest.mark.parametrize("name", NAMES)
def test_the_decided_shape(name):
    c = config(name)
    assert c["architectures"] == ["LlamaForCausalLM"] and c["vocab_size"] == 4096
    assert c["hidden_size"] in (256, 512) and c["head_dim"] == 64 and c["intermediate_size"] % 256 == 0
    assert c["num_attention_heads"] * 64 == c["hidden_size"]
    assert c["num_key_value_heads"] < c["num_attention_heads"]
    assert c["num_attention_heads"] % c["num_key_value_heads"] == 0
    assert c["tie_word_embeddings"] and c["rope_parameters"] == {"rope_theta": 5e5, "rope_type": "default"}
    assert c["max_position_embeddings"] == 2048 and (c["bos_token_id"], c["eos_token_id"]) == (0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_bf16_and_as_many_as_the_config_says(name):
    shapes = {}
    for path in (models.POCKET / name).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():
                assert file.get_slice(key).get_dtype() == "BF16"
                shapes[key] = math.prod(file.get_slice(key).get_shape())
    c = config(name)
    h, f, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    block = 2 * h * h + 2 * h * 64 * c["num_key_value_heads"] + 3 * h * f + 2 * h
    assert sum(shapes.values()) == v * h + c["num_hidden_layers"] * block + h == log(name)["parameters"]
    assert "lm_head.weight" not in shapes


@pytest.mark.parametrize("name", NAMES)
def test_the_log_says_that_it_was_trained_to_its_end(name):
    made = log(name)
    assert made["model"] == name and made["done"] and made["step"] == made["steps"]
    assert made["tokens_per_parameter"] >= 60
    assert made["tokens_per_parameter"] == pytest.approx(made["tokens"] / made["parameters"], abs=0.1)
    assert made["architecture"]["layers"] == config(name)["num_hidden_layers"]
    losses = made["losses"]
    assert losses[0][0] == 50 and losses[-1][0] == made["steps"] and losses[-1][1] < 4 < losses[0][1]
    assert made["training"]["long_length"] == 2048 and made["training"]["long_share"] >= 0.1


@pytest.fixture(scope="module")
def window():
    ids = corpora.token_ids("tiny-wikitext", models.tokenizer("pocket-3m"))
    return perplexity.windows(ids, 2048, 1)


def damage(name, text, window):
    lm = LowBitModel(models.load(name))
    (step,) = recipe.parse(text).steps
    step.module.apply(lm, None, step.config)
    return perplexity.perplexity(perplexity.score(lm.model, window))


def test_really_trained_and_really_damaged(window):
    full = perplexity.perplexity(perplexity.score(models.load("pocket-3m"), window))
    assert 2 < full < 200, "an untrained model has 4096"
    eight, four, three, two = (damage("pocket-3m", f"rtn-w{bits}-pc", window) for bits in (8, 4, 3, 2))
    assert full * 0.99 < eight < full * 1.02
    assert eight < four < three < two
    assert three > 1.2 * full and two > 3 * full


def test_larger_models_predict_better(window):
    values = [perplexity.perplexity(perplexity.score(models.load(name), window)) for name in ("pocket-3m", "pocket-5m")]
    assert values[1] < values[0]


def test_blocks_divide_into_groups_of_128():
    for linear in block_linears(models.load("pocket-3m")).values():
        assert linear.in_features % 128 == 0 and isinstance(linear, torch.nn.Linear) and linear.bias is None
