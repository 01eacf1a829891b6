"""Runs one command on the host and leaves no process of it behind.

``python3 -I -S -c <this source> COMMAND [ARGUMENT ...]``.  Being a subreaper
(PR_SET_CHILD_SUBREAPER, prctl(2)), it inherits whatever the command's processes leave, daemons
that made a session of their own included, and kills it all when the command has ended, when it
is told to stop (SIGTERM), or when its parent dies (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
EXIT_NOT_FOUND = 127
EXIT_NOT_EXECUTABLE = 126
EXIT_INTERNAL = 125
KILL_WAIT_S = 10.0


def prctl(option: int, value: int) -> None:
    """Raises OSError; see prctl(2)."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def descendants() -> list[int]:
    """Every process below this one, by /proc; as a subreaper nothing escapes from below."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    todo = list(children.get(os.getpid(), ()))
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, ())
    return found


def kill_all() -> None:
    """Kill and reap until nothing is left; a fork that races is found in the next round."""
    deadline = time.monotonic() + KILL_WAIT_S
    while time.monotonic() < deadline:
        remaining = descendants()
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.005)


def start(argv: list[str]) -> int:
    """The command in a session of its own, which alone has the standard input; returns its pid."""
    pid = os.fork()
    if pid:
        # A second reader would keep the writer waiting for one that has left.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return pid
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]}: {error.strerror}\n".encode())
        os._exit(EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE)
    except BaseException:
        os._exit(EXIT_INTERNAL)


def main(argv: list[str]) -> int:
    """Exit status of the command, or 128 plus the signal that ended it."""
    parent = os.getppid()
    watched = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return EXIT_INTERNAL
    pid = start(argv)
    status = None
    while status is None:
        if signal.sigwait(watched) is not signal.SIGCHLD:
            break
        try:
            while status is None:
                ended, code = os.waitpid(-1, os.WNOHANG)
                if ended == 0:
                    break
                if ended == pid:
                    status = os.waitstatus_to_exitcode(code)
        except ChildProcessError:
            break
    kill_all()
    if status is None:
        return 128 + signal.SIGTERM
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
