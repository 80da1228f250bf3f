"""A folder of a study's measurements: a JSON file each, written as soon as it is there and not measured again."""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from repro.core.files import write_text


def file_of_command_line(study: str, name: str) -> Path:
    """The file that a study with one of them records, in the folder that `--out` names, which is made if missing.

    Args:
        study: its docstring, whose first line says what it is.
        name: of the file.
    """
    parser = argparse.ArgumentParser(description=study.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help=f"folder of {name}")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


class MeasurementFolder:
    """Measurements by name.

    Attributes:
        path: of the folder, which is made if missing.
        facts: fields of every file, such as the device and the commit.
        only: words of which a name must contain one to be measured; none of them asks for all.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], only: Sequence[str] = ()) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.facts = dict(facts)
        self.only = only

    def file(self, name: str) -> Path:
        """The file of a measurement, which may not be there."""
        return self.path / f"{name}.json"

    def is_due(self, name: str) -> bool:
        """Whether a measurement is asked for and not there."""
        asked_for = not self.only or any(word in name for word in self.only)
        return asked_for and not self.file(name).is_file()

    def write(self, name: str, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Measure and write the result, with `wall_s`, the seconds that it took; print its numbers."""
        began = time.perf_counter()
        facts = {**self.facts, **measure()}
        facts["wall_s"] = time.perf_counter() - began
        write_text(self.file(name), json.dumps(facts, indent=1) + "\n")
        numbers = {key: value for key, value in facts.items() if isinstance(value, int | float)}
        print(f"{name} ({facts['wall_s']:.0f} s): {json.dumps(numbers)}", flush=True)

    def read(self, name: str) -> dict[str, Any]:
        """A measurement that is there."""
        return json.loads(self.file(name).read_text())
