"""Offer decisions per second in the core, next to the floor below them.

The floor is what no decision can do without: one look-up in a dictionary of this size and one
frozen dataclass for the answer.  The ratio to it holds from machine to machine where rates do
not.  Each decision is a new offer; every other one is accepted, and what it held is freed.

    python benchmarks/offer_decisions.py [--rounds 5] [--held 64] [--json]
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import perf_counter

from forge_core.admission import Admission, RunnerFacts, Verdict
from forge_core.resources import ResourceCapacity, ResourceVector
from forge_core.wire.codes import NetworkPolicy, Policy, PublicationMode, Runtime
from forge_core.wire.from_hub import Offer

DECISIONS = 20_000
GOAL_PER_SECOND = 50_000


def facts(slots: int) -> RunnerFacts:
    return RunnerFacts(
        trust_domain_id="domain-1",
        capacity=ResourceCapacity(slots=slots, pids=2**20, memory_bytes=2**42, cpu_millis=2**20),
        repositories=frozenset({"demo"}),
        runtimes=frozenset({Runtime.DOCKER}),
        network_policies=frozenset({NetworkPolicy.NONE}),
        publication_modes=frozenset({PublicationMode.SHARED_FILESYSTEM}),
    )


def offers(prefix: str, count: int) -> list[Offer]:
    """Every other one asks for more than there is."""
    return [
        Offer(
            offer_id=f"{prefix}-{n}",
            attempt_id=f"{prefix}-{n}",
            fence=1,
            runner_instance_id="instance-1",
            session_id="session-1",
            project_id="project-1",
            trust_domain_id="domain-1",
            policy=Policy.SANDBOX_PREFERRED,
            resources=ResourceVector(slots=1, memory_bytes=2**30 if n % 2 else 2**43),
            repository="demo",
            expires_in_ms=30_000,
        )
        for n in range(count)
    ]


def decide_all(wanted: list[Offer], held: int) -> float:
    """Seconds for all decisions, and for freeing what they held."""
    admission, runner = Admission(), facts(held + 1)
    for offer in offers("held", 2 * held):
        admission.decide(offer, runner, 0)
    assert len(admission.reservations) == held
    began = perf_counter()
    for now_ms, offer in enumerate(wanted):
        if admission.decide(offer, runner, now_ms).accepted:
            admission.free((offer.attempt_id, offer.fence))
    seconds = perf_counter() - began
    assert len(admission.reservations) == held
    return seconds


def floor_all(wanted: list[Offer]) -> float:
    """Seconds for one look-up and one answer for each offer."""
    known = {offer.offer_id: offer for offer in wanted}
    began = perf_counter()
    for offer in wanted:
        known.get(offer.offer_id)
        Verdict(runtime=Runtime.DOCKER)
    return perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--held", type=int, default=64, help="reservations held all the while")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    wanted = offers("offer", DECISIONS)
    pairs = [
        (decide_all(wanted, arguments.held), floor_all(wanted)) for _ in range(arguments.rounds)
    ]
    per_second = DECISIONS / median(seconds for seconds, _ in pairs)
    ratio = median(seconds / floor for seconds, floor in pairs)
    if arguments.json:
        print(
            json.dumps({"decisionsPerSecond": round(per_second), "ratioToFloor": round(ratio, 1)})
        )
        return
    print(f"offer decisions   {per_second:>10,.0f} per second   (goal {GOAL_PER_SECOND:,})")
    print(f"time per decision {ratio:>10.1f} times one look-up and one dataclass")


if __name__ == "__main__":
    main()
