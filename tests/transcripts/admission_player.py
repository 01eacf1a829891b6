"""Plays what a runner decides about offers: offers and endings in, verdicts and capacity out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from transcript import Words

from forge_core.admission import Admission, RunnerFacts, Verdict
from forge_core.resources import ResourceCapacity, ResourceVector
from forge_core.wire.base import parse
from forge_core.wire.codes import (
    NetworkPolicy,
    PublicationMode,
    RejectionCode,
    ReservationState,
    Runtime,
)
from forge_core.wire.from_hub import Offer

FACTS = RunnerFacts(
    trust_domain_id="domain-1",
    capacity=ResourceCapacity(slots=2, pids=1024, memory_bytes=4 << 30, cpu_millis=2000),
    repositories=frozenset({"demo"}),
    runtimes=frozenset({Runtime.DOCKER}),
    network_policies=frozenset({NetworkPolicy.NONE}),
    publication_modes=frozenset({PublicationMode.SHARED_FILESYSTEM}),
)
FLAGS = (
    "draining",
    "stopping",
    "disk_pressure",
    "host_execution_allowed",
    "host_fallback_enabled",
)


class AdmissionPlayer:
    """A runner with two slots, 4 GiB and two CPUs."""

    def __init__(self) -> None:
        self.admission = Admission()
        self.facts = FACTS

    def __call__(self, at_ms: int, command: str, words: Words) -> Iterator[str]:
        admission = self.admission
        match command:
            case "offer":
                yield _shown(admission.decide(_offer(words), self.facts, at_ms))
            case "withdraw":
                why = RejectionCode(words.bare[3])
                yield _shown(admission.withdraw(_offer(words), why, "the disk is full"))
            case "legacy":
                yield _shown(admission.hold_legacy(words.bare[0], self.facts))
            case "expired":
                found = admission.expired(at_ms)
                yield "expired " + (", ".join(f"{a}.{fence}" for a, fence in found) or "none")
            case "superseded":
                found = admission.superseded_by(words.bare[0], int(words.bare[1]))
                yield "superseded " + (", ".join(f"{a}.{fence}" for a, fence in found) or "none")
            case "move":
                key = (words.bare[0], int(words.bare[1]))
                admission.transition(key, ReservationState(words.bare[2]))
            case "free":
                admission.free((words.bare[0], int(words.bare[1])))
            case "left-over":
                key = (words.bare[0], int(words.bare[1]))
                admission.hold_degraded(
                    key, ResourceVector(slots=1, memory_bytes=1 << 30), Runtime.DOCKER
                )
            case "runner":
                flags: dict[str, Any] = {flag: flag in words.bare for flag in FLAGS}
                self.facts = replace(self.facts, **flags)
                runtimes = FACTS.runtimes if "no_docker" not in words.bare else frozenset()
                utc = words.named.get("utc", "")
                self.facts = replace(self.facts, runtimes=runtimes, utc=utc)
            case _:
                raise AssertionError(command)
        yield f"holds {self._held()}"

    def _held(self) -> str:
        held = [f"{r.key[0]}.{r.key[1]} {r.state}" for r in self.admission.reservations.values()]
        used = self.admission.used
        return f"[{', '.join(held)}] {used.slots} slots, {used.memory_bytes >> 20} MiB"


def _offer(words: Words) -> Offer:
    offer_id, attempt_id, fence = words.bare[:3]
    resources = {"slots": words.number("slots", 1), "memoryBytes": words.number("mib", 0) << 20}
    payload = {
        "offerId": offer_id,
        "attemptId": attempt_id,
        "fence": int(fence),
        "runnerInstanceId": "instance-1",
        "sessionId": "session-1",
        "projectId": "project-1",
        "trustDomainId": words.named.get("domain", "domain-1"),
        "policy": words.named.get("policy", "sandbox_preferred"),
        "resources": resources,
        "repository": words.named.get("repository", "demo"),
        "expiresInMs": words.number("expires", 30_000),
    }
    if "until" in words.named:
        payload["hostFallback"] = {"reason": "migration", "expiresAt": words.named["until"]}
    return parse(Offer, payload, what="Offer")


def _shown(verdict: Verdict) -> str:
    if verdict.accepted:
        return f"accepted {verdict.runtime}"
    return f"rejected {verdict.code}" + (f": {verdict.detail}" if verdict.detail else "")
