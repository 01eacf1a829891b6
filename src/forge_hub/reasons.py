"""Why this hub does not accept a message: the closed list behind ``reason`` (wire.md, Reasons)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Reason(StrEnum):
    """The ``reason`` of an acknowledgement with ``"accepted": false``."""

    MALFORMED = "malformed"
    UNSUPPORTED_PROTOCOL = "unsupported_protocol"
    RUNNER_DENIED = "runner_denied"
    TRUST_DOMAIN_MISMATCH = "trust_domain_mismatch"
    INSTANCE_MISMATCH = "instance_mismatch"
    RUNNER_MISMATCH = "runner_mismatch"
    REPORTER_MISMATCH = "reporter_mismatch"
    UNKNOWN_DISPATCH = "unknown_dispatch"
    UNKNOWN_OFFER = "unknown_offer"
    UNKNOWN_REQUEST = "unknown_request"
    STALE_FENCE = "stale_fence"
    EXPIRED = "expired"
    HOST_FALLBACK_DENIED = "host_fallback_denied"
    CANCELLED = "cancelled"
    SEQUENCE_CONFLICT = "sequence_conflict"
    EVENT_CONFLICT = "event_conflict"
    REPORT_CONFLICT = "report_conflict"
    OUTCOME_CHANGED = "outcome_changed"
    GRANT_UNKNOWN = "grant_unknown"
    GRANT_SPENT = "grant_spent"
    NOT_RUNNING = "not_running"
    PUBLICATION_MISMATCH = "publication_mismatch"
    SECRET_UNAVAILABLE = "secret_unavailable"  # noqa: S105 - a code, not a secret
    CREDENTIAL_UNAVAILABLE = "credential_unavailable"


_NOT_ITS_OWN: Final = {
    Reason.MALFORMED,
    Reason.UNKNOWN_DISPATCH,
    Reason.RUNNER_MISMATCH,
    Reason.INSTANCE_MISMATCH,
}
"""What may be wrong with any report about a dispatch (B-83)."""

_NOT_REDEEMED: Final = {
    Reason.GRANT_UNKNOWN,
    Reason.GRANT_SPENT,
    Reason.INSTANCE_MISMATCH,
    Reason.STALE_FENCE,
    Reason.NOT_RUNNING,
}

REASONS: Final[Mapping[str, frozenset[Reason]]] = {
    name: frozenset({Reason.MALFORMED, *more})
    for name, more in {
        "RegisterRunner": {
            Reason.UNSUPPORTED_PROTOCOL,
            Reason.RUNNER_DENIED,
            Reason.TRUST_DOMAIN_MISMATCH,
        },
        "Heartbeat": {Reason.INSTANCE_MISMATCH},
        "ReadAttemptSnapshot": {Reason.INSTANCE_MISMATCH},
        "SubmitOfferDecision": {
            Reason.INSTANCE_MISMATCH,
            Reason.UNKNOWN_DISPATCH,
            Reason.UNKNOWN_OFFER,
            Reason.STALE_FENCE,
            Reason.EXPIRED,
            Reason.CANCELLED,
            Reason.HOST_FALLBACK_DENIED,
        },
        "SubmitDispatchEvent": {
            *_NOT_ITS_OWN,
            Reason.STALE_FENCE,
            Reason.SEQUENCE_CONFLICT,
            Reason.EVENT_CONFLICT,
        },
        "SubmitDispatchResult": {*_NOT_ITS_OWN, Reason.STALE_FENCE, Reason.OUTCOME_CHANGED},
        "SubmitCleanupReport": {*_NOT_ITS_OWN, Reason.REPORTER_MISMATCH, Reason.REPORT_CONFLICT},
        "SubmitPublication": {
            *_NOT_ITS_OWN,
            Reason.STALE_FENCE,
            Reason.PUBLICATION_MISMATCH,
            Reason.OUTCOME_CHANGED,
        },
        "SubmitReapOutcome": {Reason.UNKNOWN_REQUEST, Reason.INSTANCE_MISMATCH},
        "SubmitLegacyResult": {Reason.UNKNOWN_DISPATCH},
        "RedeemSecretGrant": {*_NOT_REDEEMED, Reason.SECRET_UNAVAILABLE},
        "RedeemPublishGrant": {
            *_NOT_REDEEMED,
            Reason.PUBLICATION_MISMATCH,
            Reason.CREDENTIAL_UNAVAILABLE,
        },
    }.items()
}
"""By hub method; the tests hold every answer of the hub against it."""
