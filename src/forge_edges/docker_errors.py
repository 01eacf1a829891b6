"""What the Docker Engine and its SDK say when they fail, in our words.

The one table from HTTP status, engine text and library exception to the typed errors of
:mod:`forge_core.errors`.  Statuses are those of the Engine API reference (1.41, 1.45); where
the engine's status misleads, the text decides, and the line says since when it was seen.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import requests
from docker.errors import APIError, DockerException

from forge_core.errors import (
    EngineConflict,
    EngineNotFound,
    EngineOutOfDisk,
    EngineRefused,
    EngineSubnetTaken,
    EngineTimedOut,
    EngineUnreachable,
    ForgeError,
)

_MAX_TEXT: Final = 500
_FULL_ID: Final = re.compile(r"[0-9a-f]{64}")
_NO_SUBNET: Final = (
    # Status 404 from 20.10 and 26.1, 400 from 28: neither says that a pool ran dry.
    "non-overlapping ipv4 address pool",
    "all predefined address pools have been fully subnetted",
)
_SUBNET_TAKEN: Final = (
    # Status 403 from 20.10 and 26.1: the first of its allocator, the second of its bridge driver.
    "pool overlaps with other one",
    "networks have overlapping ipv4",
)


def from_status(what: str, status: int, text: str) -> ForgeError:
    """The error for an answer of the engine.

    :param what: what was wanted, as in "cannot <what>".
    :param text: the engine's own ``message``; cut and put on one line.
    """
    said = " ".join(text.split())[:_MAX_TEXT] or f"the engine answered {status} without a word"
    lower = said.lower()
    message = f"cannot {what}: {said}"
    if "no space left on device" in lower or "disk quota exceeded" in lower:
        return EngineOutOfDisk(message)
    if any(words in lower for words in _NO_SUBNET):
        return EngineRefused(
            f"{message}; the engine's address pools are used up: remove networks, or configure "
            "default-address-pools with smaller subnets"
        )
    if any(words in lower for words in _SUBNET_TAKEN):
        return EngineSubnetTaken(message)
    match status:
        case 404:
            return EngineNotFound(message)
        case 409:
            return EngineConflict(message)
        case 403 if "active endpoints" in lower:
            return EngineConflict(message)
        case 503:
            return EngineUnreachable(message)
        case 500 if "context deadline exceeded" in lower:
            return EngineTimedOut(message)
        case 500 if "error while dialing" in lower or "ttrpc: closed" in lower:
            # The engine is there, its containerd or the container's shim is not.
            return EngineUnreachable(message)
        case _:
            return EngineRefused(message)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn whatever the SDK, requests or a socket raises into our errors.

    :param what: what is being done, as in "cannot <what>".
    """
    try:
        yield
    except ForgeError:
        raise
    except APIError as error:
        raise from_status(what, error.status_code or 0, str(error.explanation or "")) from error
    except (requests.exceptions.Timeout, TimeoutError) as error:
        raise timed_out(what) from error
    except (
        requests.exceptions.RequestException,
        OSError,
        ssl.SSLError,
        anyio.BrokenResourceError,
        anyio.ClosedResourceError,
        anyio.EndOfStream,
        anyio.IncompleteRead,
        anyio.DelimiterNotFound,
    ) as error:
        raise _broken(what, error) from error
    except DockerException as error:
        raise EngineRefused(f"cannot {what}: {error}") from error
    except ValueError as error:
        raise EngineUnreachable(
            f"cannot {what}: what answers is not the Docker Engine API: {error}"
        ) from error


def short(container: str) -> str:
    """A name as it is, a full id as people write it."""
    return container[:12] if _FULL_ID.fullmatch(container) else container


def timed_out(what: str) -> EngineTimedOut:
    """No answer in time; an effect may still follow."""
    return EngineTimedOut(
        f"cannot {what}: the engine did not answer in time; it may still do so later"
    )


def _broken(what: str, error: BaseException) -> ForgeError:
    # requests and urllib3 wrap the cause several layers deep, in arguments as well as in causes.
    for cause in _causes(error):
        if isinstance(cause, TimeoutError):
            return timed_out(what)
        if isinstance(cause, PermissionError):
            return EngineUnreachable(
                f"cannot {what}: this account may not open the engine's socket ({cause}); run "
                "the engine rootless under this account"
            )
        if isinstance(cause, (FileNotFoundError, ConnectionRefusedError)):
            return EngineUnreachable(
                f"cannot {what}: nothing listens at the engine's endpoint ({cause}); start it: "
                "systemctl --user start docker, or without --user where it is the system's"
            )
    if "timed out" in str(error):
        return timed_out(what)
    reason = str(error) or type(error).__name__
    return EngineUnreachable(f"cannot {what}: the connection to the engine broke: {reason}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    todo: list[object] = [error]
    while todo and len(seen) < 32:
        item = todo.pop(0)
        if not isinstance(item, BaseException) or item in seen:
            continue
        seen.append(item)
        yield item
        todo += [item.__cause__, item.__context__, getattr(item, "reason", None), *item.args]
