"""Atomic file writes: a file is whole or absent, whatever stops the writer."""

import bz2
import contextlib
import errno
import hashlib
import lzma
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import disk_errors
import pytest
import torch
import yaml
from safetensors.torch import save_file

from repro import __version__, papers
from repro.core import files
from repro.core.errors import UserError
from repro.core.files import HOME, atomic, read_text, sha256, short_hash, unpacked, write_text, writing


def everything(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_writes_whole_and_makes_folders(tmp_path):
    write_text(tmp_path / "a" / "b" / "c.txt", "täxt\n")
    assert everything(tmp_path) == ["a/b/c.txt"]
    assert (tmp_path / "a/b/c.txt").read_bytes() == "täxt\n".encode()


def test_a_text_in_xz_is_the_same_file_whenever_it_is_written(tmp_path):
    text = "a,b\r\nä,2\n" * 1000
    for name in ("plain.csv", "packed.csv.xz", "again.csv.xz"):
        write_text(tmp_path / name, text)
        assert read_text(tmp_path / name) == text, "line ends too"
    packed = (tmp_path / "packed.csv.xz").read_bytes()
    assert packed == (tmp_path / "again.csv.xz").read_bytes() and len(packed) < 200
    assert lzma.decompress(packed).decode() == text


@pytest.mark.parametrize(("ending", "pack"), [("xz", lzma.compress), ("bz2", bz2.compress)])
def test_a_packed_file_is_unpacked_or_refused(tmp_path, ending, pack):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(pack("ä\r\n".encode()))
    assert unpacked(path) == "ä\r\n".encode() and read_text(path) == "ä\r\n"
    for damaged in (pack(b"a" * 100)[:-1], b"no archive"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{path}: an incomplete or damaged file in {ending}; check it out again"):
            unpacked(path)


@pytest.mark.parametrize("left", [0, 20, -1])
def test_a_text_in_xz_that_is_cut_short_is_refused(tmp_path, left):
    write_text(tmp_path / "a.csv.xz", "1,2\n" * 100)
    (tmp_path / "a.csv.xz").write_bytes((tmp_path / "a.csv.xz").read_bytes()[:left])
    with pytest.raises(UserError, match="a.csv.xz: an incomplete or damaged file in xz"):
        read_text(tmp_path / "a.csv.xz")


def test_mode_is_that_of_a_shared_file(tmp_path):
    write_text(tmp_path / "f", "x")
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o644


def test_the_temporary_file_is_beside_and_keeps_the_ending(tmp_path):
    with atomic(tmp_path / "f.npy") as temporary:
        assert temporary.parent == tmp_path and temporary.name.startswith(".") and temporary.suffix == ".npy"
        temporary.write_bytes(b"x")
        assert not (tmp_path / "f.npy").exists()


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")])
def test_nothing_is_left_and_the_old_file_stays_when_the_block_raises(tmp_path, error):
    write_text(tmp_path / "f", "old")
    with pytest.raises(type(error)), atomic(tmp_path / "f") as temporary:
        temporary.write_text("half")
        raise error
    assert everything(tmp_path) == ["f"] and (tmp_path / "f").read_text() == "old"


@pytest.mark.parametrize("name", ["/proc/x", "/proc/x/y/z.txt", "/proc/self/fd/x"])
def test_where_nothing_can_be_created(name):
    with pytest.raises(UserError, match="^/proc/.*cannot be (created|written)"):
        write_text(name, "x")


def test_an_error_of_another_file_is_not_one_of_the_place(tmp_path):
    """What the block itself opens and does not find is no matter of the file that is written."""
    with pytest.raises(FileNotFoundError), atomic(tmp_path / "f") as temporary:
        temporary.write_bytes((tmp_path / "absent").read_bytes())
    assert everything(tmp_path) == []


def test_regular_files(tmp_path):
    (tmp_path / "f").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    for name in ("f", ".", "absent", "x" * 5000, "a\0b"):
        assert files.regular(tmp_path / name) == tmp_path / name
    (tmp_path / "link").symlink_to("pipe")
    for name, kind in {"pipe": "a named pipe", "link": "a named pipe", "socket": "a socket"}.items():
        with pytest.raises(UserError, match=f"{name}: {kind}, not a regular file; name a file"):
            files.regular(tmp_path / name)
    with pytest.raises(UserError, match="^--text x: a device"):
        files.regular("/dev/null", "--text x")
    with pytest.raises(UserError, match="a named pipe"):
        sha256(tmp_path / "pipe")
    server.close()


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path):
    """What is missing, and what a library says of the content, is for the reader of the file."""
    path = tmp_path / "f"
    disk_errors.make_unreadable(path)
    with pytest.raises(UserError) as error, files.reading(path, "name another"):
        path.read_text()
    assert str(error.value) == f"{path}: cannot be read (Input/output error); name another"
    with pytest.raises(UserError) as error, files.reading(tmp_path):
        tmp_path.read_text()
    assert str(error.value) == f"{tmp_path}: cannot be read (Is a directory)"
    with pytest.raises(UserError, match=r": cannot be read \(Permission denied\)$"), files.reading(path):
        disk_errors.refuse()
    with pytest.raises(FileNotFoundError), files.reading(tmp_path / "absent"):
        (tmp_path / "absent").read_text()
    for content_error in (OSError("the footer is cut"), ValueError("no number")):
        with pytest.raises(type(content_error)) as same, files.reading(path):
            raise content_error
        assert same.value is content_error


def test_what_may_be_replaced(tmp_path):
    def is_ours(path):
        return path.read_text() == "ours"

    def check(name):
        files.check_replaceable(tmp_path / name, "--out", is_ours)

    (tmp_path / "ours").write_text("ours")
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "folder").mkdir()
    for link, target in {"link": "ours", "dangling": "nowhere", "to-folder": "folder"}.items():
        (tmp_path / link).symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    for name in ("ours", "absent", "folder"):
        check(name)
    for name in ("theirs", "link", "dangling", "to-folder", "pipe"):
        with pytest.raises(UserError, match=f"--out .*{name}: exists, and this command did not write it"):
            check(name)


