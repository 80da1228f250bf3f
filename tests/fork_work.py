"""What tests/workflow/test_fork_server.py has done in forks."""

import os
import sys
import time
from pathlib import Path


def tell(path: str) -> None:
    """Write who does this, where, and what was imported before."""
    print("to the asker's output")
    facts = [os.getppid(), os.environ.get("ASKED", ""), os.getcwd(), "transformers.models.llama" in sys.modules]
    Path(path).write_text("\n".join(map(str, facts)))


def wait(path: str) -> None:
    """Say who this is, and end only when killed."""
    Path(path).write_text(str(os.getpid()))
    while True:
        time.sleep(0.01)


def fail() -> None:
    """End as bad input does."""
    sys.exit("error: a sentence")


def stumble() -> None:
    """End as a mistake in our code does."""
    raise KeyError("ours")
