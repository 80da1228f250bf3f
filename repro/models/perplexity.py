"""Perplexity as GPTQ measures it, and KL divergence and top-1 agreement, which need far less text.

The token ids of a whole corpus are cut into windows that do not overlap, the tail is dropped, and nothing is carried
from one window to the next. In a window of `L` ids the model predicts the last `L - 1` from those before them:

    nll_w = mean_t -log p(x_t | x_<t),   PPL = exp(mean_w nll_w)

At the same positions, with p the full-precision model and q the low-bit one, in nats:

    KL(p || q) = sum_v p_v (log p_v - log q_v)

and top-1 agreement is the share of positions where both have the same most likely token. One row per window is kept, so
that intervals and differences are paired bootstraps over windows. log-softmax is float32, sums are float64.

What full precision gives on a CPU is kept as what its head reads, which takes little memory, for the recipes of the
same model that this process compares with it next.

Source: IST-DASLab/gptq (`llama_eval`), arXiv 2210.17323.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from tqdm import tqdm

from repro.core.errors import UserError
from repro.core.files import atomic, reading
from repro.models.activations import tensors_hash

if TYPE_CHECKING:
    import pandas as pd  # takes a quarter of a second, which only who scores pays

CHUNK = 2**21  # logits that are widened to float32 at a time
LARGEST = 2**28  # bytes that are kept of what a full-precision model's head reads
SCHEMA = pa.schema(
    [
        pa.field("window", pa.int64(), nullable=False),
        pa.field("first", pa.int64(), nullable=False),
        pa.field("second", pa.int64(), nullable=False),
        pa.field("targets", pa.int64(), nullable=False),
        pa.field("nll", pa.float64(), nullable=False),
        pa.field("kl", pa.float64()),
        pa.field("top1", pa.float64()),
    ]
)
_kept: dict[str, Tensor] = {}  # by model and ids, all of one model


@dataclass(frozen=True)
class Protocol:
    """A named, versioned way to measure perplexity; the version goes up whenever the numbers may change.

    Attributes:
        length: ids in a window.
        max_windows: only the first so many windows; None is all of them.
        kl_windows: the first so many windows are compared with the full-precision model as well.
        bos: what begins the text is what the tokenizer adds in one call, so only window 0 can begin with BOS.
        unit: what perplexity is per.
    """

    name: str = "gptq-2048"
    version: int = 1
    length: int = 2048
    max_windows: int | None = None
    kl_windows: int = 0
    bos: Literal["tokenizer"] = "tokenizer"
    unit: Literal["token"] = "token"

    @property
    def label(self) -> str:
        """The name that stands in results, `gptq-2048-v1`."""
        return f"{self.name}-v{self.version}"


def windows(ids: np.ndarray, length: int, limit: int | None = None) -> Tensor:
    """Windows int64 `[W, length]` of the token ids `[T]`, one after another; the tail is dropped.

    Raises:
        UserError: the text has no full window.
    """
    if length < 2 or (limit is not None and limit < 1):
        raise UserError(f"windows: at least one window of two ids is needed, not {limit} of {length}")
    count = len(ids) // length
    if count == 0:
        raise UserError(f"windows: a text of {len(ids)} tokens has no full window of {length}; name a longer corpus")
    count = count if limit is None else min(count, limit)
    return torch.from_numpy(np.asarray(ids[: count * length], dtype=np.int64).reshape(count, length))


@torch.inference_mode()
def score(
    model: nn.Module,
    windows: Tensor,
    reference: nn.Module | None = None,
    kl_windows: int = 0,
    batch: int = 4,
    full_precision: bool = False,
) -> "pd.DataFrame":
    """Score a causal LM on windows int64 `[W, L]`; the largest tensors are one batch of each model's logits.

    Args:
        model: a Hugging Face causal LM; it is put in evaluation mode.
        windows: what `windows` returns.
        reference: the full-precision model, for KL and top-1 agreement.
        kl_windows: how many windows, from the first, are compared with `reference`.
        batch: windows in one forward pass.
        full_precision: whether `model` is one that others are compared with, as a `reference` is.

    Returns:
        One row per window: `window`, its `first` and `second` id, `targets` (L - 1), the mean `nll` over them, and the
        mean `kl` and `top1` over the same positions, missing where not measured.

    Raises:
        UserError: NaN or Inf among the logits, an id that the model does not have, or windows longer than its context.
    """
    import pandas as pd

    compared = 0 if reference is None else min(kl_windows, len(windows))
    full = reference if compared else None
    if full_precision:
        full = model
    of_full = ""
    if full is not None and full.device.type == "cpu":
        of_full = tensors_hash(full.config, (*full.parameters(), *full.buffers()))
    rows = []
    for start in tqdm(range(0, len(windows), batch), desc="score", unit="batch", mininterval=5):
        ids = windows[start : start + batch]
        logits = _full_logits(model, ids, of_full) if full_precision else _logits(model, ids)
        others = _full_logits(reference, ids, of_full) if start < compared else None
        for row, window in enumerate(range(start, start + len(ids))):
            reference_logits = others[row] if window < compared else None
            nll, kl, agreement = _positions(logits[row], ids[row, 1:], reference_logits, window)
            values = (nll,) if reference_logits is None else (nll, kl.clamp(min=0), agreement)
            means = [*torch.stack([v.mean(dtype=torch.float64) for v in values]).tolist(), None, None][:3]
            rows.append((window, *ids[row, :2].tolist(), len(nll), *means))
    return pd.DataFrame(rows, columns=SCHEMA.names).astype({"kl": "Float64", "top1": "Float64"})


def perplexity(frame: "pd.DataFrame") -> float:
    """exp of the mean of the windows' mean negative log likelihoods."""
    return float(np.exp(frame["nll"].mean()))


