"""EAGLE-2 (Li et al. 2024): a draft head of one block that guesses the target's next hidden state, and a dynamic tree.

The head reads a token's embedding next to the target's last hidden state before it, and gives the hidden state of that
token, which the target's own head turns into logits. In a tree the state before is the head's own guess; once a token
is accepted, its entry in the head's cache is computed again with the target's state. The tree is that of `ranked.py`:
six levels of ten nodes, ranked again to the best 59 after the root.

A head is trained by `python -m repro.generation.train_eagle`.
"""

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from repro.core.errors import UserError, at_least
from repro.engine import head_files
from repro.engine.drafts import RankedDrafter
from repro.engine.head_files import HEADS
from repro.engine.ranked import RankedTree, level_by_level
from repro.engine.step import Block, Cache, Decoder, Tokens, run_of
from repro.engine.weights import LAYERS, Dense

CHUNK = 256  # tokens of a prompt that the head computes at a time


@dataclass(frozen=True)
class Eagle2:
    """EAGLE-2's tree; depth and width are those of SubSpec's section 5.1, the 60 nodes those of EAGLE-2's code.

    Attributes:
        size: nodes that are verified, the root among them.
        depth: passes of the head.
        top_k: nodes that a pass expands, and children of each.
        temperature, sampled_temperature: of the draft's distribution.
    """

    size: int = 60
    depth: int = 6
    top_k: int = 10
    temperature: float = 1.0
    sampled_temperature: float = 1.0

    def __post_init__(self) -> None:
        at_least(self, size=2, depth=1, top_k=1)

    @property
    def nodes(self) -> int:
        """Nodes of the tree, the root among them."""
        return self.size

    @property
    def room(self) -> int:
        """Slots after the text: of the tree, and of the nodes that are expanded, in tables that both models share."""
        return max(self.size, 1 + self.top_k * (self.depth - 1))

    @property
    def width(self) -> int:
        """Nodes of the widest draft pass."""
        return self.top_k


