"""Dynamic draft trees: propose nodes, expand some of them, and verify the best of all proposals.

EAGLE-2 expands level by level and ranks again at the end (Li et al. 2024, section 4); SpecExec expands the most
probable nodes first, wherever they are (Svirschevski et al. 2024, section 4). They differ in what they expand next
alone. A proposal never scores higher than its parent, so that the best ones always form a tree.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from repro.engine.step import Tokens

Evaluate = Callable[[Tokens, np.ndarray, np.ndarray], Tensor]  # tokens, their numbers and parents' to logits `[T, V]`
ROOT = 0


class Proposals:
    """All nodes that were proposed, in the order in which they were; number 0 is the root.

    Attributes:
        tokens, parents, depths: int64 `[P]`; the root is its own parent.
        scores: float64 `[P]`, logarithm of the path's probability, with what a method adds.
        slots: int64 `[P]`, position among the expanded nodes; -1 of one that was not expanded.
    """

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths = (np.array([value], dtype=np.int64) for value in (root, ROOT, 0))
        self.scores = np.zeros(1)
        self.slots = np.full(1, -1, dtype=np.int64)
        self.paths: list[list[int]] = []  # of every expanded node, the slots on its path, itself among them

    def __len__(self) -> int:
        return len(self.tokens)

    def take_slots(self, numbers: np.ndarray) -> None:
        """Give nodes that are expanded now the next slots; their parents have theirs."""
        for number in numbers:
            slot = len(self.paths)
            above = [] if number == ROOT else self.paths[self.slots[self.parents[number]]]
            self.slots[number] = slot
            self.paths.append([*above, slot])

    def add(self, parents: np.ndarray, tokens: np.ndarray, gains: np.ndarray) -> None:
        """Propose children `[E, C]` of parents `[E]`, `gains` being what their scores add to a parent's."""
        children = tokens.shape[1]
        of = parents.repeat(children)
        self.tokens = np.concatenate([self.tokens, tokens.ravel()])
        self.parents = np.concatenate([self.parents, of])
        self.depths = np.concatenate([self.depths, self.depths[of] + 1])
        self.scores = np.concatenate([self.scores, self.scores[of] + gains.ravel()])
        self.slots = np.concatenate([self.slots, np.full(len(of), -1, dtype=np.int64)])

    def best(self, count: int) -> np.ndarray:
        """The root and the best `count` other nodes in the order of their proposal; of equal ones the earlier."""
        order = np.argsort(-self.scores[1:], kind="stable")[:count]
        return np.concatenate([[ROOT], np.sort(order + 1)])


Policy = Callable[[Proposals, int], np.ndarray]  # from what is there and the round to the nodes that are expanded next


def level_by_level(depth: int, beam: int) -> Policy:
    """EAGLE-2: the root, then `depth` times the best `beam` children of the level before."""

    def following(proposals: Proposals, level: int) -> np.ndarray:
        if level == 0:
            return np.array([ROOT])
        if level > depth:
            return np.array([], dtype=np.int64)
        last = np.flatnonzero(proposals.depths == level)
        order = np.argsort(-proposals.scores[last], kind="stable")[:beam]
        return np.sort(last[order])

    return following


def best_first(budget: int, batch: int, rounds: int) -> Policy:
    """SpecExec: of those among the best `budget` that are not expanded, the best `batch`; at most `rounds` times."""

    def following(proposals: Proposals, level: int) -> np.ndarray:
        if level == rounds:
            return np.array([], dtype=np.int64)
        best = proposals.best(budget)
        waiting = best[proposals.slots[best] < 0]
        order = np.argsort(-proposals.scores[waiting], kind="stable")[:batch]
        return np.sort(waiting[order])

    return following


