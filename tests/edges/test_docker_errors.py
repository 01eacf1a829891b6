"""The one table from the engine's and the libraries' failures to typed errors."""

from __future__ import annotations

import errno
import socket

import anyio
import docker.errors
import pytest
import requests
import urllib3

from forge_core.errors import (
    EngineConflict,
    EngineNotFound,
    EngineOutOfDisk,
    EngineRefused,
    EngineSubnetTaken,
    EngineTimedOut,
    EngineUnreachable,
    ForgeError,
    RetryableError,
)
from forge_edges.docker_errors import from_status, short, translated


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (404, "No such container: x", EngineNotFound),
        (409, "Conflict. The container name is already in use", EngineConflict),
        (409, "removal of container x is already in progress", EngineConflict),
        (403, "error while removing network: network n has active endpoints", EngineConflict),
        (403, "Pool overlaps with other one on this address space", EngineSubnetTaken),
        (403, "conflicts with network a (b): networks have overlapping IPv4", EngineSubnetTaken),
        (403, "operation not permitted", EngineRefused),
        (400, "OCI runtime create failed: exec: no such file or directory", EngineRefused),
        (500, "Decoding seccomp profile failed", EngineRefused),
        (500, "write /x: no space left on device", EngineOutOfDisk),
        (400, "mkdir /var/lib/docker/x: disk quota exceeded", EngineOutOfDisk),
        (503, "", EngineUnreachable),
        (500, "context deadline exceeded", EngineTimedOut),
        (500, "connection error: desc = error while dialing: dial unix", EngineUnreachable),
        (418, "", EngineRefused),
    ],
)
def test_status_and_text_decide(status: int, text: str, kind: type[ForgeError]) -> None:
    error = from_status("start container c", status, text)
    assert type(error) is kind
    assert str(error).startswith("cannot start container c: ")


@pytest.mark.requirement("B-84")
@pytest.mark.parametrize(
    ("status", "text"),
    [
        (404, "could not find an available, non-overlapping IPv4 address pool among the defaults"),
        (400, "all predefined address pools have been fully subnetted"),
    ],
)
def test_no_subnet_left_is_not_called_not_found(status: int, text: str) -> None:
    error = from_status("create network n", status, text)
    assert type(error) is EngineRefused
    assert "default-address-pools" in str(error)


def test_what_the_engine_says_is_one_bounded_line() -> None:
    error = from_status("start container c", 500, "a\r\nb\x0bc" + "x" * 10_000)
    assert "\n" not in str(error)
    assert len(str(error)) < 600


def nested(cause: BaseException) -> requests.exceptions.ConnectionError:
    return requests.exceptions.ConnectionError(
        urllib3.exceptions.ProtocolError("Connection aborted.", cause)
    )


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (requests.exceptions.ReadTimeout("read"), EngineTimedOut, "may still"),
        (requests.exceptions.ConnectTimeout("connect"), EngineTimedOut, "may still"),
        (nested(TimeoutError("timed out")), EngineTimedOut, "may still"),
        (requests.exceptions.ConnectionError("Read timed out."), EngineTimedOut, "may still"),
        (nested(FileNotFoundError(2, "No such file")), EngineUnreachable, "nothing listens"),
        (nested(ConnectionRefusedError(111, "refused")), EngineUnreachable, "nothing listens"),
        (nested(PermissionError(13, "denied")), EngineUnreachable, "may not open"),
        (nested(ConnectionResetError(104, "reset")), EngineUnreachable, "connection"),
        (requests.exceptions.ChunkedEncodingError("broken"), EngineUnreachable, "broke"),
        (socket.gaierror(errno.ENOENT, "no such host"), EngineUnreachable, "connection"),
        (anyio.EndOfStream(), EngineUnreachable, "EndOfStream"),
        (anyio.BrokenResourceError(), EngineUnreachable, "BrokenResource"),
        (TimeoutError(), EngineTimedOut, "may still"),
        (ValueError("no JSON"), EngineUnreachable, "not the Docker Engine API"),
        (docker.errors.DockerException("odd"), EngineRefused, "odd"),
    ],
)
def test_library_errors_are_translated(
    raised: Exception, kind: type[ForgeError], words: str
) -> None:
    expected = pytest.raises(kind, match=f"cannot list volumes: .*{words}")
    with expected as error, translated("list volumes"):
        raise raised
    assert error.value.__cause__ is raised


def test_only_what_may_succeed_later_is_retryable() -> None:
    retryable = {EngineOutOfDisk, EngineTimedOut, EngineUnreachable}
    for kind in (EngineConflict, EngineNotFound, EngineRefused, *retryable):
        assert issubclass(kind, RetryableError) == (kind in retryable)


def test_our_own_errors_and_bugs_pass_unchanged() -> None:
    original = EngineConflict("taken")
    with pytest.raises(EngineConflict) as error, translated("do it"):
        raise original
    assert error.value is original
    with pytest.raises(AssertionError), translated("do it"):
        raise AssertionError


def test_ids_are_shortened_and_names_are_not() -> None:
    assert short("ab" * 32) == "ab" * 6
    assert short("forge-agent-0123") == "forge-agent-0123"
