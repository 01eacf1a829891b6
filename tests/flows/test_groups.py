"""Of several errors at once the one that matters comes out."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from forge_bridge.groups import first_error
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