@torch.inference_mode()
def by_position(model: nn.Module, windows: Tensor, edges: Sequence[int], batch: int = 1) -> "pd.DataFrame":
    """Mean negative log likelihood by the target's position in its window, for the model card.

    Args:
        model: as in `score`.
        windows: int64 `[W, L]`.
        edges: rising positions from 1 to L; bucket i holds the targets at `edges[i] … edges[i + 1] - 1`.
        batch: windows in one forward pass.

    Returns:
        One row per bucket: `start`, `stop` (not included), `targets`, `nll`.

    Raises:
        UserError: edges that do not rise within 1 … L, or as `score`.
    """
    import pandas as pd

    length = windows.shape[1]
    if len(edges) < 2 or edges[0] < 1 or edges[-1] > length or any(a >= b for a, b in pairwise(edges)):
        raise UserError(f"by_position: edges {list(edges)} do not rise within 1 … {length}")
    total = torch.zeros(length - 1, dtype=torch.float64)
    for start in tqdm(range(0, len(windows), batch), desc="by position", unit="batch", mininterval=5):
        ids = windows[start : start + batch]
        for row, logits in enumerate(_logits(model, ids)):
            total += _positions(logits, ids[row, 1:], None, start + row)[0].cpu()
    mean = (total / len(windows)).numpy()
    rows = [(a, b, (b - a) * len(windows), mean[a - 1 : b - 1].mean()) for a, b in pairwise(edges)]
    return pd.DataFrame(rows, columns=["start", "stop", "targets", "nll"])


def save_frame(
    path: Path | str, frame: "pd.DataFrame", meta: Mapping[str, str] | None = None, label: str | None = None
) -> None:
    """Write what `score` returned to a Parquet file, `meta` (protocol, corpus, hash of the ids) beside it.

    Args:
        label: a further column of text, which tells several runs in one frame apart.
    """
    table = pa.Table.from_pandas(frame, schema=_schema(label), preserve_index=False)
    with atomic(path) as temporary:
        pq.write_table(table.replace_schema_metadata(dict(meta or {})), temporary)


def _schema(label: str | None) -> pa.Schema:
    return SCHEMA.append(pa.field(label, pa.string(), nullable=False)) if label else SCHEMA


