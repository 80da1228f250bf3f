"""Token ids of a named corpus, with hashes."""

from pathlib import Path

from repro import corpora, models


def tokens(corpus: str, model: str, out: Path, hub: bool = False) -> None:
    """Tokenize `corpus` in one call with the tokenizer of `model`; write ids and identity to `out`.

    Raises:
        UserError: a corpus or tokenizer that is not there.
    """
    tokenizer = models.tokenizer(model, hub)
    ids = corpora.token_ids(corpus, tokenizer, hub)
    meta = corpora.identity(corpus, hub) | {"tokenizer_sha256": corpora.tokenizer_sha256(tokenizer)}
    corpora.save_tokens(out, ids, meta)
