"""Small random models in folders, with the pocket tokenizer changed: situations that users have reported.

The pocket tokenizer puts `<s>` (id 0) in front of a text by its post-processor; `</s>` is id 1.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from repro import models

TOKENIZER = models.POCKET / "tokenizer"
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.08,
    "tie_word_embeddings": True,
}
TEMPLATE = (
    "{% for m in messages %}{{ bos_token + m['role'] + '\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)  # begins with BOS


def write_tokenizer(folder: Path, post_processor: bool = True, **config: Any) -> Path:
    """The pocket tokenizer in a folder, with or without what adds BOS, and keys over its tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    definition = json.loads((TOKENIZER / "tokenizer.json").read_text())
    if not post_processor:
        definition["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    facts = json.loads((TOKENIZER / "tokenizer_config.json").read_text()) | config
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


def write_vocabulary(folder: Path) -> Path:
    """The pocket tokenizer as `vocab.json` and `merges.txt`, without a tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads((TOKENIZER / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    facts = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


def permute_vocabulary(folder: Path) -> None:
    """Give every token of `vocab.json` the id of its neighbour, in a circle; the special tokens keep theirs."""
    path = folder / "vocab.json"
    vocabulary = json.loads(path.read_text())
    tokens = [token for token, number in vocabulary.items() if number > 1]
    moved = dict(zip(tokens, [vocabulary[token] for token in tokens[1:] + tokens[:1]]))
    path.write_text(json.dumps(vocabulary | moved))


def write_config(folder: Path, **facts: Any) -> None:
    """Set keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def llama(**options: Any) -> PreTrainedModel:
    """A Llama with random weights of a fixed seed."""
    torch.manual_seed(0)
    return _random_norms(LlamaForCausalLM(LlamaConfig(**SHAPE | options)))


def mistral(window: int) -> PreTrainedModel:
    """A Mistral whose every layer attends to the last `window` tokens."""
    torch.manual_seed(0)
    return _random_norms(MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=window)))


def _random_norms(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()