def load_frame(path: Path | str, label: str | None = None) -> "pd.DataFrame":
    """Read what `save_frame` wrote; `meta` is in the frame's `attrs`.

    Raises:
        UserError: the file is missing, cut short, or has other columns.
    """
    import pandas as pd

    try:
        with reading(path):
            table = pq.read_table(path, partitioning=None)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; build it again") from None
    except (OSError, pa.ArrowException) as error:
        first = str(error).partition("\n")[0]
        raise UserError(
            f"{path}: an incomplete or damaged Parquet file ({first}); delete it and build it again"
        ) from None
    if not table.schema.equals(_schema(label), check_metadata=False):
        listed = ", ".join(f"{field.name} {field.type}" for field in table.schema)
        raise UserError(f"{path}: its columns are not those of per-window scores ({listed}); build it again")
    meta = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    frame = table.to_pandas(types_mapper={pa.float64(): pd.Float64Dtype()}.get).astype({"nll": "float64"})
    frame.attrs = meta
    return frame


def check_context(model: nn.Module, length: int) -> None:
    """Raise unless windows of `length` tokens fit the model.

    Raises:
        UserError: they are longer than its context.
    """
    context = getattr(model.config, "max_position_embeddings", None)
    if context and length > context:
        named = Path(getattr(model.config, "name_or_path", "") or type(model).__name__).name
        raise UserError(
            f"windows of {length} tokens are longer than the context of {named} "
            f"(max_position_embeddings {context}); use windows of at most {context}"
        )


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits `[B, L - 1, V]` that predict `ids[:, 1:]`, in the model's own dtype."""
    check_context(model, ids.shape[1])
    vocabulary = model.get_input_embeddings().num_embeddings
    if ids.max() >= vocabulary:
        raise UserError(
            f"id {int(ids.max())} is not among the model's {vocabulary}; use the tokenizer that belongs to the model"
        )
    return model.eval()(input_ids=ids.to(model.device), use_cache=False).logits[:, :-1]


def _full_logits(model: nn.Module, ids: Tensor, of_model: str) -> Tensor:
    """As `_logits`, the same bits; what the head reads is kept where the hash of the model is known."""
    if not of_model:
        return _logits(model, ids)
    head = model.get_output_embeddings()
    name = f"{of_model} {hashlib.sha256(ids.numpy().tobytes()).hexdigest()} {tuple(ids.shape)}"
    if name in _kept:
        return head(_kept[name])[:, :-1]
    calls: list[tuple[Tensor, Tensor]] = []
    hook = head.register_forward_hook(lambda _, args, output: calls.append((args[0], output)))
    try:
        logits = _logits(model, ids)
    finally:
        hook.remove()
    if any(not key.startswith(of_model) for key in _kept):
        _kept.clear()
    hidden, output = calls[-1]
    kept_bytes = sum(states.nbytes for states in _kept.values())
    plain = output.data_ptr() == logits.data_ptr()  # nothing scales or caps what the head gives
    if plain and kept_bytes + hidden.nbytes <= LARGEST:
        _kept[name] = hidden
    return logits


def _positions(logits: Tensor, targets: Tensor, reference: Tensor | None, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """Negative log likelihood, KL and agreement, float64 and bool `[T]`, of logits `[T, V]`; KL and agreement are
    empty without `reference`."""
    if reference is not None and reference.shape != logits.shape:
        raise UserError(f"the reference has {reference.shape[1]} logits where the model has {logits.shape[1]}")
    _check_finite(logits, f"the model's logits in window {window}")
    if reference is not None:
        _check_finite(reference, f"the reference's logits in window {window}")
        reference = reference.to(logits.device)
    targets = targets.to(logits.device)
    step = max(1, CHUNK // logits.shape[1])
    nll, kl, agreement = [], [], []
    for start in range(0, len(logits), step):
        part = slice(start, start + step)
        log_q = logits[part].float().log_softmax(-1)
        nll.append(-log_q.gather(1, targets[part, None])[:, 0].double())
        if reference is not None:
            log_p = reference[part].float().log_softmax(-1)
            agreement.append(logits[part].argmax(1) == reference[part].argmax(1))
            kl.append(log_q.sub_(log_p).mul_(log_p.exp_()).sum(1, dtype=torch.float64).neg_())
    return tuple(torch.cat(parts) if parts else torch.empty(0) for parts in (nll, kl, agreement))


def _check_finite(logits: Tensor, name: str) -> None:
    if not all(map(math.isfinite, torch.stack(torch.aminmax(logits)).tolist())):  # once: a GPU waits for the answer
        kind = "NaN" if logits.isnan().any() else "Inf"
        raise UserError(f"{name} hold {kind}; the model's weights, its scales or its calibration are broken")
