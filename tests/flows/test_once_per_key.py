"""Many want the same: one works, and nobody waits for ever."""

from __future__ import annotations

import anyio
import pytest

from forge_bridge.images.once import OncePerKey
from forge_core.errors import RefusedError


class Work:
    """Counts its runs; ends when it is told to."""

    def __init__(self) -> None:
        self.runs = 0
        self.started = anyio.Event()
        self.may_end = anyio.Event()
        self.failure: Exception | None = None

    async def __call__(self) -> int:
        self.runs += 1
        self.started.set()
        await self.may_end.wait()
        if self.failure is not None:
            raise self.failure
        return self.runs


async def until_waiting(tasks: int) -> None:
    """Give each of them the chance to come as far as it can."""
    for _ in range(2 * tasks):
        await anyio.lowlevel.checkpoint()


async def test_all_get_what_one_has_worked_for() -> None:
    once: OncePerKey[int] = OncePerKey()
    work, got = Work(), []

    async def want() -> None:
        got.append(await once.run("key", work))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(want)
        await until_waiting(5)
        work.may_end.set()
    assert sorted(got) == [(1, False)] * 4 + [(1, True)]
    assert await once.run("key", work) == (2, True)


async def test_other_keys_do_not_wait() -> None:
    once: OncePerKey[int] = OncePerKey()
    slow, quick = Work(), Work()
    quick.may_end.set()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(once.run, "slow", slow)
        await slow.started.wait()
        with anyio.fail_after(5):
            assert await once.run("quick", quick) == (1, True)
        slow.may_end.set()


async def test_a_failure_is_everybodys_and_is_not_tried_again_by_each() -> None:
    once: OncePerKey[int] = OncePerKey()
    work, failed = Work(), []
    work.failure = RefusedError("no", code="no")

    async def want() -> None:
        with pytest.raises(RefusedError) as error:
            await once.run("key", work)
        failed.append(error.value)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(want)
        await until_waiting(3)
        work.may_end.set()
    assert failed == [work.failure] * 3
    assert work.runs == 1
    work.failure = None
    assert await once.run("key", work) == (2, True)


async def test_the_next_one_works_when_the_first_is_cancelled() -> None:
    once: OncePerKey[int] = OncePerKey()
    work, got = Work(), []
    first = anyio.CancelScope()

    async def give_up() -> None:
        with first:
            await once.run("key", work)

    async def want() -> None:
        got.append(await once.run("key", work))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(give_up)
        await work.started.wait()
        tasks.start_soon(want)
        tasks.start_soon(want)
        await until_waiting(2)
        first.cancel()
        await until_waiting(3)
        assert work.runs == 2
        work.may_end.set()
    assert sorted(got) == [(2, False), (2, True)]


async def test_one_who_waits_can_leave() -> None:
    once: OncePerKey[int] = OncePerKey()
    work = Work()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(once.run, "key", work)
        await work.started.wait()
        with anyio.move_on_after(0.01) as waiting:
            await once.run("key", work)
        assert waiting.cancelled_caught
        work.may_end.set()
    assert work.runs == 1


async def test_a_claimed_key_is_waited_for_and_then_worked_on() -> None:
    once: OncePerKey[int] = OncePerKey()
    work, got = Work(), []
    work.may_end.set()

    async def want() -> None:
        got.append(await once.run("key", work))

    async with anyio.create_task_group() as tasks:
        with once.claimed("key") as is_ours:
            assert is_ours
            tasks.start_soon(want)
            await until_waiting(1)
            assert work.runs == 0
            with once.claimed("key") as twice:
                assert not twice
    assert got == [(1, True)]


async def test_what_somebody_works_on_cannot_be_claimed() -> None:
    once: OncePerKey[int] = OncePerKey()
    work = Work()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(once.run, "key", work)
        await work.started.wait()
        with once.claimed("key") as is_ours:
            assert not is_ours
        work.may_end.set()
