"""Generation with a draft: the draft grows a tree, the target verifies it in one pass and keeps the accepted path.

The keys and values of the accepted prefix are always the target's: its verification overwrites what the draft wrote
into the same slots. A token is the target's own choice after the tokens before it, greedy or by the noise of its seed
and position, so that a text is the one that plain decoding gives; only rounding can decide otherwise.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from repro.core.errors import UserError
from repro.engine.decoding import Decoding, DecodingState, Sampling, Steps
from repro.engine.speculate import Drafter, Tree, accepted
from repro.engine.step import Cache, Decoder, step
from repro.engine.traffic import Traffic, noted

TOGETHER = 64  # nodes whose logits are there at once: of 289 and 150,000 tokens they would take a GB


class Verifier:
    """The target's choice after every node of a tree, computed in one pass."""

    def __init__(
        self, target: Decoder, cache: Cache, tree: Tree, sampling: Sampling, seed: int, scored: bool = False
    ) -> None:
        self.target, self.cache, self.tree = target, cache, tree
        self.hidden: Tensor | None = None  # `[N, H]`, last states of the nodes of the last pass
        self.states = []
        for part in tree.ids.split(TOGETHER):
            state = DecodingState(len(part), sampling.temperature > 0, scored, target.device)
            for name in ("temperature", "top_k", "top_p"):
                getattr(state, name).fill_(getattr(sampling, name))
            state.seeds.fill_(seed)
            self.states.append(state)

    @torch.inference_mode()
    def __call__(self) -> tuple[Tensor, Tensor]:
        """Tokens int64 `[N]` and their log probabilities `[N]`, NaN unless scored."""
        tokens = self.tree.tokens()
        self.hidden = step(self.target, self.cache, tokens)
        following = (tokens.positions + 1).split(TOGETHER)
        for state, part, positions in zip(self.states, self.hidden.split(TOGETHER), following):
            state.choose(self.target.head(part), positions)
        return torch.cat([state.ids for state in self.states]), torch.cat([state.logprobs for state in self.states])

    @torch.inference_mode()
    def logits(self, node: int) -> Tensor:
        """`[V]`: the last pass's logits after a node, computed in the same batch of nodes as in that pass."""
        part = self.hidden.split(TOGETHER)[node // TOGETHER]
        return self.target.head(part)[node % TOGETHER]


class Drafted(Decoding):
    """One sequence that is decoded with a draft; `seconds` are those of iterations.

    Attributes:
        lengths: tokens of every iteration, the bonus included; the prefill is one of one token (the paper's counting).
            What the last iteration accepted beyond the tokens that were asked for counts too.
        passes: of the draft in every iteration.
        draft_s, verify_s: seconds of its two phases in every iteration. Between the phases the host waits for the
            device only where `phases` is set.
        verified: when each verification began and ended, seconds of `time.perf_counter`.
        verify: the verifier of this generation, once it runs.
        path: nodes that the last iteration accepted, the root first.
        verifications: notes every verification for a measurement.
    """

    verifications: Traffic | None = None

    def __init__(self, plain: Decoding, drafter: Drafter, phases: bool = False) -> None:
        super().__init__(plain.prompts, plain.limits, plain.sampling, plain.seeds, plain.scored)
        self.drafter, self.phases = drafter, phases
        self.lengths = [1]
        self.draft_s = []
        self.verify_s = []
        self.passes: list[int] = []
        self.verified: list[tuple[float, float]] = []
        self.verify: Verifier | None = None
        self.path: list[int] = []
        self.states: Tensor | None = None  # `[T, H]` of the prompt, from its prefill until the drafter has them

    def run(self, steps: Steps, chunk: int) -> Iterator[list[tuple[int, int, float]]]:
        """(0, token, log probability) of every token, one at a time."""
        began = time.perf_counter()
        self.state = steps.state(1, self.sampling.temperature > 0, self.scored)
        self._prefill(steps, chunk)
        self.drafter.begin(list(self.prompts[0]), chunk, self.states)
        self.states = None
        tokens, logprobs, ready = self._fetch()()
        self.prefill_s = ready - began
        self.verify = Verifier(steps.model, steps.cache, self.drafter.tree, self.sampling, self.seeds[0], self.scored)
        length = len(self.prompts[0])
        emitted = 0
        following = [(tokens[0], logprobs[0])]
        while True:
            for token, logprob in following:
                if token < 0:
                    raise UserError("the logits are not finite; the model or its compression is damaged")
                emitted += 1
                yield [(0, token, logprob)]
                if emitted == self.limits[0] or not self.running:
                    return
            following = self._iterate(self.verify, following[-1][0], length)
            length += len(following)

    def _last(self, steps: Steps, row: int, chunks: Iterator[Tensor]) -> Tensor:
        if not self.drafter.READS_STATES:
            return super()._last(steps, row, chunks)
        self.states = torch.cat(list(chunks))
        return self.states[-1:]

    def end(self, sequence: int) -> None:
        """End the sequence; the rest of what its last iteration accepted is dropped."""
        self.running.discard(sequence)

    def _iterate(self, verify: Verifier, root: int, length: int) -> list[tuple[int, float]]:
        """Tokens and log probabilities that one iteration gives after `length` tokens of the cache and the root."""
        began = time.perf_counter()
        tree, cache = self.drafter.tree, verify.cache
        tree.plant(root, length)
        self.drafter()
        if self.phases and tree.ids.is_cuda:
            torch.cuda.synchronize()
        drafted = time.perf_counter()
        with noted(self.verifications):
            chosen, chances = verify()
        targets_choice, logprobs = chosen.tolist(), chances.tolist()
        self.path = path = self._accepted(targets_choice)
        cache.gather(0, length, length + torch.tensor(path, device=tree.ids.device))
        self.drafter.keep(length, path, verify.hidden)
        ended = time.perf_counter()
        self.draft_s.append(drafted - began)
        self.verify_s.append(ended - drafted)
        self.verified.append((drafted, ended))
        self.seconds.append(ended - began)
        self.slots += tree.depth * length + length
        self.lengths.append(len(path))
        self.passes.append(tree.depth)
        return [(targets_choice[node], logprobs[node]) for node in path]

    def _accepted(self, targets_choice: list[int]) -> list[int]:
        """The nodes that are accepted, the root first, where the target says these tokens after the nodes."""
        tree = self.drafter.tree
        return accepted(tree.ids.tolist(), tree.parents.tolist(), targets_choice).nodes
