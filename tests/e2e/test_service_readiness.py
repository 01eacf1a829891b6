"""Services that never get ready, or not the ones that were asked for; a hub that we script."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from image_parts import changed_image

from engines import REPOSITORY, Engine, extra_image
from forge_bridge.services.images import fit_image
from forge_core.wire.codes import ServiceName

sys.path.insert(0, str(REPOSITORY / "tests" / "flows"))

from bridge_parts import Bridge, git, real_bridge

REDIS = ServiceName.REDIS
NEVER_LISTENS = b"#!/bin/sh\nexec sleep 600\n"
ENDS_AT_ONCE = b"#!/bin/sh\ncat >&2\necho cannot start today >&2\nexit 3\n"
WANTED = [{"name": "redis", "version": "7"}]

pytestmark = [pytest.mark.engine("d26"), pytest.mark.requirement("B-55")]


@asynccontextmanager
async def offering(
    directory: Path, engine: Engine, runner_id: str, image: str, version: str = "7.0.15"
) -> AsyncIterator[Bridge]:
    """A bridge that offers this image as Redis, as if the preflight had found it fit."""
    async with real_bridge(directory, engine, runner_id) as bridge:
        runner = bridge.runner
        tried = replace(await fit_image(runner.engine, image), version=version)
        runner.services = {REDIS: tried}
        runner.capabilities = runner.capabilities.model_copy(update={"services": (REDIS,)})
        yield bridge


async def outcome(
    bridge: Bridge, services: list[dict[str, str]] = WANTED, **more: Any
) -> dict[str, Any]:
    """How an attempt with these services ends."""
    agreed = {name: more[name] for name in ("approvedCommit",) if name in more}
    offer = await bridge.accept(requirements={"services": services}, **agreed)
    bridge.hub.send("Start", bridge.start(offer, "true", services=services, **more))
    return dict(await bridge.hub.over(offer["attemptId"]))


async def test_a_service_that_never_answers_ends_the_attempt_in_time(
    tmp_path: Path, engine: Engine, runner_id: str
) -> None:
    files = {"usr/bin/redis-server": NEVER_LISTENS}
    with changed_image(engine.api, engine.tooling_image, files) as image:
        async with offering(tmp_path, engine, runner_id, image) as bridge:
            assert bridge.runner.sandbox is not None
            bridge.runner.sandbox = replace(bridge.runner.sandbox, service_ready_ms=1_500)
            result = await outcome(bridge)
            assert result["failureCode"] == "service_not_ready"
            assert "it was not ready within 1500 ms" in result["summary"]
            await bridge.until_idle()


async def test_a_server_that_ends_is_told_with_its_last_words_and_no_password(
    tmp_path: Path, engine: Engine, runner_id: str
) -> None:
    files = {"usr/bin/redis-server": ENDS_AT_ONCE}
    with changed_image(engine.api, engine.tooling_image, files) as image:
        async with offering(tmp_path, engine, runner_id, image) as bridge:
            result = await outcome(bridge)
            assert result["failureCode"] == "service_not_ready"
            assert "it ended with exit code 1 before it was ready" in result["summary"]
            assert "requirepass *** protected-mode no" in result["summary"]
            assert "cannot start today the server ended with exit code 3" in result["summary"]
            await bridge.until_idle()


@pytest.mark.requirement("B-38")
async def test_an_image_that_is_gone_is_named(
    tmp_path: Path, engine: Engine, runner_id: str
) -> None:
    there = extra_image(engine, "redis")
    async with offering(tmp_path, engine, runner_id, there) as bridge:
        gone = replace(bridge.runner.services[REDIS], reference=f"{there[:-8]}00000000")
        bridge.runner.services = {REDIS: gone}
        result = await outcome(bridge)
        assert result["failureCode"] == "image_policy_denied"
        assert "the engine does not have it" in result["summary"]


@pytest.mark.requirement("B-38", "B-41")
async def test_the_contract_may_ask_for_a_version_of_its_own(
    tmp_path: Path, engine: Engine, runner_id: str
) -> None:
    async with offering(tmp_path, engine, runner_id, extra_image(engine, "redis")) as bridge:
        clone = tmp_path / "clone"
        contract = {"version": 1, "services": [{"name": "redis", "version": "6"}]}
        (clone / ".forge").mkdir()
        (clone / ".forge" / "forge.sandbox.yml").write_text(json.dumps(contract))
        git(clone, "add", "--all")
        git(clone, "commit", "--quiet", "--message=Ask for Redis 6")
        commit = git(clone, "rev-parse", "HEAD")
        both = {"approvedCommit": commit, "inputCommit": commit}
        result = await outcome(bridge, [{"name": "redis"}], **both)
        assert result["failureCode"] == "contract_invalid"
        assert "this runner has 7.0.15" in result["summary"]


@pytest.mark.requirement("B-38")
@pytest.mark.parametrize(
    ("services", "code", "detail"),
    [
        ([{"name": "redis", "version": "8"}], "policy_unsatisfied", "this runner has 7.0.15"),
        ([{"name": "postgres"}], "policy_unsatisfied", "services postgres"),
        ([{"name": "redis"}, {"name": "redis", "version": "7"}], "malformed", "asked for twice"),
    ],
)
async def test_what_cannot_be_served_is_refused_before_anything_is_built(
    tmp_path: Path,
    engine: Engine,
    runner_id: str,
    services: list[dict[str, str]],
    code: str,
    detail: str,
) -> None:
    async with offering(tmp_path, engine, runner_id, extra_image(engine, "redis")) as bridge:
        offer = bridge.offer(requirements={"services": services})
        bridge.hub.send("Offer", offer)
        answer = await bridge.hub.decision(offer)
        assert answer["reasonCode"] == code
        assert detail in answer["detail"]