class RankedTree:
    """The best nodes of a growth as a tree that a target verifies, `size` with the root.

    Where fewer were proposed, the rest is padding: nodes that are their own parents, which no path reaches.

    Attributes:
        ids, parents: int64 `[size]`; the root is its own parent.
        slots: int64 `[size]` on the host, each node's slot in the draft's own cache, -1 where it has none.
    """

    def __init__(
        self,
        size: int,
        children: int,
        policy: Policy,
        temperature: float,
        decay: float,
        device: torch.device,
        behind: int = 0,
    ) -> None:
        """`decay` is a factor of each level on a path's probability; the draft's cache is `behind` tokens short."""
        self.size, self.children, self.policy = size, children, policy
        self.temperature = temperature
        self.decay = decay
        self.device = device
        self.behind = behind
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.parents = torch.zeros_like(self.ids)
        self.slots = np.full(size, -1, dtype=np.int64)
        self.depth = 0
        self._depths = torch.zeros(size, dtype=torch.int32, device=device)
        self._mask = torch.eye(size, dtype=torch.bool, device=device)
        self._root, self._start = 0, 0

    def plant(self, root: int, start: int) -> None:
        """Begin a tree after `start` tokens with the token `root`."""
        self._root, self._start = root, start

    def grow(self, evaluate: Evaluate) -> Proposals:
        """Propose nodes until the policy has no more to expand, and keep the best."""
        proposals = Proposals(self._root)
        level = 0
        while len(chosen := self.policy(proposals, level)):
            proposals.take_slots(chosen)
            logits = evaluate(self._expanded(proposals, chosen), chosen, proposals.parents[chosen])
            chances = (logits.float() / self.temperature).log_softmax(1)
            best, tokens = chances.topk(min(self.children, chances.shape[1]), dim=1)
            gains = best.double().cpu().numpy() + np.log(self.decay)
            proposals.add(chosen, tokens.cpu().numpy(), gains)
            level += 1
        self.depth = level
        self._keep(proposals)
        return proposals

    def tokens(self) -> Tokens:
        """All nodes, as a step of the target computes them."""
        start = torch.full_like(self._depths, self._start)
        slots = start + torch.arange(self.size, dtype=torch.int32, device=self.device)
        lengths = torch.full_like(slots, self._start + self.size)
        return Tokens(self.ids, torch.zeros_like(slots), start + self._depths, slots, lengths, self._mask, start)

    def _expanded(self, proposals: Proposals, numbers: np.ndarray) -> Tokens:
        """Nodes that are expanded now, as a step of the draft computes them in its own cache."""
        before = self._start - self.behind
        width = len(proposals.paths)
        mask = torch.zeros(len(numbers), width, dtype=torch.bool)
        for row, number in enumerate(numbers):
            mask[row, proposals.paths[proposals.slots[number]]] = True
        ids = torch.from_numpy(proposals.tokens[numbers]).to(self.device)
        depths = torch.from_numpy(proposals.depths[numbers]).to(self.device, torch.int32)
        slots = torch.from_numpy(proposals.slots[numbers]).to(self.device, torch.int32) + before
        start = torch.full_like(slots, before)
        lengths = torch.full_like(slots, before + width)
        return Tokens(ids, torch.zeros_like(slots), start + depths, slots, lengths, mask.to(self.device), start)

    def _keep(self, proposals: Proposals) -> None:
        best = proposals.best(self.size - 1)
        number_of = np.full(len(proposals), -1, dtype=np.int64)
        number_of[best] = np.arange(len(best))
        parents = np.arange(self.size)
        parents[: len(best)] = number_of[proposals.parents[best]]
        tokens, depths = np.zeros(self.size, dtype=np.int64), np.zeros(self.size, dtype=np.int32)
        tokens[: len(best)], depths[: len(best)] = proposals.tokens[best], proposals.depths[best]
        self.slots[:] = -1
        self.slots[: len(best)] = proposals.slots[best]
        for destination, values in ((self.ids, tokens), (self.parents, parents), (self._depths, depths)):
            destination.copy_(torch.from_numpy(values))
        self._mask.copy_(torch.from_numpy(ancestors(parents)))


def ancestors(parents: Sequence[int]) -> np.ndarray:
    """bool `[N, N]`: the nodes on the path to each node, itself among them; a parent is an earlier node or itself."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        mask[node] |= mask[parent]
    return mask
