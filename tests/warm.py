"""Runs `python -m …` and `python -c …` in forks of a process that has imported torch, transformers and Snakemake.

As a script it is that process; `run` starts it once in a pytest process. It imports nothing of this project: each
command is a process of its own with its own folder, environment and output, and imports the code that its PYTHONPATH
names. Only the seconds of importing the libraries are shared, which are most of a short command. What a build starts
(`STARTED`) is such a fork, too.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

LIBRARIES = (
    "transformers.models.llama.modeling_llama", "transformers.models.auto.tokenization_auto", "pandas", "scipy.stats",
    "triton.language.extra.cuda.libdevice", "pyarrow.parquet", "safetensors.torch", "snakemake.api", "snakemake.cli",
    "matplotlib.pyplot",
)  # fmt: skip

STARTED = ("snakemake",)  # modules that a build runs as processes of their own


@cache
def _server() -> subprocess.Popen:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    server = subprocess.Popen([sys.executable, __file__], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(server.communicate)  # closes its standard input, at which it ends
    return server


def run(words: Sequence[str], cwd: Path, env: Mapping[str, str], output: Path, timeout: float) -> int:
    """The exit code of `python WORDS`, whose stdout and stderr go to the files `out` and `err` in the folder `output`.

    Raises:
        TimeoutError, subprocess.TimeoutExpired: it took longer than `timeout` seconds, and was killed.
    """
    if not hasattr(os, "pidfd_open"):  # not Linux: each command imports for itself
        with open(output / "out", "wb") as out, open(output / "err", "wb") as err:
            words = [sys.executable, *words]
            return subprocess.run(words, cwd=cwd, env=dict(env), stdout=out, stderr=err, timeout=timeout).returncode
    request = {"words": list(words), "cwd": str(cwd), "env": dict(env), "output": str(output), "timeout": timeout}
    server = _server()
    server.stdin.write(json.dumps(request).encode() + b"\n")
    server.stdin.flush()
    code = json.loads(server.stdout.readline())
    if code is None:
        raise TimeoutError(f"{words} took longer than {timeout} seconds")
    return code


def serve() -> None:
    """Fork for each line of standard input until it ends, and write the exit code of each."""
    asking, telling, base = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w"), sys.path[1:]
    os.dup2(2, 1)  # what libraries print
    with contextlib.suppress(ImportError):  # triton is not everywhere
        for name in LIBRARIES:
            importlib.import_module(name)
    assert "repro" not in sys.modules
    libraries = frozenset(sys.modules)
    gc.freeze()  # collections of a fork would copy the pages of all that was imported
    for line in asking:
        request = json.loads(line)
        if (pid := os.fork()) == 0:
            asking.close()
            os.close(telling.fileno())
            _fork_what_is_started(base, libraries)
            os._exit(_fork(base, **request))
        done = select.select([watched := os.pidfd_open(pid)], [], [], request["timeout"])[0]
        os.close(watched)
        if not done:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps(code if done else None), file=telling, flush=True)


def _fork(base: list[str], words: list[str], cwd: str, env: dict[str, str], output: str, timeout: float) -> int:
    """What a fresh Python would do with its command line, to its exit code; tearing all modules down is left out."""
    for to, name in enumerate((os.devnull, f"{output}/out", f"{output}/err")):
        file = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(file, to)
        os.close(file)
    os.chdir(cwd)
    return _run(base, words, env)


def _fork_what_is_started(base: list[str], libraries: frozenset[str]) -> None:
    """Let `subprocess` fork where it would start a Python with a module of `STARTED`.

    The fork has the libraries, and imports everything else anew, so that whoever has registered operators with torch
    starts a process as ever.
    """
    true_fork_exec = subprocess._fork_exec

    def fork_exec(*arguments):
        args, _, _, kept, _, env, stdin, _, _, stdout, _, stderr, _, failed_start, _, own_session, *_ = arguments
        words = [os.fsdecode(word) for word in args][1:]
        registered = "repro.kernels.operators" in sys.modules  # torch takes an operator once a process
        if registered or words[:1] != ["-m"] or words[1] not in STARTED:
            return true_fork_exec(*arguments)
        if (pid := os.fork()) != 0:
            return pid
        for to, stream in enumerate((stdin, stdout, stderr)):
            if stream != -1:
                os.dup2(stream, to)
        for open_file in map(int, os.listdir("/proc/self/fd")):
            if open_file > 2 and (open_file not in kept or open_file == failed_start):
                with contextlib.suppress(OSError):
                    os.close(open_file)
        if own_session:
            os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        for name in set(sys.modules) - libraries - {"__main__"}:
            del sys.modules[name]
        os._exit(_run(base, words, dict(os.fsdecode(pair).split("=", 1) for pair in env)))

    subprocess._fork_exec = fork_exec


def _run(base: list[str], words: list[str], env: dict[str, str]) -> int:
    os.environ.clear()
    os.environ.update(env)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = env.get("PYTHONPYCACHEPREFIX")
    kind, what, *arguments = words
    code: object = None
    first = os.getcwd() if kind == "-m" else ""
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *base]
    sys.argv = [kind, *arguments]
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), vars(main))
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    serve()