def test_a_name_that_is_too_long(tmp_path):
    with pytest.raises(UserError, match="the name is too long; choose a shorter one") as error:
        write_text(tmp_path / ("x" * 5000), "x")
    assert len(str(error.value)) < 200 and everything(tmp_path) == []


def test_what_else_is_written_says_the_same(tmp_path):
    (tmp_path / "a").write_text("x")
    with pytest.raises(UserError, match="a/b: cannot be written, a file or folder is in its place"):
        with writing(tmp_path / "a" / "b"):
            (tmp_path / "a" / "b").mkdir()
    with pytest.raises(ValueError, match="odd"), writing(tmp_path / "f"):
        raise ValueError("odd")


READ_ONLY = [errno.EROFS, errno.EACCES, errno.EPERM]
FULL = [errno.ENOSPC, errno.EDQUOT]


@pytest.mark.parametrize("number", READ_ONLY + FULL)
@pytest.mark.parametrize("call", ["mkstemp", "replace", "mkdir", "fsync"])
def test_read_only_and_full_disks_are_one_sentence(tmp_path, monkeypatch, call, number):
    target = tmp_path / "f.txt"
    target.write_text("old")

    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    owner = {"mkstemp": tempfile, "replace": os, "mkdir": Path, "fsync": os}[call]
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, refuse)
        with pytest.raises(UserError) as error:
            write_text(target, "new")
    word = "writable" if number in READ_ONLY else "the disk is full"
    assert str(error.value).startswith(f"{target}: ") and word in str(error.value) and "\n" not in str(error.value)
    assert everything(tmp_path) == ["f.txt"] and target.read_text() == "old"


def test_a_full_disk_inside_the_block(tmp_path):
    with pytest.raises(UserError, match="the disk is full"), atomic(tmp_path / "f") as temporary:
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert everything(tmp_path) == []


