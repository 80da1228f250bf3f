"""Names of all scales. It imports nothing slow, so that a typo is reported at once."""

import os
from pathlib import Path

from repro.core.errors import unknown
from repro.core.files import HOME

NO_SCALES = ("pocket-models", "hub")  # other files in config/


def names() -> list[str]:
    """The scales in config/."""
    return sorted(path.stem for path in (HOME / "config").glob("*.yaml") if path.stem not in NO_SCALES)


def file_of(name: str | None = None) -> Path:
    """The file of a scale in config/; of none it is $SCALE, else pocket.

    Raises:
        UserError: unknown scale.
    """
    name = name or os.environ.get("SCALE") or "pocket"
    if name not in names():
        raise unknown("scale", name, names())
    return HOME / "config" / f"{name}.yaml"
