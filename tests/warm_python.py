"""Run each command of the tests in a fork of a `python` that has imported torch.

    subprocess.run([warm_python(), "-m", "curry_train", "memory", "--model", "mlp"])

A new interpreter takes five seconds to import torch and its compiler, and the tests start a
hundred. A fork has its own folder, environment, arguments and streams, and has imported nothing of
the package or of a test. Do not use it for commands that are sent signals, because the process that
waits for the fork gets them. Proof: `python -m pytest tests/trainer/test_project.py`.
"""

import atexit
import functools
import json
import multiprocessing.process
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

READY = (
    "click",
    "jinja2",
    "numpy",
    "rich.progress",
    "rich.table",
    "torch",
    "torch._dynamo",
    "yaml",
)
READY += ("torch.distributed.checkpoint", "torch.distributed.fsdp")
# A command in this process has a temporary folder of its own, which it deletes at its end.
FOLDER_AT_IMPORT = tempfile.gettempdir()
ASKS = """
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    job = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(job).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(job)
    status = int(server.makefile().read() or 1)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@functools.cache
def warm_python():
    """Return the path of the command, which exists until this process ends."""
    # A socket's path must be short.
    folder = tempfile.TemporaryDirectory(prefix="warm", dir=FOLDER_AT_IMPORT)
    place, command = Path(folder.name) / "socket", Path(folder.name) / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-P", __file__, str(place)]
    server = subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", (
        "the process that forks a python for each command did not start"
    )
    (Path(folder.name) / "ask.py").write_text(ASKS)
    ask = [sys.executable, "-I", "-S", f"{folder.name}/ask.py", str(place)]
    command.write_text(f'#!/bin/sh\nexec {shlex.join(ask)} "$@"\n')
    command.chmod(0o755)

    def end(owner: int = os.getpid()):
        if os.getpid() == owner:
            server.kill()
            server.communicate()
            folder.cleanup()

    atexit.register(end)
    return str(command)


def start_warm(monkeypatch):
    """Let what the package starts be forks of a python that has imported torch."""
    monkeypatch.setattr(sys, "executable", warm_python())


class WarmPython:
    """A path like that of `warm_python`, which starts the forking process at its first use."""

    def __fspath__(self):
        return warm_python()


def serve(place):
    """Fork for each request and return in the fork; end with the process that started it."""
    import gc
    import importlib

    owner = os.getppid()
    for name in READY:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen()
        listening.settimeout(5)
        print("ready", flush=True)
        while os.getppid() == owner:
            try:
                asked, _ = listening.accept()
            except TimeoutError:
                continue
            with asked:
                if os.fork() == 0:
                    listening.close()
                    return _take(asked, place)
    os._exit(0)


def _take(asked, place):
    """Fork: one process waits and answers, the other runs the requested command."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asked.settimeout(None)
    size, streams, _, _ = socket.recv_fds(asked, 8, 3)
    with asked.makefile("rb") as lines:
        words, folder, environment = json.loads(lines.read(int.from_bytes(size, "big")))
    if process := os.fork():
        for stream in (*streams, 0, 1, 2):
            os.close(stream)
        _answer(asked, process)
    asked.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = (
        folder  # a spawned process looks for the script from here
    )
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = words
    sys.executable = str(Path(place).with_name("python"))  # for processes that it starts
    sys.orig_argv[:] = [sys.executable, *words]


def _answer(asked, process):
    """Send the exit status of a fork; kill the fork if the process that waits for it ends."""
    asked.setblocking(False)
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        if select.select([asked], [], [], 0.01)[0]:
            os.kill(process, signal.SIGKILL)
            os._exit(0)
    asked.sendall(str(os.waitstatus_to_exitcode(ended[1])).encode())
    os._exit(0)


def run(words):
    """Run a file, `-m module` or `-c text` with its arguments, as the interpreter does."""
    import runpy
    import types

    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    file = words[0]
    if file in ("-m", "-c"):
        (option, what), sys.argv[:] = words[:2], [file, *words[2:]]
        sys.path[:0] = [str(Path.cwd()) if option == "-m" else "", *paths]
        if option == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), vars(main))  # noqa: S102 - a test's own text
    else:
        assert not file.startswith("-"), f"{file}: a file, -m or -c is run here"
        sys.path[:0] = [str(Path(file).resolve().parent), *paths]
        runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
    run(sys.argv[:])
