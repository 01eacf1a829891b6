"""An engine that goes away stops admission; when it is back, admission comes back by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import anyio.lowlevel
import pytest
from bridge_parts import Bridge, capabilities_of, memory_bridge, settings_for, wait_for
from memory_engine import MemoryEngine

from forge_bridge.doctor.checks import Preflight
from forge_bridge.doctor.egress_checks import EGRESS
from forge_bridge.doctor.policy_checks import BUILDER
from forge_bridge.doctor.results import CheckResult
from forge_bridge.flows import engine as engine_flow
from forge_bridge.flows.reap import Reaper
from forge_bridge.runner import Runner
from forge_core.errors import EngineTimedOut, EngineUnreachable
from forge_core.labels import PREFLIGHT, Owner
from forge_core.wire.codes import CleanupTrigger, NetworkPolicy, Runtime
from forge_core.wire.shapes import Capabilities, EngineFacts

pytestmark = pytest.mark.requirement("B-05", "B-23")


class ReplaceableEngine(MemoryEngine):
    """Says that it is whoever the test wants it to be, or says nothing."""

    identity = "memory"
    is_frozen = False

    async def facts(self) -> EngineFacts:
        if self.is_frozen:
            await anyio.sleep_forever()
        if fault := self.faults.get("facts"):
            raise fault
        return (await super().facts()).model_copy(update={"id": self.identity})


def found_by(capabilities: Capabilities, *results: CheckResult) -> Preflight:
    """What a preflight says."""
    return Preflight(results, capabilities)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_flow, "LOOK_EVERY_MS", 20)
    monkeypatch.setattr(engine_flow, "ANSWER_MS", 200)


def watch(bridge: Bridge, engine: MemoryEngine, look_again: engine_flow.LookAgain) -> None:
    """As ``open_bridge`` does for an engine that it has locked."""
    reaper = bridge.service.session.reaper
    bridge.runner.tasks.start_soon(
        engine_flow.watch, bridge.runner, engine, "memory", reaper, look_again
    )


async def rejection(bridge: Bridge) -> tuple[str | None, str | None]:
    offer = bridge.offer()
    bridge.hub.send("Offer", offer)
    decision = await bridge.hub.decision(offer)
    return decision.get("reasonCode"), decision.get("detail")


async def until(bridge: Bridge, *, away: bool) -> None:
    with anyio.fail_after(10):
        while (bridge.runner.engine_away is not None) is not away:
            await bridge.runner.changed.wait()


@pytest.mark.parametrize("how", ["unreachable", "frozen", "replaced"])
async def test_nothing_is_admitted_while_the_engine_is_away(tmp_path: Path, how: str) -> None:
    engine, looked = ReplaceableEngine(), 0
    async with memory_bridge(tmp_path, engine=engine) as bridge:

        async def look_again() -> Preflight:
            nonlocal looked
            looked += 1
            settings = settings_for(tmp_path, bridge.hub)
            return found_by(capabilities_of(settings, (Runtime.DOCKER,)))

        watch(bridge, engine, look_again)
        match how:
            case "unreachable":
                engine.faults["facts"] = EngineUnreachable("nobody there")
            case "frozen":
                engine.is_frozen = True
            case "replaced":
                engine.identity = "another"
        await until(bridge, away=True)
        code, detail = await rejection(bridge)
        assert code == "runtime_unavailable"
        wanted = {"unreachable": "nobody there", "frozen": "did not answer", "replaced": "another"}
        assert str(detail).startswith("engine: ")
        assert wanted[how] in str(detail)
        engine.faults.clear()
        engine.is_frozen, engine.identity = False, "memory"
        await until(bridge, away=False)
        assert looked == 1, "what came back was not looked at again"
        await bridge.accept()


async def test_an_engine_that_cannot_be_looked_at_stays_away(tmp_path: Path) -> None:
    engine = ReplaceableEngine()
    tries = 0
    async with memory_bridge(tmp_path, engine=engine) as bridge:

        async def look_again() -> Preflight:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise EngineUnreachable("still starting")
            return found_by(capabilities_of(settings_for(tmp_path, bridge.hub), (Runtime.DOCKER,)))

        watch(bridge, engine, look_again)
        engine.faults["facts"] = EngineUnreachable("nobody there")
        await until(bridge, away=True)
        engine.faults.clear()
        await until(bridge, away=False)
        assert tries == 3


class Leaps:
    """A clock on which sleeping takes no time."""

    def __init__(self) -> None:
        self._now_ms = 1_000_000

    def now_ms(self) -> int:
        return self._now_ms

    def jitter(self) -> float:
        return 0.5

    async def sleep_until_ms(self, at_ms: int) -> None:
        self._now_ms = max(self._now_ms, at_ms)
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("away", [True, False])
async def test_what_cannot_be_looked_at_is_tried_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    monkeypatch.setattr(engine_flow, "LOOK_EVERY_MS", 100)
    clock, tried_ms, done = Leaps(), list[int](), anyio.Event()
    runner = SimpleNamespace(
        clock=clock,
        engine_away="it did not answer" if away else None,
        parts_unseen={} if away else {"egress": "the proxy did not answer"},
        notify=lambda: None,
    )

    async def between_passes(work: engine_flow.LookAgain) -> Preflight:
        return await work()

    async def look_again() -> Preflight:
        tried_ms.append(clock.now_ms())
        if len(tried_ms) == 9:
            done.set()
            await anyio.sleep_forever()
        raise EngineUnreachable("the probe did not end")

    reaper = SimpleNamespace(between_passes=between_passes)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            watched = cast("Runner", runner), ReplaceableEngine(), "memory", cast("Reaper", reaper)
            tasks.start_soon(engine_flow.watch, *watched, look_again)
            await done.wait()
            tasks.cancel_scope.cancel()
    waited_ms = [after - before for before, after in pairwise(tried_ms)]
    assert waited_ms == [500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]
    assert ("cannot be looked at" in str(runner.engine_away)) is away


async def test_one_slow_answer_is_no_reason_to_look_at_everything_again(tmp_path: Path) -> None:
    engine, looked, answered = ReplaceableEngine(), 0, anyio.Event()

    async with memory_bridge(tmp_path, engine=engine) as bridge:

        async def look_again() -> Preflight:
            nonlocal looked
            looked += 1
            raise EngineUnreachable("too busy")

        asked = 0
        facts = engine.facts

        async def slow_once() -> EngineFacts:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise EngineTimedOut("no answer in time")
            if asked == 3:
                answered.set()
            return await facts()

        engine.facts = slow_once  # type: ignore[method-assign]
        watch(bridge, engine, look_again)
        with anyio.fail_after(10):
            await answered.wait()
        assert (looked, bridge.runner.engine_away) == (0, None)


@pytest.mark.requirement("B-06", "B-51")
async def test_a_part_that_could_not_be_tried_is_advertised_once_it_was(tmp_path: Path) -> None:
    async with memory_bridge(tmp_path, engine=ReplaceableEngine()) as bridge:
        known = bridge.runner.capabilities
        whole = known.model_copy(
            update={"network_policies": (NetworkPolicy.NONE, NetworkPolicy.PUBLIC_ALLOWLIST)}
        )
        # One more that is unseen takes nothing back of what was seen before.
        slow = [
            replace(gate.blocks_required("slow", "do"), looked=False) for gate in (EGRESS, BUILDER)
        ]
        looks = [found_by(known.model_copy(update={"runtimes": ()}), *slow), found_by(whole)]
        meanwhile: list[Mapping[str, str]] = []

        async def look_again() -> Preflight:
            meanwhile.append(dict(bridge.runner.parts_unseen))
            assert bridge.runner.facts().runtimes == {Runtime.DOCKER}
            return looks.pop(0)

        engine_flow.tell_unseen(bridge.runner, {"egress": "the proxy did not answer"})
        watch(bridge, cast("MemoryEngine", bridge.runner.engine), look_again)
        registered = await bridge.hub.next("RegisterRunner", count=2)
        assert registered["capabilities"]["networkPolicies"] == ["none", "public_allowlist"]
        assert meanwhile == [{"egress": "the proxy did not answer"}] * 2
        assert not bridge.runner.parts_unseen


@pytest.mark.requirement("B-06")
async def test_an_engine_that_came_back_otherwise_is_advertised_anew(tmp_path: Path) -> None:
    engine = ReplaceableEngine()
    async with memory_bridge(tmp_path, engine=engine) as bridge:

        async def look_again() -> Preflight:
            settings = settings_for(tmp_path, bridge.hub)
            found = capabilities_of(settings, (Runtime.DOCKER,))
            return found_by(found.model_copy(update={"quota_supported": True}))

        watch(bridge, engine, look_again)
        engine.faults["facts"] = EngineUnreachable("nobody there")
        await until(bridge, away=True)
        engine.faults.clear()
        registered = await bridge.hub.next("RegisterRunner", count=2)
        assert registered["capabilities"]["quotaSupported"] is True


@pytest.mark.requirement("B-80")
async def test_no_pass_takes_from_the_preflight_what_it_looks_with(tmp_path: Path) -> None:
    engine, probe_stayed = ReplaceableEngine(), False
    async with memory_bridge(tmp_path, engine=engine) as bridge:
        runner, reaper = bridge.runner, bridge.service.session.reaper
        identity, passed = runner.identity, anyio.Event()
        owner = Owner.of_runner(
            PREFLIGHT,
            identity.runner_id,
            identity.runner_instance_id,
            identity.trust_domain_id,
        )

        async def run_pass() -> None:
            await reaper.run_pass(CleanupTrigger.PERIODIC)
            passed.set()

        async def look_again() -> Preflight:
            nonlocal probe_stayed
            await engine.create_volume(owner.name("probe"), owner.labels("probe"))
            runner.tasks.start_soon(run_pass)
            # Whoever asks for a pass, a hub for instance, gets it meanwhile.
            with anyio.fail_after(10):
                await passed.wait()
            probe_stayed = owner.name("probe") in engine.volumes
            return found_by(capabilities_of(settings_for(tmp_path, bridge.hub), (Runtime.DOCKER,)))

        watch(bridge, engine, look_again)
        engine.faults["facts"] = EngineUnreachable("nobody there")
        await until(bridge, away=True)
        engine.faults.clear()
        await until(bridge, away=False)
        assert probe_stayed
        await wait_for(lambda: owner.name("probe") not in engine.volumes)
