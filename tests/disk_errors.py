"""Files that are there and cannot be read, whoever runs the tests: root may read what a mode forbids."""

from pathlib import Path

WHY = "cannot be read (Input/output error)"  # what a message says of such a file


def make_unreadable(path: Path) -> None:
    """Put a regular file in the place of `path` whose first byte the system refuses: no memory is at address 0."""
    path.unlink(missing_ok=True)
    path.symlink_to("/proc/self/mem")


def refuse(*arguments: object, **options: object) -> None:
    """In the place of a library's reader: what it raises for a file that this user may not read."""
    raise PermissionError(13, "Failed to open local file 'x'. Detail: [errno 13] Permission denied")
