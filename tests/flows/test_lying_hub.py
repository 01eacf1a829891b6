"""A hub that lies: whatever it sends or answers, the bridge goes on, and within its bounds.

What must hold after everything: the bridge runs, heartbeats come, no more runs than there is
room for, nothing runs twice, everything accepted gets its result, and nothing is left.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from bridge_parts import KEY, Bridge, memory_bridge, wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_engine import MemoryEngine
from scripted_hub import HubException, ScriptedHub, renewal
from test_legacy import dispatch

from forge_bridge.flows.inbox import MAX_QUEUED_BYTES
from forge_core.ports import EngineResource, Ledger
from forge_core.wire.from_bridge import HUB_METHODS
from forge_core.wire.from_hub import CLIENT_TARGETS, Cancel, Start

HEARTBEAT_MS = 100
MIB = 1 << 20
WRONG: tuple[object, ...] = (
    None,
    True,
    -1,
    1.5,
    2**63,
    "",
    "../../etc/passwd",
    "x" * 20_000,
    [],
    [[]],
    {},
    {"a": {"b": []}},
)


def honest(bridge: Bridge) -> dict[str, dict[str, Any]]:
    """One well-formed message for each client target, about nothing that is here."""
    offer = bridge.offer(trustDomainId="elsewhere")
    return {
        "Offer": offer,
        "Start": bridge.start(offer),
        "LeaseUpdate": renewal("nobody", 1, 1, KEY),
        "Cancel": {"attemptId": "nobody", "fence": 1, "reason": "no reason"},
        "Dispatch": dispatch("nothing", "true"),
        "Reap": {
            "requestId": "r",
            "runnerId": bridge.hub.runner_id,
            "runnerInstanceId": bridge.hub.instance_id,
            "scope": "attempt",
            "attemptId": "nobody",
            "fence": 1,
        },
        "RunnerSettings": {"settings": {"draining": False, "hostFallbackEnabled": False}},
    }


def spoiled(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The message with one thing wrong, at every depth."""
    for name, value in message.items():
        yield {key: kept for key, kept in message.items() if key != name}
        for wrong in WRONG:
            yield {**message, name: wrong}
        if isinstance(value, dict):
            for inner in spoiled(value):
                yield {**message, name: inner}


def deep(levels: int) -> object:
    value: object = "bottom"
    for _ in range(levels):
        value = {"a": [value]}
    return value


async def still_well(bridge: Bridge, connections: int = 1) -> None:
    """The bridge is what it was: online, beating, idle and willing."""
    hub = bridge.hub
    assert hub.connected == connections
    await hub.next("Heartbeat", count=len(hub.of("Heartbeat")) + 2)
    await bridge.until_idle()
    assert (await hub.over(await bridge.run("true")))["outcome"] == "succeeded"
    await bridge.until_idle()


@pytest.mark.requirement("B-01", "B-04")
@pytest.mark.parametrize("target", list(CLIENT_TARGETS))
async def test_every_target_with_everything_wrong(tmp_path: Path, target: str) -> None:
    hub = ScriptedHub(heartbeat_interval_ms=HEARTBEAT_MS)
    async with memory_bridge(tmp_path, hub) as bridge:
        message = honest(bridge)[target]
        for wrong in (*WRONG, deep(100), {"x": "y" * (MIB - 2_000)}):
            hub.send(target, wrong)
        hub.send(target)
        hub.send(target, message, message)
        hub.send(target, {**message, "unknown": deep(50), "": "x" * 100_000})
        for payload in spoiled(message):
            hub.send(target, payload)
        bridge.drain(False)
        await still_well(bridge)
        assert bridge.runner.admission.used.slots == 0
        complaints = [entry for entry in bridge.logs if "malformed message" in entry["event"]]
        assert len(complaints) <= 20


@pytest.mark.requirement("B-01")
async def test_records_that_no_hub_sends(tmp_path: Path) -> None:
    hub = ScriptedHub(heartbeat_interval_ms=HEARTBEAT_MS)
    async with memory_bridge(tmp_path, hub) as bridge:
        surrogate = json.dumps(bridge.offer()).encode().replace(b"sample", b"\\ud800")
        for record in (
            b"{}",
            b"[]",
            b"null",
            b"\xff\xfe",
            b'{"type":1,"target":"Offer","arguments":7}',
            b'{"type":1,"target":"Nonsense","arguments":[{}]}',
            b'{"type":1,"target":"Offer","arguments":[' + surrogate + b"]}",
            b'{"type":1,"target":"Offer","arguments":[{"fence":' + b"9" * 5_000 + b"}]}",
            b'{"type":1,"target":"Offer","arguments":[' + b"[" * 200_000 + b"]" * 200_000 + b"]}",
            b'{"type":3,"invocationId":"999999","result":{"accepted":true}}',
            b'{"type":3,"invocationId":7,"result":null}',
            b'{"type":2,"invocationId":"1","item":{}}',
            b'{"type":99}',
        ):
            hub.send_raw(record + b"\x1e")
        await still_well(bridge)


