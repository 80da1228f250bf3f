"""A decoder with its cache: generates text, scores tokens, and reports how fast it was."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from operator import index
from typing import Any

import torch
from torch import Tensor

from repro import models
from repro.core.errors import NotMeasurable, UserError, shortened
from repro.engine.decoding import Decoding, Sampling, Steps
from repro.engine.output import Stats, TextPiece, TextStream, measured
from repro.engine.prefill import CHUNK, together
from repro.engine.step import Cache, Decoder, Operator, tree_of
from repro.engine.step import step as plain_step

MOST = 64  # sequences of a batch
SCORED = 256  # tokens whose logits are held together in float32 where all are asked for
SHAPE = "shape/"  # begins the name of a model with random weights


def needs_weights(name: str) -> None:
    """Check that a model has weights of its own, which text and quality need.

    Raises:
        UserError: it is a shape with random weights.
    """
    if name.startswith(SHAPE):
        raise UserError(f"{name} has random weights: they have speed and memory, but no text and no quality")


class Templated(str):
    """A prompt from a chat template: it has its special tokens, so the tokenizer adds none."""


class Core:
    """Decodes with one model. One generation runs at a time; a new one, or `logits`, ends the one before.

    Attributes:
        context: slots of a sequence in the cache.
        stats: of the last generation.
        chunk: tokens of a prefill that are computed at a time, of all its prompts together.
        STEPS: the class of its steps.
        RATED: whether stats have the device's read rate, whose measurement needs memory of its own.
    """

    STEPS = Steps
    RATED = True

    def __init__(self, name: str, model: Decoder, hub: bool = False) -> None:
        self.name = name
        self.hub = hub
        self.steps = self.STEPS(model, 1)
        self.context = len(model.cos)
        self.stats = Stats(stored_bytes=model.stored_bytes, read_bytes=model.read_bytes)
        self.chunk = CHUNK
        self._turn = object()  # of the generation that may go on

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        stop: str | Sequence[str] = (),
        eos: bool = True,
        logprobs: bool = False,
    ) -> Iterator[TextPiece]:
        """Continue a prompt, piece by piece; of several prompts, yield whole texts in order.

        Args:
            prompts: one text, or a list of up to 64 texts or lists of token ids, which are decoded together.
            max_new_tokens: at most; by default as many as the context holds.
            temperature, top_k, top_p: of sampling; temperature 0 is greedy. A token is a function of seed, position and
                logits.
            seed: of the first sequence, counted up for the next ones; or one for each.
            stop: texts that end a sequence; they are not part of it.
            eos: whether the model's end of text ends a sequence.
            logprobs: whether each `TextPiece` has its tokens' log probabilities.

        Raises (before anything runs):
            UserError: arguments without a meaning.
            NotMeasurable: prompts beyond the context.
        """
        needs_weights(self.name)
        several = not isinstance(prompts, str)
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stop:
            raise UserError("stop: an empty text would end every sequence at once; name some characters")
        ids = [self._ids(prompt) for prompt in (prompts if several else [prompts])]
        batch = self._decoding(ids, max_new_tokens, Sampling(temperature, top_k, top_p), seed, logprobs)
        return self._texts(batch, several, stop, self.ends if eos else frozenset(), logprobs)

    def chat(self, message: str) -> Templated:
        """A user's message in the tokenizer's chat template, up to the answer.

        Its ids are those of Transformers' `apply_chat_template(tokenize=True)`, whatever the tokenizer adds to a text.

        Raises:
            UserError: the tokenizer has no template, or one that cannot be applied.
        """
        needs_weights(self.name)
        if not self.tokenizer.chat_template:
            raise UserError(f"model {self.name!r}: its tokenizer has no chat template; leave out --chat")
        message_of_user = {"role": "user", "content": message}
        try:
            text = self.tokenizer.apply_chat_template([message_of_user], add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program: what it may raise has many kinds
            reason = shortened(" ".join(str(error).split()), 150)
            why = f"the chat template of its tokenizer cannot be applied ({reason})"
            raise UserError(f"model {self.name!r}: {why}; fix it, or leave out --chat") from None
        return Templated(text)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return models.tokenizer(self.name, self.hub)

    @cached_property
    def ends(self) -> frozenset[int]:
        """The ids that end a text, by the model's configuration."""
        ids = self.model.config.eos_token_id
        return frozenset([ids] if isinstance(ids, int) else ids or ())

    def logits(self, ids: Sequence[int] | Tensor) -> Tensor:
        """The logits after each of T tokens, float32 `[T, V]`; raises as `generate`.

        This is a prefill, which is dense: SpQt's thresholds apply to decoded tokens, in `generate` and `tree`.
        """
        return torch.cat(list(self._chunks(ids)))

    def score(self, ids: Sequence[int] | Tensor) -> Tensor:
        """float32 `[T - 1]`: natural log probabilities of T tokens after those before them, by dense `logits`."""
        following = torch.as_tensor(ids, device=self.model.device)[1:, None].split(SCORED)
        pairs = zip(self._chunks(ids), following)
        return torch.cat([logits[: len(targets)].log_softmax(1).gather(1, targets)[:, 0] for logits, targets in pairs])

    def time(self, prompt: int, new: int, batch: int = 1) -> Stats:
        """Decode `new` tokens after random prompts: speed and memory of any model, also of a shape."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.model.config.vocab_size, (batch, max(prompt, 0)), generator=generator).tolist()
        for _ in self._run(self._decoding(ids, new, Sampling(), 0)):
            pass
        return self.stats

    @property
    def model(self) -> Decoder:
        """The decoder."""
        return self.steps.model

    @property
    def cache(self) -> Cache:
        """The cache; sequence i of a batch is its row i."""
        return self.steps.cache

    def tree(self, row: int, length: int, ids: Tensor, parents: Sequence[int]) -> Tensor:
        """Logits `[T, V]` of the nodes of a tree (`tree_of`) after `length` slots of a row; then `cache.gather`."""
        if len(parents) != len(ids) or not all(-1 <= parent < node for node, parent in enumerate(parents)):
            raise UserError(f"parents {shortened(parents)} of {len(ids)} nodes: one for each, an earlier node or -1")
        if not (0 <= row < len(self.cache.lengths) and 0 <= length <= self.context - len(ids)):
            has = f"the cache has {len(self.cache.lengths)} rows of {self.context:,}"
            raise NotMeasurable("too_long", f"{len(ids)} nodes behind {length:,} slots of row {row}: {has}")
        return self.model.head(plain_step(self.model, self.cache, tree_of(ids, list(parents), row, length)))

    def replace(self, block: int, **operators: Operator) -> None:
        """Put other operators into a block; captured steps are dropped with the operators that they read."""
        blocks = list(self.model.blocks)
        blocks[block] = replace(blocks[block], **operators)
        self.steps = self.STEPS(replace(self.model, blocks=tuple(blocks)), len(self.cache.lengths))

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        try:
            if isinstance(prompt, str):
                special = not isinstance(prompt, Templated)
                return self.tokenizer(prompt.encode().decode(), add_special_tokens=special)["input_ids"]
            return [index(token) for token in prompt]
        except (TypeError, ValueError):
            raise UserError(f"prompt {shortened(ascii(prompt))}: give text in UTF-8 or a list of token ids") from None

    def _check(self, ids: Sequence[int], new: int) -> None:
        if len(ids) == 0:
            raise UserError("a prompt of no tokens: there is nothing to go on from; give it some text")
        if len(ids) + new > self.context:
            problem = f"{len(ids):,} tokens and {new:,} new ones are more than the context of {self.context:,}"
            raise NotMeasurable("too_long", f"{problem}; shorten the prompt or load with a larger context")
        if wrong := [token for token in ids if not 0 <= token < self.model.config.vocab_size]:
            raise UserError(f"token {wrong[0]}: {self.name} has ids from 0 to {self.model.config.vocab_size - 1:,}")

    def _decoding(
        self, ids: list[list[int]], new: int | None, sampling: Sampling, seed: int | Sequence[int], scored: bool = False
    ) -> Decoding:
        """A batch that fits, not yet begun."""
        if not 1 <= len(ids) <= MOST:
            raise UserError(f"{len(ids)} prompts; 1 to {MOST} are decoded together")
        if new is not None and new < 1:
            raise UserError(f"max_new_tokens is {new}; it must be 1 or more")
        seeds = [seed + i for i in range(len(ids))] if isinstance(seed, int) else list(seed)
        if len(seeds) != len(ids) or not all(0 <= value < 2**63 for value in seeds):
            raise UserError(f"seed: {len(seeds)} for {len(ids)} prompts; give one, or one for each, 0 or more")
        for prompt in ids:
            self._check(prompt, new or 1)
        return Decoding(ids, [new or self.context - len(prompt) for prompt in ids], sampling, seeds, scored)

    def _run(self, batch: Decoding) -> Iterator[list[tuple[int, int, float]]]:
        """The steps of a generation, and its stats when it ends, also early."""
        self._turn = turn = object()
        count = len(batch.prompts)
        device = self.model.device
        emitted = 0
        if count > len(self.cache.lengths):
            self.steps = self.STEPS(self.model, count)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            for step in batch.run(self.steps, self.chunk):
                emitted += len(step)
                yield step
                if self._turn is not turn:
                    raise UserError("another generation began on this engine; finish one before the next, or load two")
        finally:
            weights, times = self.model.read_bytes, batch.seconds
            counted = {"prompt_tokens": sum(map(len, batch.prompts)), "new_tokens": emitted, "read_bytes": weights}
            read = math.nan
            if self.RATED:
                read = weights + batch.slots * self.cache.slot_bytes / max(len(times), 1)
            self.steps.rest()
            stats = measured(device, batch.prefill_s, times, max(emitted - count, 0), read, **counted)
            if self._turn is turn:
                self.stats = replace(stats, stored_bytes=self.model.stored_bytes)

    def _texts(
        self, batch: Decoding, several: bool, stop: tuple[str, ...], ends: frozenset[int], logprobs: bool
    ) -> Iterator[TextPiece]:
        """Pieces of the only sequence; or whole texts, each as soon as it and all before it are done."""
        streams = [TextStream(self.tokenizer, prompt, stop) for prompt in batch.prompts]
        done = {}
        following = 0
        texts: list[str] = ["" for _ in streams]
        tokens: list[list[int]] = [[] for _ in streams]
        values: list[list[float]] = [[] for _ in streams]
        for emitted, piece in enumerate(self._run(batch), start=1):
            for i, token, logprob in piece:
                tokens[i].append(token)
                values[i].append(logprob)
                text, stopped = ("", False) if token in ends else streams[i].push(token)
                ended = ""
                if token in ends:
                    ended = "eos"
                elif stopped:
                    ended = "stop"
                elif emitted == batch.limits[i]:
                    ended = "length"
                if ended:
                    batch.end(i)
                texts[i] += text + (streams[i].pending if ended else "")
                if ended or (text and not several):
                    done[i] = TextPiece(texts[i], tokens[i], values[i] if logprobs else None, ended)
                    texts[i], tokens[i], values[i] = "", [], []
            while following in done:
                yield done.pop(following)
                following += several

    def _chunks(self, ids: Sequence[int] | Tensor) -> Iterator[Tensor]:
        """float32 logits of tokens, `SCORED` by `SCORED`."""
        needs_weights(self.name)
        ids = self._ids(torch.as_tensor(ids).tolist())
        self._check(ids, 0)
        self._turn = object()
        (states,) = together(self.model, self.cache, [ids], self.chunk)
        for hidden in states.split(SCORED):
            yield self.model.head(hidden).float()
