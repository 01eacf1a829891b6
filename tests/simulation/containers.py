"""What runs in simulated containers: PID 1 with its agent, and the output helper.

PID 1 is a model of ``forge_supervisor.supervisor`` around that module's own pure parts: frames,
``Init``, ``Deadlines``, ``Logs`` and ``Outbox`` are the production code; processes, signals and
poll are not.  A hostile one leaves out some of what it must do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias

from forge_core.labels import ATTEMPT_ID, FENCE
from forge_supervisor import supervisor as real

from .engine import Container
from .faults import Faults
from .host import HostProcess
from .world import World

TERM_S = 0.05
"""How long an agent that obeys SIGTERM takes to end."""


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """What an agent does, as the second word of its command.

    :param runs_s: until it ends with ``exit_code``.
    :param prints_every_s: 0: it prints nothing; it prints its secrets too.
    """

    runs_s: float = 1.0
    exit_code: int = 0
    prints_every_s: float = 0.0
    obeys_term: bool = True

    def argv(self) -> list[str]:
        """The command."""
        plan = [self.runs_s, self.exit_code, self.prints_every_s, self.obeys_term]
        return ["agent", json.dumps(plan)]

    @classmethod
    def from_argv(cls, argv: list[bytes]) -> AgentPlan:
        """Back from the command."""
        return cls(*json.loads(argv[1]))


class Hostility(Enum):
    """What a PID 1 does that it must not."""

    NONE = "as it should be"
    SILENT = "never says that it is ready"
    ENDLESS = "keeps no deadline and obeys no cancel"
    EARLY = "claims an expiry that has not come"
    VANISHING = "ends with 0 and without the agent's status"
    BABBLING = "sends what is no frame"


Place: TypeAlias = Container | HostProcess
"""Where a program of an attempt runs."""


class AgentWatch(Protocol):
    """Who is told what agents really do."""

    def agent_started(self, agent: Pid1, init: real.Init) -> None: ...
    def agent_ended(self, agent: Pid1) -> None: ...


class Pid1:
    """The supervisor of one container."""

    def __init__(self, world: World, faults: Faults, container: Place, watch: AgentWatch) -> None:
        self.world = world
        self.container = container
        self.key = (container.labels[ATTEMPT_ID], int(container.labels[FENCE]))
        self.is_running = False
        self.frozen_ms = 0
        self._rng = world.rng(f"pid1/{container.name}")
        hostile = self._rng.random() < faults.pid1_hostile
        self.hostility = self._rng.choice(list(Hostility)[1:]) if hostile else Hostility.NONE
        self._runs_out_of_memory = self._rng.random() < faults.oom
        self._watch = watch
        self._phase = real.Phase.WAITING
        self._ready_ms = self._phase_ends_ms = 0
        self._code: int | None = None
        self._lines = real.Lines()
        self._outbox = real.Outbox()
        self._deadlines: real.Deadlines | None = None
        self._grace_ms = 0
        self._plan = AgentPlan()
        self._secrets: Mapping[bytes, bytes] = {}
        self._agent_ends_ms: int | None = None
        self._prints_at_ms: int | None = None
        self._status = 0
        self._timer: asyncio.TimerHandle | None = None

    # -- the program ----------------------------------------------------------------------------

    def start(self) -> None:
        """Say that it is ready, and wait for ``init``."""
        self._ready_ms = self.world.now_ms
        self._phase_ends_ms = self._ready_ms + real.INIT_WAIT_MS
        if self.hostility is not Hostility.SILENT:
            self._outbox.control(type="ready", version=1, pid=1)
        delay_s = self._rng.uniform(0.01, 0.3)
        self.world.later(self.container.process, delay_s, self._turn)

    def stdin(self, data: bytes) -> None:
        """What the host says."""
        now = self.world.now_ms
        self._advance(now)
        for line in self._lines.feed(data):
            if line == b"" and self._phase is real.Phase.WAITING:
                self._phase_ends_ms = now + real.INIT_WAIT_MS
                self._outbox.control(type="ready", version=1, pid=1)
                continue
            try:
                self._take(real.decode_frame(line), now)
            except real.Refused as refusal:
                self._outbox.refuse(refusal.reason)
                if self._phase is real.Phase.WAITING:
                    self._code = real.EXIT_BAD_INIT
                    self._phase = real.Phase.FLUSHING
        self._turn()

    def kill(self) -> None:
        """Everything is gone at once."""
        if self._timer is not None:
            self._timer.cancel()
        self._end_agent()
        self._phase = real.Phase.FLUSHING

    # -- as the supervisor does it ---------------------------------------------------------------

    def _turn(self) -> None:
        if self.container.status != "running":
            return
        now = self.world.now_ms
        self._agent(now)
        self._advance(now)
        while frame := self._outbox.head():
            self._outbox.wrote(len(frame))
            self.container.output(1, frame)
        if self._phase is real.Phase.FLUSHING:
            assert self._code is not None
            self.container.exit(self._code)
            return
        due_ms = [self._phase_ends_ms, *self._agent_due()]
        if self._phase is real.Phase.RUNNING:
            assert self._deadlines is not None
            due_ms = [self._deadlines.next()[0], *self._agent_due()]
            if self.hostility is Hostility.ENDLESS:
                due_ms = self._agent_due()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if due_ms:
            delay_s = max(1, min(due_ms) - now) / 1000
            self._timer = self.world.later(self.container.process, delay_s, self._turn)

    def _take(self, frame: dict[str, object], now: int) -> None:
        if self._phase is real.Phase.WAITING:
            self._start(real.Init(frame), now)
        elif frame["type"] == "lease" and self._deadlines:
            self._deadlines.renew(frame, now)
        elif frame["type"] == "cancel":
            grace_ms = real._integer(frame, "graceMs", 0, real.MAX_DURATION_MS)
            if self.hostility is not Hostility.ENDLESS:
                self._cancel(grace_ms, now)
        else:
            raise real.Refused("unexpected")

    def _start(self, init: real.Init, now: int) -> None:
        self._grace_ms = init.grace_ms
        if now >= self._ready_ms + init.lease_ms:
            self._expire("lease", now)
            return
        self._plan = self._plan_of(init)
        self._secrets = init.env
        self._outbox.logs = real.Logs(init.max_output_bytes)
        self._phase = real.Phase.RUNNING
        self._deadlines = real.Deadlines(init, self._ready_ms, started_ms=now)
        self._agent_ends_ms = now + int(self._plan.runs_s * 1000)
        if self._plan.prints_every_s:
            self._prints_at_ms = now + int(self._plan.prints_every_s * 1000)
        self.is_running = True
        self._outbox.control(type="started", pid=7)
        self._watch.agent_started(self, init)
        if self.hostility is Hostility.EARLY:
            self._outbox.control(type="expired", which="lease")
        if self.hostility is Hostility.BABBLING:
            self.container.output(1, b'{"type":\xff\n' + b"x" * 200_000 + b"\n")

    def _agent(self, now: int) -> None:
        """What the agent's process has done by now."""
        if self._prints_at_ms is not None and self.is_running and now >= self._prints_at_ms:
            self._prints_at_ms = now + int(self._plan.prints_every_s * 1000)
            self._print()
            assert self._deadlines is not None
            self._deadlines.saw_output(now)
        if self._agent_ends_ms is not None and self.is_running and now >= self._agent_ends_ms:
            if self._runs_out_of_memory:
                self._end_agent()
                self.container.exit(137, oom_killed=self._rng.random() < 0.5)
            elif self.hostility is Hostility.VANISHING:
                self._end_agent()
                self._code, self._phase = 0, real.Phase.FLUSHING
            else:
                self._status = self._plan.exit_code << 8
                self._end_agent()

    def _plan_of(self, init: real.Init) -> AgentPlan:
        """What its child is going to do."""
        return AgentPlan.from_argv(init.argv)

    def _print(self) -> None:
        """Say what nobody may say."""
        text = b"at work " + b" ".join(self._secrets.values()) + b"\n"
        self._outbox.logs.feed("stdout", text)

    def _agent_due(self) -> list[int]:
        if not self.is_running:
            return []
        return [at for at in (self._agent_ends_ms, self._prints_at_ms) if at is not None]

    def _advance(self, now: int) -> None:
        if self.container.status != "running":
            return
        if self._phase is real.Phase.WAITING and now >= self._phase_ends_ms:
            self._code, self._phase = real.EXIT_NO_INIT, real.Phase.FLUSHING
        if self._phase is real.Phase.RUNNING:
            assert self._deadlines is not None
            which = self._deadlines.expired(now)
            if not self.is_running:
                self._code = real.EXIT_STATUS_WRITTEN
                self._outbox.last(type="exit", code=self._status >> 8)
                self._phase = real.Phase.FLUSHING
            elif which is not None and self.hostility is not Hostility.ENDLESS:
                self._expire(which, now)
        if self._phase is real.Phase.TERMINATING and (
            not self.is_running or now >= self._phase_ends_ms
        ):
            self._end_agent()
            self._phase = real.Phase.FLUSHING

    def _expire(self, which: str, now: int) -> None:
        self._code = real.EXIT_EXPIRED[which]
        self._outbox.control(type="expired", which=which)
        self._terminate(self._grace_ms, now)

    def _cancel(self, grace_ms: int, now: int) -> None:
        if self._code is None:
            self._code = real.EXIT_CANCELLED
            if self._deadlines:
                grace_ms = min(grace_ms, self._deadlines.lease_at_ms - now)
            self._terminate(grace_ms, now)
        elif self._phase is real.Phase.TERMINATING:
            self._phase_ends_ms = min(self._phase_ends_ms, now + grace_ms)

    def _terminate(self, grace_ms: int, now: int) -> None:
        self._phase, self._phase_ends_ms = real.Phase.TERMINATING, now + grace_ms
        if self._plan.obeys_term and self._agent_ends_ms is not None:
            self._agent_ends_ms = min(self._agent_ends_ms, now + int(TERM_S * 1000))

    def _end_agent(self) -> None:
        if self.is_running:
            self.is_running = False
            self._watch.agent_ended(self)


