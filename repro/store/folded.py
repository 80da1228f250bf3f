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
    """`facts`, with every list or mapping that occurs more than once replaced by a name, and an entry for that name.

    Names are `#` and a hash.
    """
    counts: Counter[str] = Counter()
    shared: dict[str, Any] = {}

    def count(value: Any) -> None:  # noqa: ANN401
        if not isinstance(value, dict | list):
            return
        text = json.dumps(value, sort_keys=True)
        if len(text) < LONG:
            return
        counts[text] += 1
        if counts[text] == 1:  # what it holds is counted once
            for part in value.values() if isinstance(value, dict) else value:
                count(part)

    def folded(value: Any) -> Any:  # noqa: ANN401
        if not isinstance(value, dict | list):
            return value
        text = json.dumps(value, sort_keys=True)
        name = f"#{short_hash(text)}" if counts[text] > 1 else ""
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
    """The mapping that `fold` was given. Its values are shared, so none may be changed in place."""
    shared = {key: value for key, value in facts.items() if key.startswith("#")}
    unfolded_names: dict[str, Any] = {}  # a repeated value is one object

    def unfolded(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, str):
            if value not in shared:
                return value
            if value not in unfolded_names:
                unfolded_names[value] = unfolded(shared[value])
            return unfolded_names[value]
        if isinstance(value, dict):
            return {key: unfolded(part) for key, part in value.items()}
        return [unfolded(part) for part in value] if isinstance(value, list) else value

    return {key: unfolded(value) for key, value in facts.items() if key not in shared}


def text(value: Any) -> str:  # noqa: ANN401
    """A value as JSON without blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