@pytest.mark.requirement("B-01")
async def test_a_message_over_the_bound_costs_the_connection_and_nothing_else(
    tmp_path: Path,
) -> None:
    hub = ScriptedHub(heartbeat_interval_ms=HEARTBEAT_MS)
    async with memory_bridge(tmp_path, hub) as bridge:
        attempt_id = await bridge.run("wait")
        await hub.event(attempt_id, "agent.started")
        hub.snapshot = [{"attemptId": attempt_id, "fence": 1, "state": "running"}]
        hub.send("Offer", {"x": "y" * (MIB + 100_000)})
        await hub.online(2)
        assert bridge.is_running(attempt_id)
        hub.send("Cancel", {"attemptId": attempt_id, "fence": 1})
        await hub.over(attempt_id)
        await still_well(bridge, connections=2)


@pytest.mark.requirement("B-07", "B-83")
async def test_an_answer_that_is_no_acknowledgement_is_none(tmp_path: Path) -> None:
    hub = ScriptedHub(heartbeat_interval_ms=HEARTBEAT_MS)
    methods = ("SubmitDispatchEvent", "SubmitDispatchResult", "SubmitCleanupReport")
    answers: dict[str, list[object]] = {
        "SubmitDispatchEvent": [{"accepted": True}, HubException("later")],
        "SubmitDispatchResult": [{"accepted": True, "disposition": "lost"}, None],
        "SubmitCleanupReport": [deep(100), [], {}],
    }
    good = {"accepted": True, "disposition": "persisted"}

    def next_of(left: list[object]) -> Callable[[object], object]:
        return lambda _payload: left.pop() if left else good

    for method in methods:
        hub.answers[method] = next_of(answers[method])
    async with memory_bridge(tmp_path, hub) as bridge:
        await hub.over(await bridge.run("true"))
        await wait_for(lambda: bridge.unacknowledged == 0)
        assert not any(answers.values())
        assert hub.connected == 1
        assert not list((bridge.state_root / "outbox" / "rejected").iterdir())


@pytest.mark.requirement("B-04", "B-08", "B-21")
async def test_a_flood_is_taken_within_bounds(tmp_path: Path) -> None:
    hub = ScriptedHub(heartbeat_interval_ms=HEARTBEAT_MS)
    async with memory_bridge(tmp_path, hub) as bridge:
        hub.answers["SubmitOfferDecision"] = hub.never
        before = resident_kib()
        for number in range(5_000):
            match number % 5:
                case 0:
                    hub.send("Offer", bridge.offer(attempt_id=f"a{number}"))
                case 1:
                    hub.send("LeaseUpdate", renewal(f"a{number}", 1, number, KEY))
                case 2:
                    hub.send("Cancel", {"attemptId": f"a{number}", "fence": 1})
                case 3:
                    hub.send("Offer", {"fence": number})
                case _:
                    bridge.drain(bool(number % 2))
        await hub.next("Heartbeat", count=len(hub.of("Heartbeat")) + 5)
        assert len(hub.of("SubmitOfferDecision")) <= 64
        assert bridge.runner.admission.used.slots <= 2
        assert resident_kib() - before < 100 * 1024
        for reserved in tuple(bridge.runner.admission.reservations):
            hub.send("Cancel", {"attemptId": reserved[0], "fence": reserved[1]})
        bridge.drain(False)
        await bridge.until_idle()
        hub.speak_again()
        hub.drop()
        await hub.online(2)
        await still_well(bridge, connections=2)


