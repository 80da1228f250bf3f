"""Per-window scores of a run on each corpus of its profile, with KL and top-1 agreement to full precision."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from repro import bits, corpora, models, provenance
from repro import perplexity as protocol
from repro.jobs.compress import load


def perplexity(
    model: str,
    texts: Mapping[Path, Path],
    weights: Path | None = None,
    length: int = 2048,
    windows: int | None = None,
    kl_windows: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    hub: bool = False,
    code: str = "",
) -> None:
    """Score a run on several corpora in one process.

    Args:
        texts: token ids of a corpus to the Parquet file that its scores go to.
        weights: the compressed model; None is full precision.
        code: hash of the code that decides the scores, for the record.

    Raises:
        UserError: damaged inputs, a corpus without a full window, NaN in the logits.
    """
    lm = load(model, weights, device, dtype, hub)
    reference = models.load(model, device, dtype, hub) if weights and kl_windows else None
    rule = protocol.Protocol(length=length, max_windows=windows, kl_windows=kl_windows)
    meta = {
        "protocol": rule.label.replace("2048", str(length)) + (f" w{windows}" if windows else ""),
        "bits": json.dumps(bits.report(lm, float_bits=16)),
        **provenance.origin(device, code),
        "dtype": dtype,
        "threads": str(torch.get_num_threads()),
    }
    for source, out in texts.items():
        ids, identity = corpora.load_tokens(source)
        frame = protocol.score(lm.model, protocol.windows(ids, length, windows), reference, kl_windows)
        protocol.save_frame(out, frame, meta | identity)
