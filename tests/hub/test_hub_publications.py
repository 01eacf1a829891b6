"""A publication is known before a session is signed off; what nobody knows, the remote tells."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from alembic import command
from alembic.config import Config
from grant_parts import PUSHES, make_sources, private_file, publish_request, pushing_bridge
from scripted_bridge import DUPLICATE, PERSISTED, ScriptedBridge, Stage, on_stage
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from forge_hub.dispatch import publications, remotes
from forge_hub.store import migrations
from forge_hub.store.database import open_database
from git_server import PASSWORD, USERNAME, GitServer, git, git_server

pytestmark = pytest.mark.requirement("B-63", "B-64")

TTL_MS = 60_000
"""In which the hub looks a dozen times: each look is a real Git."""


class Remote:
    """A branch ``main`` at the input commit, and a result on top of it that nobody has pushed."""

    def __init__(self, server: GitServer, directory: Path) -> None:
        self.server = server
        self.url = server.create("repo")
        self.input_commit = server.commit("repo", "main", "input")
        served = server.root / "repo.git"
        tree = f"{self.input_commit}^{{tree}}"
        self.result_commit = git(
            served, "commit-tree", tree, "-p", self.input_commit, "-m", "result"
        )
        self.settings = make_sources(directory)
        self.file = self.settings["credentials_directory"] / "p-1" / "repo.json"
        self.file.unlink()
        grant = {"repositoryUrl": self.url, "username": USERNAME, "credential": PASSWORD}
        private_file(self.file, json.dumps(grant))

    def move(self, commit: str) -> None:
        """What a push does, or a human."""
        git(self.server.root / "repo.git", "update-ref", "refs/heads/main", commit)


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    with git_server(tmp_path / "served") as server:
        yield Remote(server, tmp_path)


class Pushing:
    """A dispatch whose publish grant has been redeemed."""

    def __init__(self, bridge: ScriptedBridge, session_id: str, start: dict[str, Any]) -> None:
        self.bridge = bridge
        self.session_id = session_id
        self.start = start

    async def publication(self, remote: Remote, outcome: str, **changes: Any) -> dict[str, Any]:
        return await self.bridge.call(
            "SubmitPublication",
            {
                "attemptId": self.start["attemptId"],
                "fence": self.start["fence"],
                "resourceRunnerInstanceId": self.bridge.instance_id,
                "branch": "main",
                "resultCommit": remote.result_commit,
                "outcome": outcome,
                **changes,
            },
        )


async def pushing(stage: Stage, remote: Remote, **wanted: Any) -> Pushing:
    bridge = await pushing_bridge(stage)
    session_id = await stage.dispatch(inputCommit=remote.input_commit, **PUSHES, **wanted)
    start = await bridge.take_attempt()
    request = publish_request(start, resultCommit=remote.result_commit)
    assert (await bridge.call("RedeemPublishGrant", request))["accepted"]
    return Pushing(bridge, session_id, start)


@asynccontextmanager
async def as_time_goes_by(stage: Stage) -> AsyncIterator[None]:
    """The clock moves a few seconds at a time, whenever somebody sleeps."""

    async def move() -> None:
        while True:
            await stage.clock.until_asleep()
            stage.clock.advance(5_000)
            await anyio.sleep(0.005)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(move)
        yield
        tasks.cancel_scope.cancel()


NOTHING_CAME_OF_IT = {"exitCode": None, "resultCommit": None}


async def stopped(push: Pushing) -> None:
    """The bridge was restarted, and has told already what came of the push."""
    failed = {"outcome": "failed", "failureCode": "bridge_stopped", **NOTHING_CAME_OF_IT}
    assert await push.bridge.result(push.start, revision=2, **failed) == PERSISTED


async def stopped_while_pushing(push: Pushing, remote: Remote) -> None:
    """The bridge was restarted, and does not know what came of the push."""
    assert await push.publication(remote, "unknown") == PERSISTED
    await stopped(push)


# -- what a runner tells ---------------------------------------------------------------------------


async def test_a_result_is_signed_off_with_its_publication(
    remote: Remote, database_url: str
) -> None:
    async with on_stage(database_url, **remote.settings) as stage:
        push = await pushing(stage, remote)
        for answer in (PERSISTED, DUPLICATE):
            assert await push.publication(remote, "pushed") == answer
        shown = await stage.session(push.session_id)
        assert shown["state"] == "running", "it is the result that ends it"
        commit = remote.result_commit
        assert await push.bridge.result(push.start, resultCommit=commit) == PERSISTED
        shown = await stage.session(push.session_id)
        assert (shown["state"], shown["result"]["resultCommit"]) == ("succeeded", commit)
        assert (shown["publication"]["outcome"], shown["publication"]["source"]) == (
            "pushed",
            "runner",
        )
        (dispatch,) = shown["attempts"][0]["dispatches"]
        assert dispatch["publication"] == "pushed"
        assert remote.server.seen == [], "the hub has no reason to look"


async def test_what_nobody_was_given_a_credential_for_was_not_published(
    remote: Remote, database_url: str
) -> None:
    async with on_stage(database_url, **remote.settings) as stage:
        push = await pushing(stage, remote)
        for wrong in ({"branch": "other"}, {"resultCommit": "c" * 40}):
            answer = await push.publication(remote, "pushed", **wrong)
            assert answer["reason"] == "publication_mismatch"
        other = Pushing(push.bridge, await stage.dispatch(), await push.bridge.take_attempt())
        answer = await other.publication(remote, "pushed")
        assert answer["reason"] == "publication_mismatch"


async def test_a_success_without_its_publication_is_none(remote: Remote, database_url: str) -> None:
    async with on_stage(database_url, **remote.settings) as stage:
        push = await pushing(stage, remote, retries=3)
        commit = remote.result_commit
        assert await push.bridge.result(push.start, resultCommit=commit) == PERSISTED
        shown = await stage.session(push.session_id)
        assert (shown["state"], shown["failureCode"]) == ("failed", "publication_denied")


async def test_a_success_that_changed_nothing_owes_no_publication(
    remote: Remote, sqlite_url: str
) -> None:
    async with on_stage(sqlite_url, **remote.settings) as stage:
        push = await pushing(stage, remote)
        assert await push.bridge.result(push.start, resultCommit=None) == PERSISTED
        assert (await stage.session(push.session_id))["state"] == "succeeded"


async def test_what_is_known_does_not_change(remote: Remote, database_url: str) -> None:
    async with on_stage(database_url, **remote.settings) as stage:
        push = await pushing(stage, remote)
        assert await push.publication(remote, "stale_remote") == PERSISTED
        for other in ("pushed", "unknown", "aborted"):
            answer = await push.publication(remote, other)
            assert (answer["disposition"], answer["reason"]) == ("rejected", "outcome_changed")
        assert await push.publication(remote, "stale_remote") == DUPLICATE


async def test_what_was_published_is_done_although_the_bridge_died_after_it(
    remote: Remote, sqlite_url: str
) -> None:
    async with on_stage(sqlite_url, **remote.settings) as stage:
        push = await pushing(stage, remote, retries=3)
        assert await push.publication(remote, "pushed") == PERSISTED
        await stopped(push)
        shown = await stage.session(push.session_id)
        assert shown["state"] == "succeeded"
        assert shown["result"]["failureCode"] == "bridge_stopped"
        assert shown["publication"]["resultCommit"] == remote.result_commit
        await push.bridge.answered()
        assert push.bridge.waiting("Offer") == [], "never pushed twice"


async def test_a_database_of_the_first_version_is_taken_over(
    remote: Remote, database_url: str
) -> None:
    async with on_stage(database_url, **remote.settings) as stage:
        push = await pushing(stage, remote)
        assert await push.publication(remote, "pushed") == PERSISTED
        await stopped(push)
    async with open_database(database_url) as database:
        await database.write(lambda connection: command.downgrade(_config(connection), "0001"))
    async with on_stage(database_url, **remote.settings) as stage:
        shown = await stage.session(push.session_id)
        assert shown["state"] == "succeeded"
        (dispatch,) = shown["attempts"][0]["dispatches"]
        assert [(p["outcome"], p["source"]) for p in dispatch["publications"]] == [
            ("pushed", "runner")
        ]


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes["connection"] = connection
    return config


async def test_a_runner_that_learns_what_came_of_its_push_settles_the_session(
    remote: Remote, database_url: str
) -> None:
    async with on_stage(database_url, **remote.settings) as stage:
        push = await pushing(stage, remote, retries=3)
        await stopped_while_pushing(push, remote)
        assert (await stage.session(push.session_id))["state"] == "settling"
        assert await push.publication(remote, "pushed") == PERSISTED
        shown = await stage.session(push.session_id)
        assert (shown["state"], shown["publication"]["source"]) == ("succeeded", "runner")


# -- what the hub finds out ------------------------------------------------------------------------


async def test_a_push_that_arrived_settles_the_session(remote: Remote, database_url: str) -> None:
    async with on_stage(database_url, **remote.settings) as stage:
        push = await pushing(stage, remote, retries=3)
        remote.move(remote.result_commit)
        await stopped_while_pushing(push, remote)
        shown = await stage.until(push.session_id, lambda s: s["state"] == "succeeded")
        assert (shown["publication"]["outcome"], shown["publication"]["source"]) == (
            "pushed",
            "hub",
        )
        (dispatch,) = shown["attempts"][0]["dispatches"]
        assert [p["outcome"] for p in dispatch["publications"]] == ["unknown", "pushed"]
        assert all(right for *_, right in remote.server.seen)
        await push.bridge.answered()
        assert push.bridge.waiting("Offer") == []
        assert await push.publication(remote, "unknown") == DUPLICATE


async def test_a_push_that_did_not_arrive_is_waited_for_and_then_dispatched_again(
    remote: Remote, database_url: str
) -> None:
    async with on_stage(database_url, publish_ttl_ms=TTL_MS, **remote.settings) as stage:
        push = await pushing(stage, remote, retries=1)
        await stopped_while_pushing(push, remote)
        shown = await stage.session(push.session_id)
        assert (shown["state"], shown["retriesLeft"]) == ("settling", 1)
        begun_ms = stage.clock.now_ms()
        await push.bridge.heartbeat()
        async with as_time_goes_by(stage):
            offer = await push.bridge.next("Offer")
        assert stage.clock.now_ms() - begun_ms >= TTL_MS, "it could have arrived until then"
        assert offer["fence"] == 2
        shown = await stage.session(push.session_id)
        assert shown["publication"]["outcome"] == "aborted"


async def test_a_push_that_arrives_late_is_seen(remote: Remote, sqlite_url: str) -> None:
    async with on_stage(sqlite_url, **remote.settings) as stage:
        push = await pushing(stage, remote, retries=1)
        await stopped_while_pushing(push, remote)
        await stage.until(push.session_id, lambda _: remote.server.seen)
        remote.move(remote.result_commit)
        async with as_time_goes_by(stage):
            shown = await stage.until(push.session_id, lambda s: s["state"] != "settling")
        assert shown["state"] == "succeeded"


async def test_a_human_who_was_faster_settles_it_too(remote: Remote, sqlite_url: str) -> None:
    async with on_stage(sqlite_url, **remote.settings) as stage:
        push = await pushing(stage, remote, retries=3)
        remote.server.commit("repo", "main", "a human's")
        await stopped_while_pushing(push, remote)
        shown = await stage.until(push.session_id, lambda s: s["state"] == "failed")
        assert shown["failureCode"] == "publication_stale"
        assert shown["publication"]["outcome"] == "stale_remote"


async def test_a_cancelled_session_does_not_wait_and_is_found_out_all_the_same(
    remote: Remote, sqlite_url: str
) -> None:
    async with on_stage(sqlite_url, **remote.settings) as stage:
        push = await pushing(stage, remote)
        remote.move(remote.result_commit)
        await stage.api.post(f"/api/v1/sessions/{push.session_id}/cancel")
        assert await push.publication(remote, "unknown") == PERSISTED
        cancelled: dict[str, Any] = {
            "outcome": "cancelled",
            "failureCode": "cancelled",
            **NOTHING_CAME_OF_IT,
        }
        assert await push.bridge.result(push.start, **cancelled) == PERSISTED
        assert (await stage.session(push.session_id))["state"] == "cancelled"
        shown = await stage.until(
            push.session_id, lambda s: s["publication"]["outcome"] == "pushed"
        )
        assert shown["state"] == "cancelled"


async def test_a_runner_that_fell_silent_with_a_credential_may_have_pushed(
    remote: Remote, database_url: str
) -> None:
    async with on_stage(database_url, **remote.settings) as stage:
        push = await pushing(stage, remote, retries=3)
        remote.move(remote.result_commit)
        async with as_time_goes_by(stage):
            shown = await stage.until(push.session_id, lambda s: s["endedAt"])
        assert shown["state"] == "succeeded"
        (dispatch,) = shown["attempts"][0]["dispatches"]
        assert dispatch["endReason"] == "silent"
        assert [(p["outcome"], p["source"]) for p in dispatch["publications"]] == [
            ("unknown", "hub"),
            ("pushed", "hub"),
        ]
        answer = await push.publication(remote, "pushed")
        assert answer["reason"] == "stale_fence"


async def test_a_hub_that_is_restarted_goes_on_looking(remote: Remote, database_url: str) -> None:
    async with on_stage(database_url, **remote.settings) as stage:
        push = await pushing(stage, remote)
        remote.server.fault.status = 503
        await stopped_while_pushing(push, remote)
        await stage.until(push.session_id, lambda _: remote.server.seen)
        assert (await stage.session(push.session_id))["state"] == "settling"
    remote.server.fault.status = None
    remote.move(remote.result_commit)
    async with on_stage(database_url, **remote.settings) as stage:
        shown = await stage.until(push.session_id, lambda s: s["state"] != "settling")
        assert shown["state"] == "succeeded"


async def test_a_remote_that_stays_away_ends_the_session_without_another_try(
    remote: Remote, sqlite_url: str
) -> None:
    async with on_stage(sqlite_url, **remote.settings) as stage:
        push = await pushing(stage, remote, retries=3)
        remote.file.unlink()
        await stopped_while_pushing(push, remote)
        async with as_time_goes_by(stage):
            shown = await stage.until(push.session_id, lambda s: s["state"] != "settling")
        assert (shown["state"], shown["failureCode"]) == ("failed", "bridge_stopped")
        assert shown["publication"]["outcome"] == "unknown"
        await push.bridge.answered()
        assert push.bridge.waiting("Offer") == []


async def test_a_database_that_is_away_when_the_hub_gives_up_is_waited_for(
    remote: Remote, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up, away = publications.give_up, [True]

    def give_up_later(*args: Any, **kwargs: Any) -> None:
        if away:
            away.pop()
            raise OperationalError("UPDATE", None, Exception("the server closed the connection"))
        give_up(*args, **kwargs)

    monkeypatch.setattr(publications, "give_up", give_up_later)
    async with on_stage(sqlite_url, **remote.settings) as stage:
        push = await pushing(stage, remote)
        remote.file.unlink()
        await stopped_while_pushing(push, remote)
        async with as_time_goes_by(stage):
            shown = await stage.until(push.session_id, lambda s: s["state"] != "settling")
    assert not away
    assert (shown["state"], shown["failureCode"]) == ("failed", "bridge_stopped")


async def test_the_hub_looks_again_when_a_result_comes_after_it_gave_up(
    remote: Remote, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remotes, "MAX_ERRORS", 1)
    credential = remote.file.read_text()
    async with on_stage(sqlite_url, **remote.settings) as stage:
        push = await pushing(stage, remote)
        remote.file.unlink()
        with capture_logs() as said:
            assert await push.publication(remote, "unknown") == PERSISTED
            async with as_time_goes_by(stage):
                await stage.until(
                    push.session_id, lambda _: any("given_up" in line["event"] for line in said)
                )
        private_file(remote.file, credential)
        remote.move(remote.result_commit)
        await stopped(push)
        shown = await stage.until(push.session_id, lambda s: s["state"] != "settling")
    assert (shown["state"], shown["publication"]["outcome"]) == ("succeeded", "pushed")


async def test_a_session_that_is_being_settled_can_be_cancelled(
    remote: Remote, sqlite_url: str
) -> None:
    async with on_stage(sqlite_url, **remote.settings) as stage:
        push = await pushing(stage, remote, retries=3)
        await stopped_while_pushing(push, remote)
        assert (await stage.session(push.session_id))["state"] == "settling"
        answer = await stage.api.post(f"/api/v1/sessions/{push.session_id}/cancel")
        assert answer.json()["state"] == "cancelled"
