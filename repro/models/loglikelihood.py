"""Log likelihoods of answers after prompts, batched by length: lm-eval's numbers with less overhead per call.

For a prompt c and an answer a of n ids, sum_i log p(a_i | c, a_<i) and whether every a_i is the likeliest id there.
What several answers share is run once: a prefix that many prompts begin with (its keys and values are reused), and a
prompt, after which its answers lie side by side, each seeing the prompt and itself:

    row of ids    prompt | answer 1 | answer 2 | …   with the positions that each answer would have alone

Rows are padded on the right, which a causal model does not see. The head is applied only where an id is predicted.
log-softmax is float32, sums are float64.

A model is run so only where that gives what each answer gives alone (`longest_shared`): not beyond the window of a
layer, not where the order of ids says where they are (ALiBi), not where the longest row decides how all are rotated.
Else each answer is a row of its own after its whole prompt, under the mask that the model itself makes.

Source: EleutherAI/lm-evaluation-harness (`HFLM._loglikelihood_tokens`), with which a test compares.
"""

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from repro.core.errors import UserError

CHUNK = 2**24  # logits that are widened to float32 at a time
CONTEXT = 2048  # of a model whose config does not say it, as in lm-eval
CACHED = 4  # times as many ids may lie in reused keys and values as a batch has
PADDING = 16  # at most this part of a batch's ids is padding
# Kinds of layers, as Transformers names them, and the key of a configuration that says how many ids they see.
WINDOWS = {
    "full_attention": "",
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
    "global": "",  # GPT-Neo's names
    "local": "window_size",
}
# Rotary embeddings whose frequencies follow the largest position of a forward pass, once it is beyond the key's value.
BY_LARGEST_POSITION = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}

Row = tuple[int, np.ndarray, int]  # prefix (-1: none), ids after it, how many of them are the answer


@dataclass
class AnsweredPrompt:
    """A prompt and its answers: the numbers of their `rows`, and the ids of each answer."""

    prefix: int
    ids: np.ndarray
    rows: list[int] = field(default_factory=list)
    answers: list[np.ndarray] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Ids of its row: an answer's last id predicts nothing."""
        return len(self.ids) + sum(len(answer) - 1 for answer in self.answers)

    @property
    def branches(self) -> int:
        """Answers with ids after the prompt."""
        return sum(len(answer) > 1 for answer in self.answers)


