"""The supervisor of an agent that runs on the host: the same frames, deadlines and ends.

``python3 -I -m forge_supervisor.host_agent``, as a child of the bridge.  There is no namespace
that ends with it, so it is a subreaper (prctl(2)): whatever the agent's processes leave, daemons
with a session of their own included, becomes its child and is killed with the rest.  It ends
everything at once when the bridge is gone, and its agent dies with it.

Nobody may gain privileges below it, so that the service account can always kill what it started.
Against the agent itself it has no wall: they are the same user (docs/explanation/threat-model.md).
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Final

from forge_supervisor import supervisor
from forge_supervisor.host_command import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    descendants,
    prctl,
)

MARK: Final = b"FORGE_HOST_RESOURCE"
"""By this variable, which only the bridge sets, it finds every process of a dispatch."""

PR_SET_NO_NEW_PRIVS: Final = 38


def harden() -> None:
    """Inherit what the agent leaves, gain nothing, and die with the bridge.

    :raises OSError: the kernel has refused.
    """
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    own_pid = os.getpid()
    os.register_at_fork(after_in_child=lambda: _die_with(own_pid))


def _die_with(parent: int) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(supervisor.EXIT_INTERNAL)


class HostSupervisor(supervisor.Supervisor):
    """Reaches its descendants, where PID 1 reaches everybody."""

    harden = staticmethod(harden)

    def _start(self, init: supervisor.Init, now: int) -> None:
        init.env[MARK] = os.environb.get(MARK, b"")
        super()._start(init, now)

    def _read_host(self, ready: set[int], now: int) -> None:
        super()._read_host(ready, now)
        if not self._host_open:
            self._cancel(0, now)

    def _look_for_sigterm(self, now: int) -> None:
        if signal.sigtimedwait([signal.SIGTERM], 0):
            self._cancel(0, now)

    def _signal_all(self, number: int) -> None:
        for pid in descendants():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


if __name__ == "__main__":
    supervisor.main(HostSupervisor)
