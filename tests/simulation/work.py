"""What the simulated hub dispatches: attempts, their dispatches, and the words for both."""

from __future__ import annotations

import random  # noqa: TID251 - an argument's type; the instances are seeded
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from .containers import AgentPlan
from .egress import DOMAINS
from .world import EPOCH

Key = tuple[str, int]

COMMIT: Final = "c" * 40
POLICIES: Final = ("none", "none", "public_allowlist", "public_allowlist", "open_public")
SERVICE_SETS: Final = ((), (), ("redis",), ("postgres", "redis"))


@dataclass(slots=True)
class Attempt:
    """What is to be run, and how often it was tried."""

    id: str
    plan: AgentPlan
    ttl_ms: int
    hard_wall_ms: int
    idle_ms: int
    has_secret: bool
    publishes: bool
    policy: str = "none"
    services: tuple[str, ...] = ()
    runs_on: str = "sandbox_preferred"
    host_until_s: float | None = None
    approved: str | None = None
    fence: int = 0
    starts: int = 0
    next_offer_s: float = 0.0
    done: bool = False

    @property
    def branch(self) -> str:
        """Where its result goes."""
        return f"result-{self.id}"


@dataclass(slots=True)
class Dispatch:
    """One (attempt, fence) to one runner instance."""

    attempt: Attempt
    fence: int
    instance_id: str
    offer: dict[str, Any]
    offered_ms: int
    state: str = "offered"
    accepted: bool = False
    key: bytes = b""
    start: dict[str, Any] | None = None
    lease_sequence: int = 0
    sent_ms: int = 0
    cancelled: bool = False
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    events: dict[int, str] = field(default_factory=dict)
    redeemed: str | None = None
    publication: str | None = None

    @property
    def id(self) -> Key:
        """Attempt and fence."""
        return self.attempt.id, self.fence


def planned(rng: random.Random, walls: random.Random, most: int = 8) -> list[Attempt]:
    """The attempts of one seed.

    :param walls: chooses what surrounds them; some seeds have attempts with nothing around.
    """
    plain = walls.random() < 0.3
    attempts = []
    for number in range(rng.randint(2, most)):
        plan = AgentPlan(
            runs_s=rng.choice((0.5, 2.0, 5.0, 40.0, 400.0)),
            exit_code=rng.choice((0, 0, 0, 1)),
            prints_every_s=rng.choice((0.0, 1.0, 7.0)),
            obeys_term=rng.random() < 0.7,
        )
        attempt = Attempt(
            f"attempt-{number + 1}",
            plan,
            ttl_ms=rng.choice((6_000, 15_000, 60_000)),
            hard_wall_ms=rng.choice((30_000, 600_000)),
            idle_ms=rng.choice((20_000, 600_000)),
            has_secret=rng.random() < 0.5,
            publishes=rng.random() < 0.5,
            next_offer_s=rng.uniform(0, 60),
        )
        if not plain:
            attempt.policy = walls.choice(POLICIES)
            attempt.services = walls.choice(SERVICE_SETS)
        attempts.append(attempt)
    return attempts


def offer_of(attempt: Attempt, offer_id: str, instance_id: str, expires_ms: int) -> dict[str, Any]:
    """May I?"""
    memory_bytes, pids = (2**30, 256) if attempt.services else (2**28, 64)
    builds = {} if attempt.approved is None else {"builds": 1}
    return {
        "offerId": offer_id,
        "attemptId": attempt.id,
        "fence": attempt.fence,
        "runnerInstanceId": instance_id,
        "sessionId": "session",
        "projectId": "project",
        "trustDomainId": "domain",
        "policy": attempt.runs_on,
        **_permission(attempt),
        "resources": {
            "slots": 1,
            "memoryBytes": memory_bytes,
            "cpuMillis": 1000,
            "pids": pids,
            **builds,
        },
        "repository": "sample",
        **_approved(attempt),
        "expiresInMs": expires_ms,
        "requirements": {
            "networkPolicy": attempt.policy,
            "services": [{"name": name} for name in attempt.services],
            "publicationMode": _mode(attempt),
        },
    }


def start_of(dispatch: Dispatch, key: str) -> dict[str, Any]:
    """Go.

    :param key: of the lease, in base64.
    """
    attempt, offer = dispatch.attempt, dispatch.offer
    names = ("attemptId", "fence", "offerId", "runnerInstanceId", "sessionId", "projectId")
    domains = DOMAINS if attempt.policy == "public_allowlist" else ()
    return {
        **{name: offer[name] for name in (*names, "trustDomainId", "repository")},
        "inputCommit": COMMIT,
        **_approved(attempt),
        "branch": attempt.branch,
        "agent": {"provider": "command", "argv": attempt.plan.argv()},
        "lease": {"ttlMs": attempt.ttl_ms, "sequence": 0, "key": key},
        "limits": {
            "hardWallMs": attempt.hard_wall_ms,
            "idleMs": attempt.idle_ms,
            "maxOutputBytes": 10_000,
        },
        "network": {"policy": attempt.policy, "domains": list(domains)},
        "services": offer["requirements"]["services"],
        "publication": {
            "mode": _mode(attempt),
            "handle": f"publish-{attempt.id}-{dispatch.fence}",
        },
        "secretGrants": [f"grant-{attempt.id}-{dispatch.fence}"] if attempt.has_secret else [],
    }


def message_id(method: str, payload: Mapping[str, Any]) -> str:
    """Under which a durable message is on disk."""
    match method:
        case "SubmitDispatchEvent":
            return str(payload["eventId"])
        case "SubmitDispatchResult":
            return f"{payload['attemptId']}.{payload['fence']}.r{payload['revision']}"
        case "SubmitCleanupReport":
            return str(payload["reportId"])
        case "SubmitPublication":
            return f"{payload['attemptId']}.{payload['fence']}.publication"
        case _:
            return f"{payload['requestId']}.reap"


def use_host(attempt: Attempt, rng: random.Random) -> None:
    """By policy, or for a while, where no sandbox can be had."""
    attempt.services, soon_s = (), rng.uniform(0, 240)
    if rng.random() < 0.4:
        attempt.runs_on = "host"
    else:
        attempt.host_until_s = rng.choice((-10.0, soon_s, soon_s, 86_400.0))


def _permission(attempt: Attempt) -> dict[str, Any]:
    if attempt.host_until_s is None:
        return {}
    until = (EPOCH + timedelta(seconds=attempt.host_until_s)).isoformat(timespec="milliseconds")
    return {"hostFallback": {"reason": "a new engine", "expiresAt": until}}


def _approved(attempt: Attempt) -> dict[str, Any]:
    return {} if attempt.approved is None else {"approvedCommit": attempt.approved}


def _mode(attempt: Attempt) -> str:
    return "bridge_push" if attempt.publishes else "shared_filesystem"
