"""Check that the data files of jobs are here: in the repository, or in the folder that REPRO_DATA names."""

from collections.abc import Iterable

from repro.data import corpora, sources, tasks
from repro.store.job import Job


def lacking(jobs: Iterable[Job]) -> str:
    """The first data file that one of these jobs reads and that is not here; empty if all are.

    Texts of the hub are not looked at: a scale says whether they may be fetched.
    """
    for job in jobs:
        for name, sha256 in _files(job).items():
            if not sources.available(name, sha256):
                return name
    return ""


def _files(job: Job) -> dict[str, str]:
    """The data files that a job reads itself, with their hashes where these are known beforehand."""
    given = job.given()
    if job.kind == "requests" and given["task"] in tasks.TASKS:
        return tasks.TASKS[given["task"]].files
    if job.kind == "tokens" and not given.get("excerpt"):
        corpus = corpora.entry(given["corpus"])
        return {corpus.source: ""} if corpus.reader in ("mirror", "alpaca") else {}
    return {}
