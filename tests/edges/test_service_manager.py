"""What the service manager hears, on a socket of its kind (sd_notify(3))."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_edges.systemd import ServiceManager

pytestmark = pytest.mark.requirement("B-43")

PID = 42


@pytest.fixture(params=["path", "abstract"])
def ear(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """The address as ``NOTIFY_SOCKET`` has it, and the socket behind it."""
    abstract = f"forge-bridge-test-{os.getpid()}"
    name = str(tmp_path / "notify") if request.param == "path" else f"@{abstract}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name if request.param == "path" else f"\0{abstract}")
        listener.settimeout(5)
        yield name, listener


def test_each_message_is_one_datagram(ear: tuple[str, socket.socket]) -> None:
    name, listener = ear
    manager = ServiceManager.from_environment({"NOTIFY_SOCKET": name}, PID)
    manager.ready()
    manager.alive()
    manager.stopping(90_000)
    assert [listener.recv(4096) for _ in range(3)] == [
        b"READY=1",
        b"WATCHDOG=1",
        b"STOPPING=1\nEXTEND_TIMEOUT_USEC=90000000",
    ]


@pytest.mark.parametrize(
    ("environment", "watchdog_ms"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30_000),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "42"}, 30_000),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "43"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_the_watchdog_is_for_the_process_that_it_names(
    environment: dict[str, str], watchdog_ms: int | None
) -> None:
    told = {"NOTIFY_SOCKET": "/nobody", **environment}
    assert ServiceManager.from_environment(told, PID).watchdog_ms == watchdog_ms


@pytest.mark.parametrize("address", [None, "", "vsock:2:1", "relative", "/no/such/socket"])
def test_where_nobody_listens_nothing_happens(address: str | None) -> None:
    told = {} if address is None else {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"}
    manager = ServiceManager.from_environment(told, PID)
    manager.ready()
    manager.alive()
    manager.stopping(1_000)


def test_a_manager_that_does_not_read_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "notify"))
        manager = ServiceManager(str(tmp_path / "notify"))
        for _ in range(2_000):
            manager.alive()
