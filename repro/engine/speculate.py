"""Draft trees on the device, grown level by level, and what a target accepts of them (SubSpec, section 4.2).

A draft pass gives every leaf of the last level its children's probabilities; a child's score is the product of the
probabilities on its path, and the `top_k` best children of all leaves are the next level. Nothing is ranked again, so
that a tree has 1 + top_k x depth nodes of known depths; only tokens and parents differ. Everything that a pass reads is
on the device, the level too: one captured pass is replayed for all levels, without a word to the host in between.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from repro.engine.step import Cache, Decoder, Tokens, step
from repro.engine.traffic import Traffic, noted

Logits = Callable[[Tokens], Tensor]  # from tokens to float `[T, V]`


class Tree:
    """A draft tree of `depth` levels of `top_k` nodes after its root, node 0, the last token that was decided.

    Node n lies in slot `start + n` of row 0 of the cache.

    Attributes:
        ids, parents: int64 `[N]`; the root is its own parent.
        scores: float32 `[N]`, natural logarithm of the product of probabilities on the path.
        mask: bool `[N, N]`: the nodes on the path to a node, itself among them.
        start: int32 scalar, tokens before the root.
    """

    def __init__(self, top_k: int, depth: int, temperature: float, device: torch.device) -> None:
        self.top_k, self.depth, self.temperature = top_k, depth, temperature
        nodes = 1 + top_k * depth
        self.ids = torch.zeros(nodes, dtype=torch.int64, device=device)
        self.parents = torch.zeros_like(self.ids)
        self.scores = torch.zeros(nodes, device=device)
        self.own = torch.eye(nodes, dtype=torch.bool, device=device)
        self.mask = self.own.clone()
        self.start = torch.zeros((), dtype=torch.int32, device=device)
        self.level = torch.zeros((), dtype=torch.int64, device=device)  # the last one that is there
        self.depths = (torch.arange(nodes, dtype=torch.int32, device=device) + top_k - 1) // top_k
        self._siblings = torch.arange(top_k, device=device)

    def plant(self, root: int, start: int) -> None:
        """Begin a tree after `start` tokens with the token `root`."""
        self.ids[0] = root
        self.start.fill_(start)
        self.level.zero_()

    def grow_root(self, logits: Logits) -> None:
        """The first level, from the root alone."""
        self._grow(logits, torch.zeros_like(self._siblings[:1]))

    def grow(self, logits: Logits) -> None:
        """The next level, from the leaves of the last one."""
        self._grow(logits, self._nodes())

    def tokens(self, nodes: Tensor | None = None) -> Tokens:
        """Some nodes, or all, as a step computes them."""
        if nodes is None:
            nodes = torch.arange(len(self.ids), device=self.ids.device)
        start = self.start.repeat(len(nodes))  # kernels read it token by token
        slots = start + nodes.int()
        lengths = (slots[-1:] + 1).repeat(len(nodes))
        positions = start + self.depths[nodes]
        return Tokens(self.ids[nodes], torch.zeros_like(slots), positions, slots, lengths, self.mask[nodes], start)

    def _nodes(self) -> Tensor:
        """int64 `[top_k]`: the nodes of the last level."""
        return 1 + self.top_k * (self.level - 1) + self._siblings

    def _grow(self, logits: Logits, leaves: Tensor) -> None:
        chances = (logits(self.tokens(leaves)).float() / self.temperature).log_softmax(1)
        best, tokens = chances.topk(self.top_k, dim=1)  # of each leaf: no level keeps more
        scores, order = (self.scores[leaves, None] + best).flatten().topk(self.top_k)
        parents = leaves[order // self.top_k]
        self.level += 1
        nodes = self._nodes()
        self.ids[nodes] = tokens.flatten()[order]
        self.parents[nodes] = parents
        self.scores[nodes] = scores
        self.mask[nodes] = self.mask[parents] | self.own[nodes]


class Drafter:
    """Grows a tree with a draft's passes; on a GPU they are two captured graphs, of the root and of a level.

    Attributes:
        READS_STATES: whether it computes from the target's hidden states of the prompt, which are kept only then.
        passes: notes every pass for a measurement.
    """

    READS_STATES = False
    passes: Traffic | None = None

    def __init__(self, draft: Decoder, cache: Cache, tree: Tree) -> None:
        self.draft, self.cache, self.tree = draft, cache, tree
        self.graphs: list[torch.cuda.CUDAGraph] = []

    @torch.inference_mode()
    def __call__(self) -> None:
        """All levels of a planted tree."""
        if self.draft.device.type == "cuda":
            root, level = (graph.replay for graph in self.graphs)
        else:
            root, level = (partial(grow, self.logits) for grow in (self.tree.grow_root, self.tree.grow))
        with noted(self.passes):
            root()
        for _ in range(1, self.tree.depth):
            with noted(self.passes):
                level()

    def begin(self, prompt: list[int], chunk: int, states: Tensor | None) -> None:
        """A text begins: the target's prefill has put its prompt into the cache that both share.

        `states` `[T, H]` are the target's last hidden states of the prompt where the drafter reads them.
        """

    def keep(self, length: int, path: list[int], hidden: Tensor) -> None:
        """Nodes were accepted after `length` tokens; the target has written their keys and values.

        `hidden` `[N, H]` are the target's last states of all nodes of the tree.
        """

    def logits(self, tokens: Tokens) -> Tensor:
        """The draft's logits after tokens, `[T, V]`; keys and values of the tokens are written to the cache."""
        return self.draft.head(step(self.draft, self.cache, tokens))

    @torch.inference_mode()
    def capture(self, pool: tuple[int, int]) -> None:
        """Capture both passes on a GPU, before a generation: they run twice, in the first slots of the cache.

        `pool` is the memory of their intermediate results. Graphs can share it: what a pass leaves for the next one
        lies in the tree and the cache, outside. The memory of the two passes before goes back to the device.
        """
        if self.draft.device.type != "cuda" or self.graphs:
            return
        self.tree.plant(0, 0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.tree.level.zero_()
                self.tree.grow_root(self.logits)
                self.tree.grow(self.logits)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for grow in (self.tree.grow_root, self.tree.grow):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                grow(self.logits)
            self.graphs.append(graph)


class Accepted(NamedTuple):
    """The nodes that a target accepts, the root first, and the token that it says after the last of them."""

    nodes: list[int]
    bonus: int


def accepted(ids: Sequence[int], parents: Sequence[int], targets_choice: Sequence[int]) -> Accepted:
    """Follow a tree from its root as long as a child is the target's choice.

    Args:
        ids, parents: of the nodes; the root is node 0.
        targets_choice: the target's token after each node: its greedy choice, or one sampled from its distribution. A
            child is accepted only if it equals that token, so the emitted text is the target's.
    """
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, ids)) if node > 0}
    path = [0]
    while (following := children.get((path[-1], targets_choice[path[-1]]))) is not None:
        path.append(following)
    return Accepted(path, targets_choice[path[-1]])
