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
    options = job.parsed_options()
    if job.kind == "requests" and options["task"] in tasks.TASKS:
        return tasks.TASKS[options["task"]].files
    if job.kind == "tokens" and not options.get("excerpt"):
        corpus = corpora.entry(options["corpus"])
        return {corpus.source: ""} if corpus.reader in ("mirror", "alpaca") else {}
    return {}
