"""The supervisor on the host: the ends of PID 1 without a namespace that ends with it."""

from __future__ import annotations

import os
import select
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from pid1 import PATIENCE_S, Pid1, init_frame, lease_frame

import processes
from forge_supervisor.host_agent import MARK

pytestmark = pytest.mark.requirement("B-53")

SUPERVISOR = (sys.executable, "-I", "-m", "forge_supervisor.host_agent")
PARENT = "import subprocess, sys; subprocess.run(sys.argv[1:])"
DAEMONS = """
trap '' TERM HUP INT
setsid sh -c 'setsid sh -c "while :; do sleep 1; done" "$0" & exit' "$0" &
env -i setsid sh -c 'while :; do sleep 1; done' "$0" &
echo ready
"""
FOR_EVER = DAEMONS + "while :; do sleep 1; done"


class HostAgent(Pid1):
    """A supervisor of the host.

    :ivar sign: in the command line of every shell that its agent starts.
    """

    def __init__(self, *command: str) -> None:
        self.sign = uuid.uuid4().hex
        self._start([*command, *SUPERVISOR])

    @property
    def host_pid(self) -> int:
        return self.process.pid

    def run(self, script: str, **changes: Any) -> None:
        self.send(init_frame("sh", "-c", script, self.sign, **changes))

    def left(self) -> list[int]:
        """What still runs of the agent's."""
        return processes.saying(self.sign)


@pytest.fixture
def agent() -> Iterator[HostAgent]:
    agent = HostAgent("env", f"{MARK.decode()}=mark-1")
    yield agent
    agent.stop()
    assert agent.left() == []


def test_status_and_both_streams_are_told_apart(agent: HostAgent) -> None:
    agent.run("echo out; echo err >&2; exit 7")
    assert agent.end() == 0
    assert (agent.text(), agent.text("stderr")) == ("out\n", "err\n")
    assert agent.frames[-1] == {"type": "exit", "code": 7}


def test_the_agent_has_the_environment_of_its_orders_and_the_mark(agent: HostAgent) -> None:
    name = MARK.decode()
    agent.send(init_frame("env", env={"PATH": "/usr/bin:/bin", name: "forged"}))
    agent.end()
    assert sorted(agent.text().split()) == [f"{name}=mark-1", "PATH=/usr/bin:/bin"]


def test_nobody_below_it_gains_privileges(agent: HostAgent) -> None:
    agent.run("grep NoNewPrivs /proc/self/status")
    agent.end()
    assert agent.text().split() == ["NoNewPrivs:", "1"]


@pytest.mark.parametrize("last", ["true", "kill -9 $$"])
def test_what_the_agent_leaves_dies_with_it(agent: HostAgent, last: str) -> None:
    agent.run(DAEMONS + last)
    assert agent.end() == 0
    assert agent.left() == []


@pytest.mark.requirement("B-04")
def test_a_cancel_ends_the_whole_tree_after_the_grace(agent: HostAgent) -> None:
    agent.run(FOR_EVER)
    agent.wait_for_text("ready")
    agent.send({"type": "cancel", "graceMs": 200})
    assert agent.end() == 73
    assert agent.left() == []


@pytest.mark.requirement("B-71")
@pytest.mark.parametrize(
    ("deadline", "code", "which"),
    [("leaseMs", 70, "lease"), ("hardWallMs", 71, "hardWall"), ("idleMs", 72, "idle")],
)
def test_its_own_deadlines_end_it(agent: HostAgent, deadline: str, code: int, which: str) -> None:
    agent.run(FOR_EVER, **{deadline: 1_500})
    assert agent.end() == code
    assert agent.of_type("expired") == [{"type": "expired", "which": which}]
    assert agent.left() == []


@pytest.mark.requirement("B-70")
def test_a_renewal_counts_only_with_its_mac(agent: HostAgent) -> None:
    agent.run("echo ready; sleep 3", leaseMs=1_500)
    agent.wait_for_text("ready")
    agent.send({**lease_frame(3), "mac": lease_frame(4)["mac"]}, lease_frame(5))
    assert agent.end() == 0
    assert agent.refusals() == {"bad_mac": 1}


def test_it_ends_everything_when_its_input_ends(agent: HostAgent) -> None:
    agent.run(FOR_EVER)
    agent.wait_for_text("ready")
    agent.lose_stdin()
    assert agent.end() == 73
    assert agent.left() == []


def test_it_ends_everything_when_its_parent_dies() -> None:
    """Though its standard input goes on: we hold the other end."""
    agent = HostAgent(sys.executable, "-c", PARENT)
    try:
        agent.run(FOR_EVER)
        agent.wait_for_text("ready")
        agent.process.kill()
        agent.end()
        assert agent.left() == []
    finally:
        agent.stop()


def test_the_agent_dies_with_its_supervisor(agent: HostAgent) -> None:
    agent.run("trap '' TERM HUP; echo ready; read line < /dev/ptmx")
    agent.wait_for_text("ready")
    pidfd = os.pidfd_open(agent.wait_for("started")["pid"])
    try:
        agent.process.kill()
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
    finally:
        os.close(pidfd)
