"""Folded JSON, in which repeated values are stored once: `{"#1f2e3d4c": [...], "a": {"steps": "#1f2e3d4c"}}`.

The declared inputs of a table repeat the whole configuration of each step in every cell and seed, a megabyte a table.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from repro.core.files import short_hash

LONG = 30  # characters from which a repeated value is worth a name


def fold(facts: Mapping[str, Any]) -> dict[str, Any]:
    """`facts` with every list or mapping that occurs more than once under a name of its own, which begins with #."""
    counts: Counter[str] = Counter()
    shared: dict[str, Any] = {}

    def count(value: Any) -> None:  # noqa: ANN401
        if isinstance(value, dict | list) and len(text := json.dumps(value, sort_keys=True)) >= LONG:
            counts[text] += 1
            for part in [] if counts[text] > 1 else value.values() if isinstance(value, dict) else value:
                count(part)

    def folded(value: Any) -> Any:  # noqa: ANN401
        if not isinstance(value, dict | list):
            return value
        name = "#" + short_hash(text) if counts[text := json.dumps(value, sort_keys=True)] > 1 else ""
        if name not in shared:
            inner = {k: folded(v) for k, v in value.items()} if isinstance(value, dict) else [folded(v) for v in value]
            if not name:
                return inner
            shared[name] = inner
        return name

    for value in facts.values():
        count(value)
    entries = {key: folded(value) for key, value in facts.items()}
    return shared | entries


def unfold(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What `fold` was given; nothing of it may be changed in place."""
    shared = {key: value for key, value in facts.items() if key.startswith("#")}
    known: dict[str, Any] = {}  # each is spelled out once, and is then one object wherever it is said

    def whole(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, str):
            if value not in shared:
                return value
            if value not in known:
                known[value] = whole(shared[value])
            return known[value]
        if isinstance(value, dict):
            return {key: whole(part) for key, part in value.items()}
        return [whole(part) for part in value] if isinstance(value, list) else value

    return {key: whole(value) for key, value in facts.items() if key not in shared}


def text(value: Any) -> str:  # noqa: ANN401
    """A value as JSON without blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
