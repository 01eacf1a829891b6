"""What is read at once, and what in a worker thread."""

from __future__ import annotations

import threading

from forge_bridge.images import gates
from forge_bridge.off_loop import AT_ONCE_BYTES, off_loop
from forge_core.vulnerability_policy import MAX_POLICY_BYTES


async def test_little_is_read_at_once_and_more_in_a_worker_thread() -> None:
    here = threading.get_ident()
    assert await off_loop(threading.get_ident, AT_ONCE_BYTES) == here
    assert await off_loop(threading.get_ident, AT_ONCE_BYTES + 1) != here


def test_a_policy_file_is_never_read_on_the_event_loop() -> None:
    assert MAX_POLICY_BYTES > gates.AT_ONCE_BYTES