@torch.inference_mode()
def score(
    model: nn.Module, prefixes: Sequence[np.ndarray], rows: Sequence[Row], tokens: int = 4096
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Score the rows of a causal LM.

    Args:
        model: a Hugging Face causal LM; it is put in evaluation mode.
        prefixes: ids int `[T]` that several rows begin with.
        rows: prompt and answer; the prompt has an id of its own after the prefix.
        tokens: ids in a forward pass, padding included.

    Returns:
        Per row: log likelihood float64, whether the answer is what greedy decoding gives, and whether the prompt was
        cut from the left to fit the context.

    Raises:
        UserError: an answer longer than the context, an id that the model does not have, or NaN or Inf.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    prompts_without_prefix = [ids for _, ids, _ in rows]
    most = max((int(ids.max()) for ids in [*prefixes, *prompts_without_prefix]), default=0)
    if most >= vocabulary:
        raise UserError(f"id {most} is not among the model's {vocabulary}; use the tokenizer that belongs to the model")
    context = getattr(model.config, "max_position_embeddings", None) or CONTEXT
    longest = max((len(ids) + (len(prefixes[prefix]) if prefix >= 0 else 0) for prefix, ids, _ in rows), default=0)
    if min(longest, context) <= longest_shared(model):
        prompts, cut = _prompts(prefixes, rows, context)
    else:
        prompts, cut = _alone(prefixes, rows, context)
        if unscaled_positions(model.config) < math.inf:
            tokens = 1  # a row a pass: a longer one beside it would change its rotary embedding
    log_p = []
    greedy = []
    owner = []
    cached = None
    of = -1
    model.eval()
    for batch in _batches(prompts, prefixes, tokens):
        if batch[0].prefix != of:
            of = batch[0].prefix
            cached = _keys_and_values(model, prefixes[of])
        for answer, out in zip(_answers(model, cached, 0 if of < 0 else len(prefixes[of]), batch), (log_p, greedy)):
            out.append(answer)
        for prompt in batch:
            for row, ids in zip(prompt.rows, prompt.answers):
                owner += [row] * len(ids)
    loglik = np.bincount(owner, torch.cat(log_p).cpu().numpy(), len(rows)) if rows else np.zeros(0)
    if not np.isfinite(loglik).all():
        raise UserError(
            "the model's logits hold NaN or Inf; the model's weights, its scales or its calibration are broken"
        )
    missed = np.bincount(owner, ~torch.cat(greedy).cpu().numpy(), len(rows)) if rows else np.zeros(0)
    return loglik, missed == 0, cut


def _prompts(
    prefixes: Sequence[np.ndarray], rows: Sequence[Row], window: int
) -> tuple[list[AnsweredPrompt], np.ndarray]:
    """Each prompt once with all its answers, and which rows were cut from the left, so that `window` ids predict.

    A prompt with more answers than a row of `window` ids holds has several rows: the mask that keeps answers apart
    grows with the square of a row, and in BLiMP all answers follow the same empty prompt.
    """
    every: list[AnsweredPrompt] = []
    latest: dict[tuple[int, bytes], AnsweredPrompt] = {}
    cut = np.zeros(len(rows), dtype=bool)
    for row, (prefix, ids, count) in enumerate(rows):
        if count > window:
            raise UserError(f"an answer has {count} tokens, the model's context only {window}")
        cut[row] = len(ids) + (len(prefixes[prefix]) if prefix >= 0 else 0) > window + 1
        if cut[row]:
            ids = np.concatenate([prefixes[prefix], ids] if prefix >= 0 else [ids])[-window - 1 :]
            prefix = -1
        key = (prefix, ids[:-count].tobytes())
        prompt = latest.get(key)
        if prompt is None or prompt.length + count - 1 > window:
            prompt = latest[key] = AnsweredPrompt(prefix, ids[:-count])
            every.append(prompt)
        prompt.rows.append(row)
        prompt.answers.append(ids[-count:])
    return every, cut


def longest_shared(model: nn.Module) -> float:
    """The length up to which rows can share prefixes and prompts and give what each gives alone; 0: they never do.

    Args:
        model: a Hugging Face causal LM.
    """
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    if not takes_positions or getattr(model.config, "alibi", False):
        return 0
    return min(seen_by_every_layer(model.config), unscaled_positions(model.config))


def seen_by_every_layer(config: Any) -> float:
    """The ids up to which every layer of a model sees all that is before: its shortest window; infinity without one.

    0 where a layer is of a kind that this module does not know, such as one with a state in place of keys and values.

    Args:
        config: the model's configuration.
    """
    named = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    sizes = []
    for kind in set(named or ["sliding_attention"]):  # Mistral has a window and no list
        if kind not in WINDOWS:
            return 0
        size = getattr(config, WINDOWS[kind], None) if WINDOWS[kind] else None
        sizes += [] if size is None else [size]
    return min(sizes, default=math.inf)


def unscaled_positions(config: Any) -> float:
    """The length of a row from which on its rotary embedding depends on that length; infinity where it never does.

    Args:
        config: the model's configuration; its `rope_parameters` may be one mapping, or one for each kind of layer.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    every = [scaling for scaling in parameters.values() if isinstance(scaling, dict)] or [parameters]
    limits = []
    for scaling in every:
        key = BY_LARGEST_POSITION.get(scaling.get("rope_type"))
        if key is not None:
            limits.append(scaling.get(key) or getattr(config, key, None) or config.max_position_embeddings)
    return min(limits, default=math.inf)


def _alone(prefixes: Sequence[np.ndarray], rows: Sequence[Row], window: int) -> tuple[list[AnsweredPrompt], np.ndarray]:
    """As `_prompts`, but each row is a prompt of its own: no shared prefix, no other answers."""
    prompts = []
    cut = np.zeros(len(rows), dtype=bool)
    for row, (prefix, ids, count) in enumerate(rows):
        prompt_ids = np.concatenate([prefixes[prefix], ids]) if prefix >= 0 else ids
        (prompt,), cut[row : row + 1] = _prompts([], [(-1, prompt_ids, count)], window)
        prompt.rows = [row]
        prompts.append(prompt)
    return prompts, cut


def _batches(
    prompts: list[AnsweredPrompt], prefixes: Sequence[np.ndarray], tokens: int
) -> Iterator[list[AnsweredPrompt]]:
    """Prompts of one prefix and of like length, longest first, those without branches apart from the others."""
    batch: list[AnsweredPrompt] = []
    padding = 0
    for prompt in sorted(prompts, key=lambda p: (p.prefix, p.branches > 1, -p.length)):
        if batch:
            first = batch[0]
            count = len(batch) + 1
            before = len(prefixes[first.prefix]) if first.prefix >= 0 else 0
            padding += first.length - prompt.length
            is_alike = (prompt.prefix, prompt.branches > 1) == (first.prefix, first.branches > 1)
            room = count * first.length <= tokens and count * (before + first.length) <= CACHED * tokens
            if not is_alike or not room or padding > tokens // PADDING:
                yield batch
                batch, padding = [], 0
        batch.append(prompt)
    if batch:
        yield batch


def _keys_and_values(model: nn.Module, ids: np.ndarray) -> Any:
    row = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
    return model(input_ids=row, use_cache=True, logits_to_keep=1).past_key_values


def _answers(model: nn.Module, cached: Any, before: int, batch: list[AnsweredPrompt]) -> tuple[Tensor, Tensor]:
    """Of every id of a batch's answers: its log p, float64, and whether it is the likeliest."""
    width = batch[0].length
    ids = np.zeros((len(batch), width), dtype=np.int64)
    positions = np.tile(np.arange(width), (len(batch), 1))
    branch = np.zeros((len(batch), width), dtype=np.int64)
    rows: list[int] = []
    where: list[int] = []
    for row, prompt in enumerate(batch):
        end = start = len(prompt.ids)
        ids[row, :end] = prompt.ids
        for number, answer in enumerate(prompt.answers, start=1):
            stop = start + len(answer) - 1
            ids[row, start:stop] = answer[:-1]
            positions[row, start:stop] = np.arange(end, end + stop - start)
            branch[row, start:stop] = number
            rows += [row] * len(answer)
            where += [end - 1, *range(start, stop)]
            start = stop
        if batch[0].branches > 1:
            positions[row, start:] = 0  # padding: no position beyond those of the answers
    targets = np.concatenate(list(chain.from_iterable(prompt.answers for prompt in batch)))
    tensors = [torch.from_numpy(np.asarray(array, dtype=np.int64)).to(model.device)
             for array in (ids, positions + before, branch, [rows, where, targets])]  # fmt: skip
    past = copy.deepcopy(cached)  # a forward pass appends to it
    if past is not None:
        past.batch_repeat_interleave(len(batch))
    mask = _apart(tensors[2], before, model.dtype) if batch[0].branches > 1 else None
    words = {"position_ids": tensors[1], "attention_mask": mask, "past_key_values": past, "use_cache": past is not None}
    log_p = []
    greedy = []
    head = model.get_output_embeddings()

    def only(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0][tensors[3][0], tensors[3][1]][None],)

    with head.register_forward_pre_hook(only):
        logits = model(input_ids=tensors[0], **words).logits[0]
    step = max(1, CHUNK // logits.shape[1])
    for part, target in zip(logits.split(step), tensors[3][2].split(step)):
        scores = part.float()
        greedy.append(scores.argmax(-1) == target)
        log_p.append(scores.log_softmax(-1).gather(1, target[:, None])[:, 0].double())
    return torch.cat(log_p), torch.cat(greedy)


def _apart(branch: Tensor, before: int, dtype: torch.dtype) -> Tensor:
    """Mask to be added to attention, `[B, 1, L, before + L]`: an id sees what is before it in the prompt or its answer.

    Args:
        branch: int `[B, L]`, 0 in the prompt (and in padding), else the number of the answer.
        before: ids of the prefix, which all see.
        dtype: that of the model.
    """
    allowed = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    allowed = nn.functional.pad(allowed.tril(), (before, 0), value=True)
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(
        ~allowed, torch.finfo(dtype).min
    )[:, None]