@pytest.mark.requirement("B-03", "B-04")
async def test_a_flood_of_large_messages_is_refused_by_name_and_holds_up_nothing(
    tmp_path: Path,
) -> None:
    async with memory_bridge(tmp_path, allow_host_execution=True) as bridge:
        hub, released = bridge.hub, anyio.Event()
        ledgers, create = bridge.runner.ledgers, bridge.runner.ledgers.create

        async def slow(attempt_id: str, fence: int) -> Ledger:
            if attempt_id == "slow":
                await released.wait()
            return await create(attempt_id, fence)

        ledgers.create = slow  # type: ignore[method-assign]
        offer = bridge.offer("slow")
        hub.send("Offer", offer)
        agent = {"provider": "command", "argv": ["true", *["x" * 100_000] * 9]}
        for _ in range(150):
            hub.send("Start", {**bridge.start(offer), "agent": agent})
        other = await bridge.accept()
        assert held_characters() < 1.1 * MAX_QUEUED_BYTES
        hub.send("Start", {**bridge.start(other), "agent": agent})
        result = await hub.over(other["attemptId"])
        assert (result["outcome"], result["failureCode"]) == ("failed", "internal_error")
        assert str(MAX_QUEUED_BYTES) in result["summary"]
        unasked = bridge.offer()
        hub.send("Start", {**bridge.start(unasked), "agent": agent})
        assert (await hub.over(unasked["attemptId"]))["failureCode"] == "start_timeout"
        hub.send("Dispatch", dispatch("large", "true", *["x" * 100_000] * 9))
        legacy = await hub.next("SubmitLegacyResult", dispatchId="large")
        assert str(MAX_QUEUED_BYTES) in legacy["error"]
        for _ in range(100):
            hub.send("Cancel", {"attemptId": "slow", "fence": 2, "reason": "x" * 900_000})
            hub.send("Start", {"attemptId": "slow", "fence": 2, "branch": "x" * 900_000})
        await bridge.hub.over(await bridge.run("true"))
        assert held_characters() < 1.1 * MAX_QUEUED_BYTES
        released.set()
        await hub.over("slow")
        assert (await hub.over("slow"))["outcome"] == "succeeded"
        await bridge.until_idle()


@pytest.mark.requirement("B-88")
async def test_a_flood_of_reap_actions_holds_up_nothing(tmp_path: Path) -> None:
    engine = MemoryEngine()
    async with memory_bridge(tmp_path, engine=engine) as bridge:
        hub, released = bridge.hub, anyio.Event()
        list_resources = engine.list_resources

        async def slow(labels: Mapping[str, str]) -> Sequence[EngineResource]:
            await released.wait()
            return await list_resources(labels)

        engine.list_resources = slow  # type: ignore[method-assign]
        reap = honest(bridge)["Reap"]
        for number in range(1_000):
            hub.send("Reap", {**reap, "requestId": f"r{number}"})
        await bridge.accept()
        released.set()
        await hub.next("SubmitReapOutcome", requestId="r0")
        await hub.next("SubmitReapOutcome", requestId="r15")
        assert len(hub.of("SubmitReapOutcome")) == 16


def held_characters() -> int:
    """In the large fields of messages that something in this process still holds."""
    gc.collect()
    texts: list[object] = []
    for found in gc.get_objects():
        if isinstance(found, Start):
            texts += found.agent.argv
        elif isinstance(found, Cancel):
            texts.append(found.reason)
        elif isinstance(found, partial):
            texts += found.args
        elif type(found) is dict:
            texts += [found.get(name) for name in ("branch", "reason")]
    return sum(len(text) for text in texts if isinstance(text, str))


