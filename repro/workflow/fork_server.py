"""A process that imports torch and transformers once per build and forks for each job and table.

`make` starts it beside Snakemake and names its socket in the environment; what Snakemake starts (`script.py`) hands its
work over with its own output and environment, and waits. Where there is no server, as under plain `snakemake`, the work
is done in the process that asks. Whoever asks may be killed: its fork ends with it.
"""

import contextlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from repro.core.files import ROOT

VARIABLE = "REPRO_FORK_SERVER"  # the socket's path
ONCE = ("repro.workflow.runner", "repro.render.draw", "transformers.models.llama.modeling_llama")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def call(work: str, arguments: Sequence[str]) -> None:
    """Do `work`, a `module:function` of string arguments, in a fork of the server, or here if there is none.

    Raises:
        SystemExit: as the work raises it.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            server.connect(os.environ[VARIABLE])
            facts = json.dumps([work, list(arguments), dict(os.environ)]).encode()
            socket.send_fds(server, [len(facts).to_bytes(8, "big")], [1, 2])
            server.sendall(facts)
        except (KeyError, OSError):
            return _do(work, arguments)
        answer = server.recv(1)
    if not answer:
        sys.exit(f"error: {work}: its process was killed; out of memory?")
    if answer != b"\0":
        sys.exit(answer[0])


def _do(work: str, arguments: Sequence[str]) -> None:
    pkgutil.resolve_name(work)(*arguments)


@contextlib.contextmanager
def running() -> Iterator[dict[str, str]]:
    """A server for the block; yields the variable that names it."""
    with tempfile.TemporaryDirectory() as folder:  # short: a socket's path has at most 107 bytes
        path = str(Path(folder) / "socket")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path)
        listening.listen(64)
        env = os.environ | dict.fromkeys(THREADS, "1")  # torch's are the job's own, set in the fork
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        words = [sys.executable, "-m", "repro.workflow.fork_server", str(listening.fileno())]
        given = {"stdin": subprocess.PIPE, "pass_fds": (listening.fileno(),), "start_new_session": True}
        with listening, subprocess.Popen(words, env=env, **given) as server:
            try:
                yield {VARIABLE: path}
            finally:
                server.kill()


def serve(listening: socket.socket) -> None:
    """Fork for each that connects, until standard input ends, as it does when `make` is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        client, _ = listening.accept()
        for module in ONCE:  # the first time; whoever builds nothing does not pay for it
            pkgutil.resolve_name(module)
        if os.fork() == 0:
            listening.close()
            os._exit(_serve_one(client))
        client.close()


def _serve_one(client: socket.socket) -> int:
    """What a fork does: the work that a client asks for, with its output and environment; tells it the exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, descriptors, _, _ = socket.recv_fds(client, 8, 2)
    for to, given in enumerate(descriptors, start=1):
        os.dup2(given, to)
    with client.makefile("rb") as lines:
        work, arguments, env = json.loads(lines.read(int.from_bytes(size, "big")))
    os.environ.clear()
    os.environ.update(env)
    threading.Thread(target=_end_with, args=(client,), daemon=True).start()
    try:
        _do(work, arguments)
        code = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    client.sendall(bytes([code]))
    return code


def _end_with(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        client.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
