"""What can be reached from the agent's network, printed as one line of JSON.

Not imported by anything: the bridge runs this file's text as PID 1 of a container in that network
(``python3 -I -S -c``).  Standard library of Python 3.9 and later.  One argument, in JSON:
``proxy`` [host, port]; ``refused``, a name that it must not let through; ``public``, one that the
engine's resolver must not know; ``addresses``, where nobody must be; ``waitS``, how long the proxy
may take until it answers.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PAUSE_S = 0.02
ANSWER_S = 10.0
REACH_S = 1.5
RESOLVER = ("127.0.0.11", 53)
RTF_GATEWAY = 2
TYPE_A, TYPE_TXT = 1, 16


def ask_proxy(proxy: tuple[str, int], line: str) -> int:
    """The status with which the proxy answers a request; 0: it does not."""
    try:
        with socket.create_connection(proxy, ANSWER_S) as connection:
            connection.settimeout(ANSWER_S)
            connection.sendall(f"{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            answer = connection.recv(64).split()
            return int(answer[1])
    except (OSError, IndexError, ValueError):
        return 0


def until_it_answers(proxy: tuple[str, int], line: str, wait_s: float) -> int:
    """Ask until there is an answer, and give that."""
    give_up = time.monotonic() + wait_s
    while not (status := ask_proxy(proxy, line)) and time.monotonic() < give_up:
        time.sleep(PAUSE_S)
    return status


def is_there(address: tuple[str, int]) -> bool:
    """Whether somebody is at an address, be it to refuse."""
    try:
        socket.create_connection(address, REACH_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def gateways() -> list[str]:
    """The routes that lead to somewhere else (proc(5), /proc/net/route)."""
    lines = Path("/proc/net/route").read_text().splitlines()[1:]
    routes = (line.split() for line in lines)
    return [route[1] for route in routes if int(route[3], 16) & RTF_GATEWAY]


def answers_of_resolver(name: str, kind: int) -> int:
    """How many answers the engine's resolver gives to a question (RFC 1035, 4.1)."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    question = struct.pack(">6H", 1, 0x0100, 1, 0, 0, 0) + labels + struct.pack(">BHH", 0, kind, 1)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as resolver:
            resolver.settimeout(REACH_S)
            resolver.connect(RESOLVER)
            resolver.send(question)
            return int(struct.unpack(">H", resolver.recv(512)[6:8])[0])
    except (OSError, struct.error):
        return 0


def main() -> None:
    """Look at everything, and print."""
    orders = json.loads(sys.argv[1])
    proxy, refused, statuses = orders["proxy"], orders["refused"], {}
    if proxy is not None:
        host, port = proxy
        manager = f"http://{host}:{port}/squid-internal-mgr/info"
        statuses = {
            "a site": until_it_answers((host, port), f"GET http://{refused}/", orders["waitS"]),
            "a tunnel": ask_proxy((host, port), f"CONNECT {refused}:443"),
            "its manager": ask_proxy((host, port), f"GET {manager}"),
        }
    addresses = [(host, port) for host, port in orders["addresses"]]
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        there = list(pool.map(is_there, addresses))
    facts = {
        "statuses": statuses,
        "gateways": gateways(),
        "answers": [answers_of_resolver(orders["public"], kind) for kind in (TYPE_A, TYPE_TXT)],
        "reached": [f"{host}:{port}" for n, (host, port) in enumerate(addresses) if there[n]],
    }
    print(json.dumps(facts), flush=True)  # noqa: T201 - standard output is the answer


main()
