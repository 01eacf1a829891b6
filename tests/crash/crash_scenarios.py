"""What a bridge goes through while a point is waited for.

Each brings a runner that is online and idle to where its part begins, calls ``arm``, sets the
part off, and returns the session, whether or not the bridge is still there.
"""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable
from typing import Protocol

from crash_parts import AGENT, UNTIL_ENDED, CrashRig, Outcome, files, kill_agent

from rig import wait_for

Scenario = Callable[[CrashRig, "Arm"], str]


class Arm(Protocol):
    """From here on points count; more orders of ``bridge_at_fault.py`` may be given."""

    def __call__(self, **orders: object) -> None: ...


def succeeds(rig: CrashRig, arm: Arm) -> str:
    """From the offer to the last acknowledgement, with one commit as output."""
    arm()
    return rig.dispatch(*AGENT)


def builds(rig: CrashRig, arm: Arm) -> str:
    """Likewise, in an image that has to be built first; PID 1's own tree is made as well."""
    _without_tooling(rig)
    dockerfile = f"FROM {rig.engine.busybox_image}\nUSER root\nRUN echo {uuid.uuid4()} > /made\n"
    contract = "version: 1\nimage:\n  dockerfile: .forge/Dockerfile\n"
    approved = rig.add_commit(
        {".forge/forge.sandbox.yml": contract, ".forge/Dockerfile": dockerfile}
    )
    arm()
    return rig.dispatch(*AGENT, approvedCommit=approved)


def runs_on_host(rig: CrashRig, arm: Arm) -> str:
    """From the offer to the last acknowledgement, without a container."""
    arm()
    return rig.dispatch_on_host("echo begun; echo changed > VERSION")


def recovers_on_host(rig: CrashRig, arm: Arm) -> str:
    """The bridge was killed while an agent ran on the host, and starts again."""
    _without_tooling(rig)
    session_id = rig.dispatch_on_host("echo begun; exec sleep 600")
    rig.wait_event(session_id, "agent.started")
    wait_for("an empty outbox", lambda: not files(rig, "outbox"))
    rig.bridge.kill()
    arm()
    rig.launch()
    return session_id


def has_a_network(rig: CrashRig, arm: Arm) -> str:
    """Likewise, in a network of its own; the kind makes no difference here."""
    arm()
    return rig.dispatch(*AGENT, network={"policy": "open_public"})


def is_cancelled(rig: CrashRig, arm: Arm) -> str:
    """Cancelled while the agent runs."""
    session_id = _running(rig)
    arm()
    rig.post(f"/sessions/{session_id}/cancel", {"reason": "enough"})
    return session_id


def expires(rig: CrashRig, arm: Arm) -> str:
    """The decision gets lost, so no start comes, and the reservation runs out."""
    arm(lose="SubmitOfferDecision")
    session_id = rig.dispatch(*AGENT)
    wait_for("a ledger", lambda: files(rig, "attempts") or rig.has_ended())
    owed = ("attempts", "outbox")
    wait_for("the end of the reservation", lambda: not files(rig, *owed) or rig.has_ended())
    rig.disarm()  # the hub offers it again, and that may go well
    return session_id


def recovers(rig: CrashRig, arm: Arm) -> str:
    """The bridge was killed while an agent ran, and starts again."""
    _without_tooling(rig)
    session_id = _running(rig)
    rig.bridge.kill()
    arm()
    rig.launch()
    return session_id


def finds(rig: CrashRig, arm: Arm) -> str:
    """What an engine was late to create turns up after all was over; no ledger tells of it."""
    _without_tooling(rig)
    session_id = rig.dispatch(*AGENT)
    rig.wait_over(session_id)
    wait_for("nothing to be owed", lambda: not files(rig, "attempts", "outbox", "cleanup-reports"))
    rig.bridge.kill()
    rig.create_late(session_id)
    arm()
    rig.launch()
    return session_id


def replays(rig: CrashRig, arm: Arm) -> str:
    """An attempt ended without the hub; its messages wait in the outbox of the next life."""
    _without_tooling(rig)
    session_id = _running(rig)
    rig.hub.signal(signal.SIGSTOP)
    try:
        kill_agent(rig)
        wait_for("the end of the attempt", lambda: not files(rig, "attempts"))
        rig.bridge.kill()
    finally:
        rig.hub.signal(signal.SIGCONT)
    assert files(rig, "outbox")
    arm()
    rig.launch()
    return session_id


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        succeeds,
        builds,
        has_a_network,
        is_cancelled,
        expires,
        recovers,
        finds,
        replays,
        runs_on_host,
        recovers_on_host,
    )
}

OUTCOMES: dict[str, Outcome] = {
    "succeeds": ("succeeded", None),
    "builds": ("succeeded", None),
    "has_a_network": ("succeeded", None),
    "is_cancelled": ("cancelled", "cancelled"),
    "expires": ("failed", "start_timeout"),
    "recovers": ("failed", "bridge_stopped"),
    "finds": ("succeeded", None),
    "replays": ("failed", "supervisor_lost"),
    "runs_on_host": ("succeeded", None),
    "recovers_on_host": ("failed", "bridge_stopped"),
}
"""How the first dispatch ends where nothing is killed but what the scenario itself kills."""


def _without_tooling(rig: CrashRig) -> None:
    """What an earlier test has made for PID 1 goes with its bridge, not with the one that dies."""
    if rig.has_tooling():
        rig.bridge.stop()
        rig.come_online()


def _running(rig: CrashRig) -> str:
    session_id = rig.dispatch(*UNTIL_ENDED)
    rig.agent_runs(session_id)
    return session_id


def _is_dead(rig: CrashRig) -> bool:
    return rig.bridge.process.poll() is not None
