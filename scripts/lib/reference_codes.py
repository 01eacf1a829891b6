"""docs/reference/codes.md, from the closed lists of the wire."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from enum import StrEnum

from forge_core.wire import codes
from forge_core.wire.codes import FailureCode, RejectionCode, outcome_of

from .reference_markdown import code, page, prose, table

_REJECTIONS = {
    RejectionCode.DRAINING: ("The runner drains.", "Resume it in Profile Settings."),
    RejectionCode.STOPPING: ("The bridge is on its way down.", "Offer again after its restart."),
    RejectionCode.CAPACITY_SLOTS: (
        "All slots are taken; degraded ones count.",
        "Wait, raise `FORGE_MAX_CONCURRENT_SANDBOXES`, or see what resists removal.",
    ),
    RejectionCode.CAPACITY_BUILDS: (
        "All builds are taken.",
        "Wait, or raise `FORGE_MAX_CONCURRENT_SANDBOX_BUILDS`.",
    ),
    RejectionCode.CAPACITY_PIDS: (
        "Too few processes are left.",
        "Ask for fewer, or raise `FORGE_SANDBOX_PID_CAPACITY`.",
    ),
    RejectionCode.CAPACITY_MEMORY: (
        "Too little memory is left.",
        "Ask for less, or raise `FORGE_SANDBOX_MEMORY_CAPACITY`.",
    ),
    RejectionCode.CAPACITY_CPU: (
        "Too little CPU is left.",
        "Ask for less, or raise `FORGE_SANDBOX_CPU_CAPACITY_MILLIS`.",
    ),
    RejectionCode.CAPACITY_DISK: ("Too little disk is left.", "Ask for less, or free some."),
    RejectionCode.CAPACITY_NETWORKS: (
        "The subnet pool has none left.",
        "Widen `FORGE_SANDBOX_SUBNET_POOL`.",
    ),
    RejectionCode.DISK_PRESSURE: (
        "The disk passed its high watermark, or a durable write failed.",
        "Free space until usage is below `FORGE_DISK_LOW_WATERMARK_PERCENT`.",
    ),
    RejectionCode.TRUST_DOMAIN_MISMATCH: (
        "The project belongs to another trust domain.",
        "Pick another runner, or set `FORGE_TRUST_DOMAIN_ID`.",
    ),
    RejectionCode.RUNTIME_UNAVAILABLE: (
        "No container can run here.",
        "Run `forge sandbox doctor`.",
    ),
    RejectionCode.POLICY_UNSATISFIED: (
        "`sandbox_required` cannot be met; the detail lists the blockers.",
        "Run `forge sandbox doctor`.",
    ),
    RejectionCode.HOST_EXECUTION_DENIED: (
        "The operator does not allow host execution.",
        "Use a sandbox, or set `FORGE_ALLOW_HOST_EXECUTION=true`.",
    ),
    RejectionCode.HOST_FALLBACK_DENIED: (
        "Host fallback is not allowed, or no longer.",
        "Save a reason and an expiry for the project, and enable it for the runner.",
    ),
    RejectionCode.UNKNOWN_REPOSITORY: (
        "The runner does not serve it.",
        "Run `forge-bridge add-repo NAME PATH`.",
    ),
    RejectionCode.STALE_FENCE: ("A later dispatch is known.", "None: the offer is out of date."),
    RejectionCode.EXPIRED: ("The offer was too old.", "Offer again."),
    RejectionCode.MALFORMED: (
        "The message is not what the protocol says.",
        "Mend the hub; the detail names the property.",
    ),
}
_FAILURES = {
    FailureCode.START_TIMEOUT: "No start came for the reservation, none was held, or what allowed "
    "it on the host had ended.",
    FailureCode.WORKSPACE_INVALID: "The input commit cannot be had or materialised.",
    FailureCode.CONTRACT_INVALID: "The contract of the approved commit is missing or wrong.",
    FailureCode.IMAGE_BUILD_FAILED: "An image stage failed; its log stays on the runner.",
    FailureCode.IMAGE_POLICY_DENIED: "A built image did not pass its gates.",
    FailureCode.SIGNATURE_INVALID: "An external image's signature does not verify.",
    FailureCode.SERVICE_NOT_READY: "A service was not ready in time, or died.",
    FailureCode.SECRET_GRANT_DENIED: "Secrets could not be redeemed; a handle works once.",
    FailureCode.LEASE_EXPIRED: "No renewal came in time: hub, network or bridge were away.",
    FailureCode.HARD_WALL_EXPIRED: "Agent and output together took as long as any may.",
    FailureCode.IDLE_EXPIRED: "The agent printed nothing for too long.",
    FailureCode.CANCELLED: "Somebody cancelled it.",
    FailureCode.SUPERSEDED: "A later dispatch of the same attempt took its place.",
    FailureCode.AGENT_FAILED: "The agent ended with an error of its own.",
    FailureCode.OUT_OF_MEMORY: "The kernel killed it at its memory limit.",
    FailureCode.OUTPUT_LIMIT: "It printed or changed more than it may.",
    FailureCode.OUTPUT_INVALID: "What came back is not one commit on the input commit.",
    FailureCode.PUBLICATION_DENIED: "No credential was given out, or the remote refused the push.",
    FailureCode.PUBLICATION_STALE: "The remote branch is not where the attempt began.",
    FailureCode.DISK_FULL: "The engine's disk is full.",
    FailureCode.ENGINE_LOST: "The Docker engine went away or refused.",
    FailureCode.SUPERVISOR_LOST: "PID 1 of the container ended without saying how.",
    FailureCode.BRIDGE_STOPPED: "The bridge stopped, or crashed and cleaned up afterwards.",
    FailureCode.INTERNAL_ERROR: "The bridge itself failed; its log says how.",
}


def codes_page() -> str:
    """The page; raises KeyError when a code has no explanation."""
    return page(
        "Codes",
        "Every closed list of [the wire](wire.md). New words may be added; none changes its "
        "meaning.",
        _section(
            RejectionCode,
            table(
                ("code", "meaning", "what to do"),
                ((code(word.value), *_REJECTIONS[word]) for word in RejectionCode),
            ),
        ),
        _section(
            FailureCode,
            table(
                ("code", "meaning", "outcome"),
                (
                    (code(word.value), _FAILURES[word], code(outcome_of(word).value))
                    for word in FailureCode
                ),
            ),
        ),
        *(_section(kind, _words(kind)) for kind in _others()),
    )


def _others() -> Iterator[type[StrEnum]]:
    for _, kind in inspect.getmembers(codes, inspect.isclass):
        if issubclass(kind, StrEnum) and kind not in {StrEnum, RejectionCode, FailureCode}:
            yield kind


def _section(kind: type[StrEnum], body: str) -> str:
    return f"## {kind.__name__}\n\n{prose(kind.__doc__)}\n\n{body}"


def _words(kind: type[StrEnum]) -> str:
    return ", ".join(code(word.value) for word in kind)