def test_a_full_disk_as_safetensors_says_it(tmp_path):
    """It raises no OSError; the limit on file sizes stands for the full disk, as it needs no mount."""
    code = """
        import resource, signal, sys, torch
        from pathlib import Path
        from safetensors.torch import save_file
        from repro import __version__, papers
        from repro.core import files
        files.errno.ENOSPC = files.errno.EFBIG
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            with files.atomic(Path(sys.argv[1])) as temporary:
                save_file({"a": torch.zeros(100_000)}, temporary)
        except files.UserError as error:
            print(error)
    """
    path = tmp_path / "w.safetensors"
    words = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(files.ROOT)})
    assert done.stdout.startswith(f"{path}: the disk is full"), done.stderr
    assert everything(tmp_path) == []


def test_other_errors_pass(tmp_path):
    with pytest.raises(RuntimeError, match="os error 5"), atomic(tmp_path / "f"):
        raise RuntimeError("I/O error (os error 5)")
    assert everything(tmp_path) == []


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "a").write_text("x")
    for path in (tmp_path / "a" / "f", tmp_path / "a" / "b" / "f"):
        with pytest.raises(UserError, match="in its place"):
            write_text(path, "x")
    (tmp_path / "d").mkdir()
    with pytest.raises(UserError, match="in its place"):
        write_text(tmp_path / "d", "x")
    assert everything(tmp_path) == ["a"]


def test_readers_and_writers_at_once_never_see_a_part(tmp_path):
    path, texts = tmp_path / "f", [c * 200_000 for c in "abcd"]
    write_text(path, texts[0])
    seen, stop = set(), threading.Event()

    def write(text):
        for _ in range(15):
            write_text(path, text)

    def read():
        while not stop.is_set():
            seen.add(path.read_text())

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    reader = threading.Thread(target=read)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert seen and seen <= set(texts)
    assert everything(tmp_path) == ["f"]


def test_of_two_writers_the_second_waits_until_the_first_has_ended(tmp_path):
    path = tmp_path / "new" / "f"
    begun, events = threading.Event(), []

    def second():
        with files.one_at_a_time(path.with_name("another")):
            events.append("second")

    def first():
        with files.one_at_a_time(path):
            begun.set()
            waiting.join(0.1)
            events.append("first")
            raise KeyError

    waiting = threading.Thread(target=lambda: begun.wait() and second())
    waiting.start()
    with pytest.raises(KeyError):
        first()
    waiting.join()
    assert events == ["first", "second"] and everything(tmp_path) == []


def test_a_lock_where_no_folder_can_be(tmp_path):
    (tmp_path / "a").write_text("x")
    with pytest.raises(UserError, match="a/f: cannot be written, a file or folder is in its place"):
        with files.one_at_a_time(tmp_path / "a" / "f"):
            pass


def test_hashes_are_hex_digits_of_sha256(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    assert sha256(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert short_hash("abc") == "ba7816bf"
    assert short_hash("ä") == hashlib.sha256("ä".encode()).hexdigest()[:8]


def test_a_safetensors_file_is_written_through_it(tmp_path):
    with contextlib.ExitStack() as stack:
        save_file({"a": torch.arange(3)}, stack.enter_context(atomic(tmp_path / "w.safetensors")))
    assert everything(tmp_path) == ["w.safetensors"]


def test_a_reference_manager_can_read_the_citation():
    """The keys that CFF 1.2.0 requires, and people or entities as authors; cffconvert 2.0.0 said the rest is valid."""
    cited = yaml.safe_load((HOME / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["cff-version"] == "1.2.0" and cited["version"] == __version__ and cited["message"]
    assert [work["title"].lower() for work in cited["references"]] == [
        about.title.lower() for about in papers.ABOUT.values()
    ]
    for work, about in zip(cited["references"], papers.ABOUT.values()):
        assert work["type"] == "article" and work["url"] == f"https://arxiv.org/abs/{about.arxiv}"
        assert work["identifiers"] == [{"type": "other", "value": f"arXiv:{about.arxiv}"}]
        assert (work["year"], work["month"]) == (2000 + int(about.arxiv[:2]), int(about.arxiv[2:4]))
    for work in [cited, *cited["references"]]:
        assert work["title"] and work["authors"]
        for author in work["authors"]:
            assert set(author) in ({"name"}, {"family-names", "given-names"}) and all(map(str.strip, author.values()))