def resident_kib() -> int:
    """VmRSS of proc_pid_status(5)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


# -- sequences that nobody would think of ---------------------------------------------------------

SLOTS = 2
ATTEMPTS = ("a", "b", "c")
FENCES = (1, 2, 3)
GARBAGE = st.sampled_from([*WRONG, {"accepted": True}, {"accepted": False}, HubException("no")])

Step = tuple[Any, ...]
TARGETED = st.tuples(
    st.sampled_from(["offer", "offer", "start", "start", "renew", "cancel", "reap", "dispatch"]),
    st.sampled_from(ATTEMPTS),
    st.sampled_from(FENCES),
    st.integers(0, 3),
)
SPOILED = st.tuples(
    st.just("spoil"), st.sampled_from(list(CLIENT_TARGETS)), st.integers(0, 400), st.none()
)
ANSWERED = st.tuples(
    st.just("answer"),
    st.sampled_from([m for m in HUB_METHODS if m not in ("RegisterRunner", "ReadAttemptSnapshot")]),
    st.one_of(GARBAGE, st.just("never")),
    st.none(),
)
UPSET = st.tuples(
    st.sampled_from(["drop", "speak", "settle", "drain"]), st.booleans(), st.none(), st.none()
)
STEPS = st.lists(st.one_of(TARGETED, TARGETED, TARGETED, SPOILED, ANSWERED, UPSET), max_size=30)
COMMANDS = ("true", "wait", "false", "wait")


class Liar:
    """Plays the steps of one example."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge
        self.hub = bridge.hub
        self.offers = {
            (attempt_id, fence): bridge.offer(attempt_id, fence)
            for attempt_id in ATTEMPTS
            for fence in FENCES
        }

    async def play(self, step: Step) -> None:
        kind, *about = step
        match kind:
            case "spoil":
                target, number, _ = about
                message = honest(self.bridge)[target]
                choices = list(spoiled({**message, **self._near(target)}))
                self.hub.send(target, choices[number % len(choices)])
            case "answer":
                method, answer, _ = about
                garbage = self.hub.never if answer == "never" else (lambda _payload: answer)
                self.hub.answers[method] = garbage
            case "drop":
                await self.reconnect(listed=about[0])
            case "speak":
                self.hub.speak_again()
            case "drain":
                self.bridge.drain(about[0])
            case "settle":
                await self.hub.next("Heartbeat", count=len(self.hub.of("Heartbeat")) + 1)
            case _:
                self._say(kind, *about)

    def _near(self, target: str) -> dict[str, Any]:
        """So that what is spoiled is about something that may be here."""
        return {"attemptId": "a", "fence": 1} if target in ("Offer", "Start", "Cancel") else {}

    def _say(self, kind: str, attempt_id: str, fence: int, choice: int) -> None:
        hub, offer = self.hub, self.offers[attempt_id, fence]
        match kind:
            case "offer":
                hub.send("Offer", offer)
            case "start":
                hub.send("Start", self.bridge.start(offer, COMMANDS[choice]))
            case "renew":
                key = KEY if choice else bytes(32)
                hub.send("LeaseUpdate", renewal(attempt_id, fence, choice, key))
            case "cancel":
                hub.send("Cancel", {"attemptId": attempt_id, "fence": fence})
            case "reap":
                about = {"attemptId": attempt_id, "fence": fence} if choice else {}
                hub.send("Reap", {**honest(self.bridge)["Reap"], **about})
            case "dispatch":
                hub.send("Dispatch", dispatch(attempt_id, "true"))

    async def reconnect(self, *, listed: bool) -> None:
        connections = self.hub.connected
        held = self.bridge.runner.admission.reservations
        self.hub.snapshot = [
            {"attemptId": key[0], "fence": key[1], "state": "running"} for key in held if listed
        ]
        self.hub.drop()
        calls = self.hub.calls
        await self.hub.until(
            lambda: any(c.connection > connections and c.method == "Heartbeat" for c in calls)
        )

    async def finish(self) -> None:
        """Be honest again, end everything, and look at what there was."""
        bridge, hub = self.bridge, self.hub
        hub.speak_again()
        await self.reconnect(listed=True)
        bridge.drain(False)
        for attempt_id, fence in self.offers:
            hub.send("Cancel", {"attemptId": attempt_id, "fence": fence})
        await bridge.until_idle()
        await wait_for(lambda: bridge.unacknowledged == 0)
        accepted = {
            (d["attemptId"], d["fence"]) for d in hub.of("SubmitOfferDecision", decision="accepted")
        }
        for attempt_id, fence in accepted:
            results = hub.of("SubmitDispatchResult", attemptId=attempt_id, fence=fence)
            assert results, (attempt_id, fence)
            assert results[-1]["cleanup"] == "complete"
            verdicts = {(r["outcome"], r.get("failureCode")) for r in results}
            assert len(verdicts) == 1, verdicts
        started = Counter(
            (e["attemptId"], e["fence"])
            for e in {e["eventId"]: e for e in hub.of("SubmitDispatchEvent")}.values()
            if e["type"] == "agent.started"
        )
        assert set(started.values()) <= {1}
        assert set(started) <= accepted
        used = [h["usedResources"]["slots"] for h in hub.of("Heartbeat")]
        assert max(used) <= SLOTS


@pytest.mark.requirement("B-01", "B-04", "B-07", "B-08", "B-21", "B-81")
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(STEPS)
async def test_whatever_a_hub_says_the_bridge_keeps_its_promises(steps: list[Step]) -> None:
    hub, engine = ScriptedHub(heartbeat_interval_ms=HEARTBEAT_MS), MemoryEngine()
    with tempfile.TemporaryDirectory() as directory:
        async with memory_bridge(
            Path(directory),
            hub,
            engine,
            max_concurrent_sandboxes=SLOTS,
            sandbox_kill_grace_seconds=1,
        ) as bridge:
            liar = Liar(bridge)
            with anyio.fail_after(60):
                for step in steps:
                    await liar.play(step)
                await liar.finish()
            assert not bridge.stopped.is_set()
        assert engine.most_at_once <= SLOTS
        assert engine.is_empty
