"""Several processes that write accepted rows at once: every row stays, with its series and its declared inputs."""

import multiprocessing
from dataclasses import replace
from functools import partial

import pytest

from repro.results.accept import accept
from repro.store import accepted


@pytest.fixture
def checked(house, monkeypatch):
    """The rows of the tiny table, checked and ready to be written."""
    rows = []
    with monkeypatch.context() as patch:
        patch.setattr(accepted, "write", rows.extend)
        accept(house.table())
    return rows


def write_one_by_one(start, rows):
    """What several `accept` do, one after the other."""
    start.wait()
    for row in rows:
        accepted.write([row])


def with_note(note, of_row):
    return replace(of_row, row=replace(of_row.row, note=note))


def rewrite_often(start, count):
    """What several changes of every stored row do, one after the other."""
    start.wait()
    for i in range(count):
        accepted.rewrite(partial(with_note, f"rewritten {i}"))


def run_at_once(*writers):
    """Run functions in processes of their own, which begin together; each gets the barrier first."""
    context = multiprocessing.get_context("fork")
    start = context.Barrier(len(writers))
    processes = [context.Process(target=function, args=(start, *rest)) for function, *rest in writers]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    accepted.forget()


def check_all_are_stored(checked):
    stored = {row.key: row for row in accepted.every()}
    assert sorted(stored) == sorted(of_row.row.key for of_row in checked)
    for of_row in checked:
        row = stored[of_row.row.key]
        assert len(accepted.series(row)) == len(of_row.seeds)
        assert accepted.inputs_of(row) == of_row.inputs


def test_of_two_processes_that_accept_at_once_no_row_is_lost(checked):
    assert len(checked) > 8
    run_at_once((write_one_by_one, checked[0::2]), (write_one_by_one, checked[1::2]))
    check_all_are_stored(checked)


def test_what_is_accepted_while_rows_are_rewritten_stays(checked):
    accepted.write(checked[:2])
    run_at_once((write_one_by_one, checked[2:]), (rewrite_often, len(checked)))
    check_all_are_stored(checked)
    assert any(row.note.startswith("rewritten") for row in accepted.every())


def test_what_another_process_accepted_since_rows_were_read_is_read_again(checked):
    by_label = {of_row.row.row: of_row for of_row in checked}  # one row of each label, all with series of their own
    first, second, third = (by_label[label] for label in ("FP16", "RTN pc", "GPTQ g128"))
    accepted.write([first])
    assert [len(accepted.series(row)) for row in accepted.every()] == [len(first.seeds)]
    writer = multiprocessing.get_context("fork").Process(target=accepted.write, args=([second],))
    writer.start()
    writer.join()
    accepted.write([third])
    check_all_are_stored([first, second, third])
