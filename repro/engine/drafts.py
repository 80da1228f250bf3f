"""Drafts that are separate models with their own cache, which SubSpec is compared with.

    small     a smaller model of the same family and SubSpec's fixed tree (the paper: depth 32, temperature 1)
    apart     SubSpec's draft with a cache of its own, the first row of its ablation (Table 2)
    whole     SubSpec's draft with a substitute of every block, in the target's cache, as without offloading (Figure 2b)
    specexec  the same model and SpecExec's tree, the most probable nodes first, up to a budget

A draft's cache follows the text: after every iteration the accepted nodes move to the slots right after it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from repro.core.errors import UserError
from repro.engine.prefill import together
from repro.engine.ranked import RankedTree, best_first
from repro.engine.speculate import Drafter, Tree
from repro.engine.step import Cache, Decoder, Tokens, run_of, step
from repro.methods import subspec


@dataclass(frozen=True)
class Small:
    """A small model as draft, with the tree of section 5.1 of SubSpec's paper for pretrained drafts.

    Attributes:
        top_k, depth: of the tree.
        temperature, sampled_temperature: of the draft's distribution in greedy and in sampled decoding.
    """

    top_k: int = 6
    depth: int = 32
    temperature: float = 1.0
    sampled_temperature: float = 1.0

    @property
    def nodes(self) -> int:
        """Nodes of the tree, the root among them."""
        return 1 + self.top_k * self.depth

    @property
    def room(self) -> int:
        """Slots that the target's cache needs after the text."""
        return self.nodes

    @property
    def slots(self) -> int:
        """Slots that the draft's cache needs after the text."""
        return self.nodes

    @property
    def width(self) -> int:
        """Nodes of the widest draft pass."""
        return self.top_k


@dataclass(frozen=True)
class Apart(subspec.Config):
    """SubSpec's draft and tree with the draft's own keys and values, which the target does not overwrite."""


@dataclass(frozen=True)
class Whole(subspec.Config):
    """SubSpec's draft with a substitute of every block, also of those that stay on the device.

    Where the target lies on the device as a whole, SubSpec's rule shares every block, and the draft is the target. The
    authors' recipe without offloading (`hqq_4bit_no_offload`) quantizes all of them.
    """

    EVERY = True


@dataclass(frozen=True)
class SpecExec:
    """SpecExec's tree; the defaults beyond the budget are those of its authors' code.

    Attributes:
        budget: nodes that are verified, without the root.
        batch: nodes that are expanded at once.
        children: of each.
        rounds: draft passes at most.
        decay: factor on a path's probability for each level.
        temperature, sampled_temperature: of the draft's distribution.
    """

    budget: int = 512
    batch: int = 128
    children: int = 32
    rounds: int = 32
    decay: float = 0.95
    temperature: float = 1.0
    sampled_temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise UserError(f"budget is {self.budget}; SpecExec verifies 1 node or more, in the paper 64 to 1024")

    @property
    def nodes(self) -> int:
        """Nodes of the tree, the root among them."""
        return 1 + self.budget

    @property
    def room(self) -> int:
        """Slots that the target's cache needs after the text."""
        return self.nodes

    @property
    def depth(self) -> int:
        """Levels at most: one a pass."""
        return self.rounds

    @property
    def slots(self) -> int:
        """Slots that the draft's cache needs after the text: of every node that can be expanded."""
        return self.rounds * self.batch + 1

    @property
    def width(self) -> int:
        """Nodes of the widest draft pass."""
        return min(self.batch, self.budget)


class OwnDrafter(Drafter):
    """Grows the fixed tree with a model of its own."""

    def __init__(self, draft: Decoder, tree: Any) -> None:
        super().__init__(draft, Cache(draft, 1), tree)

    def begin(self, prompt: list[int], chunk: int, states: Tensor | None) -> None:
        """Put the prompt into the draft's cache."""
        together(self.draft, self.cache, [prompt], chunk)

    @torch.inference_mode()
    def keep(self, length: int, path: list[int], hidden: Tensor | None = None) -> None:
        """Keep the accepted nodes after `length` tokens; the last one may never have been computed: it is now."""
        slots = self.slots_of(path)
        computed = int((slots >= 0).sum())
        self.cache.gather(0, length, length + torch.from_numpy(slots[:computed]).to(self.draft.device))
        missing = self.tree.ids[torch.tensor(path[computed:], dtype=torch.int64, device=self.draft.device)]
        if len(missing):
            step(self.draft, self.cache, run_of(missing, 0, length + computed))

    def slots_of(self, path: list[int]) -> np.ndarray:
        """Slots of nodes after the text in the draft's cache, -1 of leaves of the last level."""
        nodes = np.array(path, dtype=np.int64)
        last_level = 1 + self.tree.top_k * (self.tree.depth - 1)
        return np.where(nodes < last_level, nodes, -1)


class RankedDrafter(OwnDrafter):
    """Grows a dynamic tree with a model of its own; of shapes that differ, so that nothing is captured."""

    @torch.inference_mode()
    def __call__(self) -> None:
        """A planted tree, grown and ranked."""
        self.tree.grow(self.evaluate)

    def evaluate(self, tokens: Tokens, numbers: np.ndarray, parents: np.ndarray) -> Tensor:
        """Logits `[T, V]` of nodes that are expanded."""
        return self.logits(tokens)

    def capture(self, pool: tuple[int, int]) -> None:
        """Nothing is captured."""

    def slots_of(self, path: list[int]) -> np.ndarray:
        """Slots of nodes after the text in the draft's cache, -1 where they were not expanded."""
        return self.tree.slots[path]


def drafter_of(config: Small | Apart | SpecExec, draft: Decoder, temperature: float) -> OwnDrafter:
    """The drafter of a configuration at a temperature."""
    if isinstance(config, Small | Apart):
        return OwnDrafter(draft, Tree(config.top_k, config.depth, temperature, draft.device))
    policy = best_first(config.budget, config.batch, config.rounds)
    tree = RankedTree(config.nodes, config.children, policy, temperature, config.decay, draft.device)
    return RankedDrafter(draft, tree)


def check_vocabulary(target: Any, draft: Any, names: tuple[str, str]) -> None:
    """Raise where a draft's tokens are not the target's.

    Args:
        target, draft: their tokenizers.
        names: of the two models.

    Raises:
        UserError: they differ; the sentence names both models.
    """
    if target.get_vocab() != draft.get_vocab():
        sizes = f"{len(target):,} and {len(draft):,} tokens"
        raise UserError(
            f"draft {names[1]}: its vocabulary is not that of {names[0]} ({sizes}); choose one of its family"
        )