class EagleHead(nn.Module):
    """The head as it is trained: `fc` `[H, 2 H]` and a block of the target's kind without its first norm."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        layers = model.base_model.layers
        self.config = copy.deepcopy(model.config)
        self.config.num_hidden_layers = 1
        hidden = self.config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = type(layers[0])(self.config, 0)
        self.layer.input_layernorm = nn.Identity()
        self.rotary = type(model.base_model.rotary_emb)(self.config)

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """Hidden states `[B, T, H]` of tokens with these embeddings, from the target's states before each of them."""
        x = self.fc(torch.cat([embeddings, states], -1))
        positions = torch.arange(x.shape[1], device=x.device)[None]
        y = self.layer(x, position_embeddings=self.rotary(x, positions), attention_mask=None)
        return y[0] if isinstance(y, tuple) else y

    def trained(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return {name: value.detach() for name, value in self.named_parameters()}


class FittedHead:
    """A head as the engine runs it, with a target's embedding, head and rotary tables.

    Attributes:
        decoder: of the one block; it lacks nothing but `fc` to be a decoder.
    """

    def __init__(self, head: EagleHead, target: Decoder) -> None:
        """The head's cache has as many slots as the target's.

        Raises:
            UserError: the head belongs to a model of another width.
        """
        weight = head.fc.weight.data
        if weight.shape[0] != target.embedding.shape[1]:
            raise UserError(f"draft head of width {weight.shape[0]}: the target has {target.embedding.shape[1]}")

        def placed(tensor: Tensor) -> Tensor:
            return tensor.data.to(target.device, target.embedding.dtype)

        products = {}
        for kind, names in LAYERS.items():
            linears = [head.layer.get_submodule(name) for name in names]
            bias = None
            if linears[0].bias is not None:
                bias = placed(torch.cat([linear.bias.data for linear in linears]))
            products[kind] = Dense(placed(torch.cat([linear.weight.data for linear in linears])), bias)
        norm = placed(head.layer.post_attention_layernorm.weight)
        block = Block.make(torch.ones_like(norm), norm, **products)
        self.fc = Dense(placed(weight))
        self.decoder = Decoder(
            head.config, target.embedding, (block,), target.norm, target.head, target.cos, target.sin
        )

    @torch.inference_mode()
    def states(self, cache: Cache, tokens: Tokens, before: Tensor) -> Tensor:
        """Hidden states `[T, H]` of tokens from those before them; `cache` gets their keys and values."""
        decoder = self.decoder
        block = self.decoder.blocks[0]
        eps = decoder.config.rms_norm_eps
        scale = decoder.cos.shape[1] ** -0.5
        x = self.fc(torch.cat([decoder.embedding[tokens.ids], before], 1))
        keys, values = cache.keys[0], cache.values[0]
        where = tokens.positions, tokens.rows, tokens.slots
        q = block.rope(block.qkv(x), decoder.cos, decoder.sin, *where, keys, values)
        y = block.attention(q, keys, values, tokens.rows, tokens.lengths, scale, tokens.mask, tokens.start)
        y, residual = block.norm(block.out(y.flatten(1)), block.post_norm, eps, x)
        return residual + block.down(block.product(block.gate_up(y)))


class EagleDrafter(RankedDrafter):
    """Grows EAGLE-2's tree. Slot i of the head's cache is of token i + 1, which has the target's state of token i."""

    READS_STATES = True

    def __init__(self, head: FittedHead, config: Eagle2, temperature: float) -> None:
        policy = level_by_level(config.depth - 1, config.top_k)
        device = head.decoder.device
        tree = RankedTree(config.nodes, config.top_k, policy, temperature, 1.0, device, behind=1)
        super().__init__(head.decoder, tree)
        self.head = head
        self.before: Tensor | None = None  # `[1, H]`, the target's state before the root
        self.guessed: dict[int, Tensor] = {}  # the head's states of expanded nodes by their number

    @torch.inference_mode()
    def begin(self, prompt: list[int], chunk: int, states: Tensor | None) -> None:
        """Put a prompt into the head's cache, with the target's states `[T, H]` of it."""
        ids = torch.tensor(prompt[1:], dtype=torch.int64, device=states.device)
        for first in range(0, len(ids), CHUNK):
            part = ids[first : first + CHUNK]
            self.head.states(self.cache, run_of(part, 0, first), states[first : first + len(part)])
        self.before = states[-1:]

    @torch.inference_mode()
    def keep(self, length: int, path: list[int], hidden: Tensor) -> None:
        """Compute accepted nodes again with the target's states; that of the root was the target's already."""
        nodes = torch.tensor(path, dtype=torch.int64, device=hidden.device)
        if len(path) > 1:
            self.head.states(self.cache, run_of(self.tree.ids[nodes[1:]], 0, length), hidden[nodes[:-1]])
        self.before = hidden[nodes[-1:]]

    def evaluate(self, tokens: Tokens, numbers: np.ndarray, parents: np.ndarray) -> Tensor:
        """Logits `[T, V]` of nodes, from the state of the parent of each."""
        if numbers[0] == 0:
            self.guessed = {}
            before = self.before
        else:
            before = torch.stack([self.guessed[parent] for parent in parents.tolist()])
        states = self.head.states(self.cache, tokens, before)
        self.guessed.update(zip(numbers.tolist(), states))
        return self.head.decoder.head(states)


# --- files ------------------------------------------------------------------------------------------------------------


def path_of(model: str) -> Path:
    """The file of a pocket model's head."""
    return HEADS / f"{Path(model).name}-eagle2.safetensors"


def load(path: Path, model: nn.Module, fingerprint: str) -> EagleHead:
    """The head of a model.

    Raises:
        UserError: the file is not there, not readable, or belongs to another model.
    """
    command = f"python -m repro.generation.train_eagle --model {path.name.removesuffix('-eagle2.safetensors')}"
    tensors = head_files.read(path, "eagle2", "draft head", command, fingerprint)
    head = EagleHead(model)
    missing, odd = head.load_state_dict(tensors, strict=False)
    if odd or set(missing) & set(head.trained()):
        raise UserError(f"{path}: not the tensors of a draft head of this model; train it again")
    return head.eval()
