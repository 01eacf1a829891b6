"""A bridge that does what a test tells it, over a real socket; and time that a test moves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import httpx

from forge_edges.signalr import SignalRConnection, SignalRSettings
from forge_hub.reasons import REASONS
from forge_hub.server import RunningHub, running_hub
from forge_hub.settings import HubSettings

PATIENCE_S = 10.0
API_TOKEN = "api-token-of-the-tests"
RUNNER_TOKEN = "runner-token-of-the-tests"
COMMIT = "a" * 40
NOW = "2026-11-29T14:00:00.000Z"
PERSISTED = {"accepted": True, "disposition": "persisted"}
DUPLICATE = {"accepted": True, "disposition": "duplicate"}


class ManualClock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self._now_ms = 1_000_000
        self._sleepers: list[tuple[int, anyio.Event]] = []
        self._asleep = anyio.Event()
        self._ids = 0

    def now_ms(self) -> int:
        return self._now_ms

    def utc(self) -> str:
        seconds, ms = divmod(self._now_ms, 1_000)
        minutes, seconds = divmod(seconds, 60)
        return f"2026-11-29T{10 + minutes // 60:02}:{minutes % 60:02}:{seconds:02}.{ms:03}Z"

    def unix_seconds(self) -> int:
        return self._now_ms // 1_000

    async def sleep_until_ms(self, deadline_ms: int) -> None:
        if deadline_ms > self._now_ms:
            sleeper = (deadline_ms, anyio.Event())
            self._sleepers.append(sleeper)
            self._asleep.set()
            try:
                await sleeper[1].wait()
            finally:
                if sleeper in self._sleepers:
                    self._sleepers.remove(sleeper)

    def jitter(self) -> float:
        return 0.5

    def new_id(self) -> str:
        self._ids += 1
        return f"id-{id(self):x}-{self._ids}"

    def advance(self, ms: int) -> None:
        self._now_ms += ms
        for deadline_ms, woken in self._sleepers:
            if deadline_ms <= self._now_ms:
                woken.set()
        self._sleepers = [s for s in self._sleepers if s[0] > self._now_ms]

    async def until_asleep(self) -> None:
        """Return when the dispatcher, its only sleeper, has done what is due and waits again."""
        with anyio.fail_after(PATIENCE_S):
            while not self._sleepers:
                self._asleep = anyio.Event()
                await self._asleep.wait()


class ScriptedBridge:
    """One connection of a runner; what the hub sends waits in an inbox per target."""

    def __init__(self, connection: SignalRConnection, runner_id: str, instance_id: str) -> None:
        self.runner_id = runner_id
        self.instance_id = instance_id
        self.closed = anyio.Event()
        self._connection = connection
        self._inbox: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._arrived = anyio.Event()
        self._beats = 0
        connection.on_close(lambda _error: self.closed.set())
        for target, register in {
            "Dispatch": connection.on_dispatch,
            "Offer": connection.on_offer,
            "Start": connection.on_start,
            "LeaseUpdate": connection.on_lease_update,
            "Cancel": connection.on_cancel,
            "Reap": connection.on_reap,
            "RunnerSettings": connection.on_runner_settings,
        }.items():
            register(self._keeper(target))

    def _keeper(self, target: str) -> Callable[[object], None]:
        def keep(payload: object) -> None:
            assert isinstance(payload, dict)
            self._inbox[target].append(payload)
            self._arrived.set()
            self._arrived = anyio.Event()

        return keep

    async def next(self, target: str) -> dict[str, Any]:
        """The next message of a target, waited for."""
        with anyio.fail_after(PATIENCE_S):
            while not self._inbox[target]:
                await self._arrived.wait()
        return self._inbox[target].pop(0)

    def waiting(self, target: str) -> list[dict[str, Any]]:
        """What has come of a target and was not taken yet."""
        return self._inbox[target]

    async def call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        answer = await self._connection.invoke(method, payload, timeout_ms=10_000)
        assert isinstance(answer, dict)
        assert answer["accepted"] or answer["reason"] in REASONS[method], (method, answer)
        return answer

    async def answered(self) -> None:
        """Return when everything that the hub sent before has arrived."""
        await self.call("ReadAttemptSnapshot", {})

    async def stop(self) -> None:
        await self._connection.stop()

    async def register(self, **changes: Any) -> dict[str, Any]:
        return await self.call(
            "RegisterRunner",
            {
                "protocolVersion": 2,
                "runnerId": self.runner_id,
                "runnerInstanceId": self.instance_id,
                "trustDomainId": "td-1",
                "bridgeVersion": "0.1.0",
                "hostName": "host",
                "platform": "linux",
                "capabilities": capabilities(),
                "repositories": ["repo"],
                **changes,
            },
        )

    async def heartbeat(self, **changes: Any) -> dict[str, Any]:
        self._beats += 1
        return await self.call(
            "Heartbeat",
            {
                "runnerId": self.runner_id,
                "runnerInstanceId": self.instance_id,
                "sequence": self._beats,
                "sentAt": NOW,
                "state": "online",
                "usedResources": {},
                "resourceCapacity": {"slots": 4},
                "reservedCount": 0,
                "startingCount": 0,
                "activeCount": 0,
                "degradedReservationCount": 0,
                "disk": {"latched": False, "usedPercent": 10, "freeBytes": 10**12},
                "pendingReports": 0,
                "attempts": [],
                "attemptsTruncated": False,
                **changes,
            },
        )

    async def decide(self, offer: dict[str, Any], decision: str, **changes: Any) -> dict[str, Any]:
        return await self.call(
            "SubmitOfferDecision",
            {
                "offerId": offer["offerId"],
                "attemptId": offer["attemptId"],
                "fence": offer["fence"],
                "runnerId": self.runner_id,
                "runnerInstanceId": self.instance_id,
                "decision": decision,
                "usedResources": {"slots": 1},
                "resourceCapacity": {"slots": 4},
                **changes,
            },
        )

    async def take_attempt(self) -> dict[str, Any]:
        """Accept the next offer; returns its Start."""
        offer = await self.next("Offer")
        assert (await self.decide(offer, "accepted", runtime="docker"))["accepted"]
        start = await self.next("Start")
        assert start["attemptId"] == offer["attemptId"]
        return start

    async def event(
        self, start: dict[str, Any], event_id: str, kind: str, payload: Any = None, **changes: Any
    ) -> dict[str, Any]:
        return await self.call(
            "SubmitDispatchEvent",
            {
                "eventId": event_id,
                "attemptId": start["attemptId"],
                "fence": start["fence"],
                "resourceRunnerInstanceId": self.instance_id,
                "at": NOW,
                "type": kind,
                "payload": payload or {},
                **changes,
            },
        )

    async def result(
        self, start: dict[str, Any], revision: int = 1, **changes: Any
    ) -> dict[str, Any]:
        """A success, but for ``changes``; None leaves a field out."""
        fields = {
            "attemptId": start["attemptId"],
            "fence": start["fence"],
            "resourceRunnerInstanceId": self.instance_id,
            "revision": revision,
            "outcome": "succeeded",
            "exitCode": 0,
            "resultCommit": "b" * 40,
            "cleanup": "complete" if revision > 1 else "pending",
            "timings": {"agent": {"startedAt": NOW, "durationMs": 5}},
            **changes,
        }
        payload = {name: value for name, value in fields.items() if value is not None}
        return await self.call("SubmitDispatchResult", payload)

    async def cleanup_report(self, start: dict[str, Any], **changes: Any) -> dict[str, Any]:
        return await self.call(
            "SubmitCleanupReport",
            {
                "reportId": "report-1",
                "attemptId": start["attemptId"],
                "fence": start["fence"],
                "resourceRunnerInstanceId": self.instance_id,
                "runnerId": self.runner_id,
                "runnerInstanceId": self.instance_id,
                "part": 1,
                "parts": 1,
                "createdAt": NOW,
                "trigger": "teardown",
                "resources": [removed("c1")],
                **changes,
            },
        )


def capabilities(**changes: Any) -> dict[str, Any]:
    return {
        "runtimes": ["docker"],
        "quotaSupported": False,
        "dedicatedDisk": True,
        "sandboxRequired": {"ready": True, "blockers": []},
        "networkPolicies": ["none"],
        "services": [],
        "publicationModes": ["shared_filesystem"],
        "imagePolicyEnforced": False,
        "signatureVerification": False,
        "resourceCapacity": {"slots": 4},
        **changes,
    }


def removed(resource_id: str, outcome: str = "removed") -> dict[str, Any]:
    return {
        "kind": "container",
        "id": resource_id,
        "name": f"forge-{resource_id}",
        "role": "agent",
        "outcome": outcome,
    }


def session(**changes: Any) -> dict[str, Any]:
    return {
        "projectId": "p-1",
        "trustDomainId": "td-1",
        "repository": "repo",
        "inputCommit": COMMIT,
        "approvedCommit": COMMIT,
        "branch": "main",
        "agent": {"provider": "commands", "argv": ["true"], "env": {"SECRET": "canary-value"}},
        "leaseTtlMs": 60_000,
        **changes,
    }


class Stage:
    """A running hub, its clock, its API, and bridges that connect to it."""

    def __init__(
        self,
        hub: RunningHub,
        clock: ManualClock,
        api: httpx.AsyncClient,
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        self.hub = hub
        self.clock = clock
        self.api = api
        self._tasks = tasks

    async def connect(
        self, runner_id: str = "r1", instance_id: str = "i1", *, token: str = RUNNER_TOKEN
    ) -> ScriptedBridge:
        """A connection that has not registered."""

        async def give(_refresh: bool) -> str:
            return token

        settings = SignalRSettings(hub_url=f"{self.hub.url}/hubs/runner", token=give)
        bridge = ScriptedBridge(SignalRConnection(settings, self._tasks), runner_id, instance_id)
        await bridge._connection.start()
        return bridge

    async def bridge(self, runner_id: str = "r1", instance_id: str = "i1") -> ScriptedBridge:
        """A registered runner that is ready for offers."""
        bridge = await self.connect(runner_id, instance_id)
        assert (await bridge.register())["accepted"]
        assert (await bridge.heartbeat())["accepted"]
        return bridge

    async def pass_time(self, ms: int) -> None:
        """Move the clock, and let the dispatcher do what is due; something must be pending."""
        self.clock.advance(ms)
        await self.clock.until_asleep()

    async def dispatch(self, **changes: Any) -> str:
        """Create a session; returns its id."""
        answer = await self.api.post("/api/v1/sessions", json=session(**changes))
        assert answer.status_code == 201, answer.text
        return str(answer.json()["sessionId"])

    async def session(self, session_id: str) -> dict[str, Any]:
        answer = await self.api.get(f"/api/v1/sessions/{session_id}")
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        return shown

    async def until(
        self, session_id: str, condition: Callable[[dict[str, Any]], object]
    ) -> dict[str, Any]:
        """The session, once it is as the condition wants it."""
        with anyio.fail_after(PATIENCE_S):
            while not condition(shown := await self.session(session_id)):
                await anyio.lowlevel.checkpoint()
        return shown


@asynccontextmanager
async def on_stage(database: str, **changes: Any) -> AsyncIterator[Stage]:
    """A hub on this database, ended with everything that was connected to it."""
    settings = HubSettings(
        port=0,
        database_url=database,
        api_token=API_TOKEN,
        runner_token=RUNNER_TOKEN,
        **changes,
    )
    clock = ManualClock()
    headers = {"Authorization": f"Bearer {API_TOKEN}"}
    async with (
        running_hub(settings, clock=clock) as hub,
        httpx.AsyncClient(base_url=hub.url, headers=headers, timeout=PATIENCE_S) as api,
        anyio.create_task_group() as tasks,
    ):
        yield Stage(hub, clock, api, tasks)
        tasks.cancel_scope.cancel()
