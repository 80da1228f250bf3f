"""Models for the tests of the engine: three random layouts with the pocket tokenizer, saved like any checkpoint."""

import json
import shutil

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from repro import models
from repro.engine import weights
from repro.generation import Engine

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.15,
}
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}  # fmt: skip
# A Llama for models with SPEAR's compensators, whose training on few texts shows in its tokens; and that training.
TINY = dict(
    model_type="llama", hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, vocab_size=300, max_position_embeddings=128, initializer_range=0.12,
)  # fmt: skip
FEW = {"samples": 8, "tokens": 16, "cka_samples": 4, "epochs1": 1, "epochs2": 1, "lr1": 1e-2, "lr2": 1e-1}
LAYOUTS = {
    # RoPE scaling and a head of its own, GQA; heads of 128, tied, MHA; biases of q, k, v, GQA
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                                                  rope_parameters=SCALED, tie_word_embeddings=False)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, num_attention_heads=2, num_key_value_heads=2,
                                                        head_dim=128, sliding_window=None, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_attention_heads=2, num_key_value_heads=1)),
}  # fmt: skip


def save(layout, folder, **changes):
    """A random model of a layout as a folder; `changes` are keys of its config.json."""
    torch.manual_seed(0)
    model = LAYOUTS[layout]()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)  # norms and biases that do something
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.POCKET / "pocket-3m" / name, folder)
    if changes:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(folder)


class Transformers:
    """Greedy decoding by Transformers with its own cache; what was decoded once is kept."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.model, self.known, self.ties = models.load(name, device), {}, 0

    def tokens(self, ids: list[int], count: int) -> tuple[list[int], list[float]]:
        """The next tokens, and how far each was ahead of the second choice."""
        if (tuple(ids), count) not in self.known:
            self.known[tuple(ids), count] = self._decode(ids, count)
        return self.known[tuple(ids), count]

    @torch.no_grad()
    def _decode(self, ids: list[int], count: int) -> tuple[list[int], list[float]]:
        tokens_in, cache, tokens, gaps = torch.tensor([ids], device=self.model.device), None, [], []
        for _ in range(count):
            out = self.model(input_ids=tokens_in, past_key_values=cache, use_cache=True)
            cache, best = out.past_key_values, out.logits[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            tokens_in = best.indices[None, :1]
        return tokens, gaps

    def disagreements(self, engine: Engine, prompts: list[list[int]], count: int) -> list[str]:
        """A line for each sequence of a batch that the engine goes on with otherwise, but for gaps below 1e-5."""
        result = []
        for ids, text in zip(prompts, engine.generate(prompts, count, eos=False), strict=True):
            tokens, gaps = self.tokens(ids, count)
            first = next((i for i, (ours, theirs) in enumerate(zip(text.tokens, tokens)) if ours != theirs), None)
            if first is not None and gaps[first] < 1e-5:
                self.ties += 1
                print(f"{engine.name}: {len(ids)} tokens, new token {first}: the logits are {gaps[first]:.2e} apart")
            elif first is not None or len(text.tokens) != count:
                result.append(f"{len(ids)} prompt tokens, chunks of {engine.chunk}: new token {first}")
        return result


def products(model, names=weights.LAYERS) -> list:
    """The products of a decoder, block by block: those of `names`."""
    of_blocks = []
    for block in model.blocks:
        of_blocks += [getattr(block, name) for name in names]
    return of_blocks
