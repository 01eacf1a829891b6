"""Runs in a container: what programs in Python do all day.  Prints ``worked``."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import fcntl
import hashlib
import mmap
import multiprocessing
import os
import pathlib
import signal
import socket
import sqlite3
import subprocess
import tempfile
import threading
import time
import zlib


def square(number: int) -> int:
    return number * number


async def talk() -> bytes:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readline()).upper())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"hello\n")
    said = await reader.readline()
    writer.close()
    server.close()
    child = await asyncio.create_subprocess_exec("/bin/true")
    assert await child.wait() == 0
    return said


def main() -> None:
    work = pathlib.Path(tempfile.mkdtemp())
    (work / "a").write_bytes(os.urandom(100_000))
    os.symlink("a", work / "link")
    os.link(work / "a", work / "hard")
    os.mkfifo(work / "fifo")
    os.chmod(work / "a", 0o600)
    os.utime(work / "a", (1, 1))
    with (work / "a").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with mmap.mmap(file.fileno(), 0) as view:
            zlib.crc32(hashlib.sha256(view).digest())
    assert (
        subprocess.run(
            ["sh", "-c", "sleep 0.01 && echo x | cat"], check=True, capture_output=True
        ).stdout
        == b"x\n"
    )
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(square, range(50))) == 40_425
    with multiprocessing.Pool(2) as processes:
        assert processes.map(square, range(10))[-1] == 81
    assert asyncio.run(talk()) == b"HELLO\n"
    with sqlite3.connect(work / "db") as database:
        database.execute("pragma journal_mode=wal")
        database.execute("create table t (x)")
        database.executemany("insert into t values (?)", [(n,) for n in range(1000)])
    left, right = socket.socketpair()
    left.sendall(b"x")
    assert right.recv(1) == b"x"
    assert socket.if_nameindex()
    assert socket.getaddrinfo("localhost", 80)
    caught = threading.Event()
    signal.signal(signal.SIGALRM, lambda *_: caught.set())
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    while not caught.is_set():
        time.sleep(0.01)
    os.close(os.memfd_create("x"))
    os.close(os.pidfd_open(os.getpid()))
    os.sched_setaffinity(0, os.sched_getaffinity(0))
    assert ctypes.CDLL(None).getpid() == os.getpid()
    print("worked", flush=True)


if __name__ == "__main__":
    main()
