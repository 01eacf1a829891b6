"""What is said with PID 1 of a service: bounded, masked, and believed only so far."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import cast

import pytest

from forge_bridge.images.tooling import ToolingTree
from forge_bridge.sandbox.services import _Service
from forge_bridge.sandbox.stage import StageContext, StageFailed
from forge_bridge.services.container import ServiceImage
from forge_bridge.services.images import WHOLE
from forge_bridge.services.process import LAST_WORDS, ServiceProcess
from forge_core.errors import EngineUnreachable
from forge_core.lease import Deadline
from forge_core.redaction import Masker
from forge_core.services import CATALOGUE, MAX_LINE_CHARACTERS
from forge_core.supervisor_frames import ProcessEnded
from forge_core.wire.codes import FailureCode, ServiceName

PASSWORD = "0123456789abcdef" * 2
ORDERS = b'{"type":"init"}\n'

pytestmark = pytest.mark.requirement("B-55")


class Container:
    """An attachment to a container that says what it is told to say."""

    def __init__(self, pieces: Iterable[tuple[int, bytes]], *, deaf: bool = False) -> None:
        self.sent: list[bytes] = []
        self._pieces = deque(pieces)
        self._deaf = deaf

    async def send(self, data: bytes) -> None:
        if self._deaf:
            raise EngineUnreachable("cannot write to the container: it is gone")
        self.sent.append(data)

    async def receive(self) -> tuple[int, bytes] | None:
        return self._pieces.popleft() if self._pieces else None


def frame(**fields: object) -> tuple[int, bytes]:
    return 1, json.dumps(fields).encode() + b"\n"


READY = frame(type="ready", version=1, pid=1)


def said(text: str, stream: str = "stdout") -> tuple[int, bytes]:
    return frame(type="log", stream=stream, text=text, droppedBytes=0)


def process(
    *pieces: tuple[int, bytes], orders: Callable[[], bytes] = lambda: ORDERS, deaf: bool = False
) -> tuple[ServiceProcess, Container]:
    container = Container(pieces, deaf=deaf)
    return ServiceProcess(container, orders, Masker((PASSWORD,))), container


async def test_orders_are_made_when_pid_1_is_ready_and_given_once() -> None:
    made = []

    def orders() -> bytes:
        made.append(True)
        return ORDERS

    one, container = process(READY, READY, said("hel"), said("lo\nmore\n"), orders=orders)
    assert made == []
    assert await one.first_line() == "hello"
    assert container.sent == [ORDERS]
    assert made == [True]


async def test_a_service_that_ends_says_how_and_what_its_last_words_were() -> None:
    pieces = (
        READY,
        said("cannot ", "stderr"),
        said("start\n", "stderr"),
        frame(type="exit", code=3),
        frame(type="exit", code=0),
    )
    one, _ = process(*pieces)
    assert await one.first_line() is None
    assert one.ended == ProcessEnded(3, None)
    assert one.ended.in_words == "ended with exit code 3"
    assert one.last_words == "cannot start"
    assert await one.first_line() is None


async def test_a_line_without_end_is_not_kept() -> None:
    chunk = said("x" * 1000)
    one, container = process(READY, *[chunk] * 50, frame(type="exit", code=0))
    assert await one.first_line() is None
    assert await container.receive() is not None, "it was read to its end"
    await one.until_end()
    assert len(one._line) < MAX_LINE_CHARACTERS + 2000
    assert one.ended is not None


async def test_no_part_of_a_password_is_in_the_last_words_however_they_are_cut() -> None:
    for cut in range(1, len(PASSWORD)):
        filler = "y " * (LAST_WORDS // 2 - 4)
        pieces = (
            said(f"a {PASSWORD[:cut]}", "stderr"),
            said(PASSWORD[cut:] + f" {filler}", "stderr"),
        )
        one, _ = process(READY, *pieces)
        await one.until_end()
        assert one.last_words.startswith(("a *** y", "***", "y"))
        assert len(one.last_words) <= LAST_WORDS
        assert not any(PASSWORD[at : at + 8] in one.last_words for at in range(24))


async def test_what_pid_1_itself_complains_of_is_kept_too() -> None:
    one, _ = process((2, b"forge-supervisor: cannot accept init\n"))
    await one.until_end()
    assert one.last_words == "forge-supervisor: cannot accept init"
    assert process()[0].last_words == "none"


async def test_a_deadline_that_pid_1_claims_is_noted_for_the_host_to_judge() -> None:
    one, _ = process(
        READY, frame(type="expired", which="lease"), frame(type="expired", which="idle")
    )
    await one.until_end()
    assert one.claimed is Deadline.LEASE


async def test_orders_that_nobody_takes_are_no_error_of_their_own() -> None:
    one, _ = process(READY, deaf=True)
    assert await one.first_line() is None
    assert "it is gone" in one.last_words


async def test_what_is_no_frame_changes_nothing() -> None:
    one, container = process(
        (1, b"\xff\xfe{}\n[]\n" + b"z" * 200_000), (1, b"\n"), READY, said("a\n")
    )
    assert await one.first_line() == "a"
    assert container.sent == [ORDERS]


def test_orders_that_are_too_large_name_the_service() -> None:
    """What an image says of where its programs are is the image's."""
    lease = SimpleNamespace(key=bytes(32), sequence=0, deadline_ms=60_000)
    run = SimpleNamespace(state=SimpleNamespace(lease=lease), renewal_takers=[])
    context = SimpleNamespace(
        run=run,
        start=SimpleNamespace(attempt_id="att-1", fence=1),
        settings=SimpleNamespace(kill_grace_ms=1_000),
        runner=SimpleNamespace(clock=SimpleNamespace(now_ms=lambda: 0)),
        network=SimpleNamespace(environment={}),
    )
    image = ServiceImage.from_inspect(
        "image", {"Id": "id", "Config": {"Env": ["PATH=" + "/bin:" * 300_000]}}
    )
    service = _Service(
        cast("StageContext", context),
        CATALOGUE[ServiceName.REDIS],
        PASSWORD,
        CATALOGUE[ServiceName.REDIS].share(WHOLE),
        ToolingTree("volume", ("python3",)),
    )
    with ExitStack() as renewed, pytest.raises(StageFailed) as failed:
        service._orders(image, renewed)
    assert failed.value.code is FailureCode.SERVICE_NOT_READY
    assert str(failed.value).startswith("cannot start service redis of attempt att-1: ")
    assert "PATH 1500000" in str(failed.value)
    assert PASSWORD not in str(failed.value)
