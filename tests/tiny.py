"""Decoders of four layouts, random and small enough to quantize in a second; nothing is downloaded."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, **WINDOW)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**SHAPE)),
}


def llama_config(**changes: object) -> dict[str, object]:
    """A config.json of a Llama of four layers whose steps take milliseconds, with other values of some keys."""
    config = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return config | changes


def model(name: str, seed: int = 0) -> PreTrainedModel:
    """A model of `MODELS` with every parameter random, biases and norms too."""
    torch.manual_seed(seed)
    made = MODELS[name]().eval()
    for parameter in made.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return made


def tokens(sequences: int = 6, length: int = 24, seed: int = 0) -> torch.Tensor:
    """int64 token ids `[sequences, length]`."""
    return torch.randint(SHAPE["vocab_size"], (sequences, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The logits `[sequences, length, vocabulary]` of a model behind each id."""
    return model(input_ids=ids, use_cache=False).logits
