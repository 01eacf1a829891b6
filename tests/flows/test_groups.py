"""Of several errors at once the one that matters comes out."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from forge_bridge.groups import first_error, for_each
from forge_core.errors import HubConnectionLost

BUG, LOST = AssertionError("a bug"), HubConnectionLost("the hub went away")


async def fail(error: Exception) -> None:
    raise error


async def fail_at_once(errors: Sequence[Exception]) -> None:
    with first_error():
        async with anyio.create_task_group() as tasks:
            for error in errors:
                tasks.start_soon(fail, error)


@pytest.mark.parametrize("errors", [(BUG, LOST), (LOST, BUG)])
async def test_a_bug_is_never_taken_for_an_expected_error(errors: Sequence[Exception]) -> None:
    with pytest.raises(AssertionError, match="a bug"):
        await fail_at_once(errors)


async def test_an_expected_error_comes_out_as_it_is() -> None:
    with pytest.raises(HubConnectionLost) as caught:
        await fail_at_once([LOST, HubConnectionLost("another")])
    assert caught.value is LOST


async def test_a_few_run_at_a_time_and_the_results_keep_their_order() -> None:
    running, most, go_on = 0, 0, anyio.Event()

    async def double(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            go_on.set()
        await go_on.wait()
        for _ in range(10 - number):
            await anyio.lowlevel.checkpoint()
        running -= 1
        return 2 * number

    assert await for_each(double, range(10), at_once=3) == tuple(range(0, 20, 2))
    assert most == 3
    assert await for_each(double, (), at_once=3) == ()


async def test_the_first_error_of_many_ends_them_all() -> None:
    begun: list[Exception] = []

    async def fail_or_wait(error: Exception) -> None:
        begun.append(error)
        if error is not LOST:
            await anyio.sleep_forever()
        raise error

    with pytest.raises(HubConnectionLost):
        await for_each(fail_or_wait, [BUG, LOST, BUG], at_once=2)
    assert begun == [BUG, LOST]