class Helper:
    """The output helper: answers a request with a commit, with no change, or badly."""

    def __init__(self, world: World, faults: Faults, container: Place) -> None:
        self._world = world
        self._container = container
        self._rng = world.rng(f"helper/{container.name}")
        self._behaves = self._rng.random() >= faults.pid1_hostile
        self._received = bytearray()

    def start(self) -> None:
        """It waits for the agent's end."""

    def stdin(self, data: bytes) -> None:
        """One JSON line, then as many bytes as it says."""
        self._received += data
        line, newline, rest = bytes(self._received).partition(b"\n")
        if newline and len(rest) >= json.loads(line)["listingBytes"]:
            delay_s = self._rng.uniform(0.05, 2.0)
            self._received.clear()
            self._world.later(self._container.process, delay_s, self._answer, json.loads(line))

    def kill(self) -> None:
        """Nothing more is said."""

    def _answer(self, request: Mapping[str, Any]) -> None:
        if self._container.status != "running":
            return
        changed = self._rng.random() < 0.6
        if not self._behaves:
            lies = (b"", b"{}\n", b'{"resultCommit":"x","files":0,"bytes":0}\n')
            self._container.output(1, self._rng.choice(lies))
        elif changed:
            commit = f"{self._rng.getrandbits(160):040x}"
            reply = {"resultCommit": commit, "files": 1, "bytes": 10}
            self._container.output(1, json.dumps(reply).encode() + b"\nbundle of ")
            self._container.output(1, commit.encode())
        else:
            self._container.output(1, b'{"resultCommit":null,"files":0,"bytes":0}\n')
        self._container.exit(0)
