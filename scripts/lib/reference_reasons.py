"""The closed lists of wire.md that are no enumeration of the wire: reasons and blockers."""

from __future__ import annotations

from collections.abc import Iterator

from forge_bridge.doctor import checks, engine_checks, inside_checks, policy_checks
from forge_bridge.doctor.results import Check
from forge_core.wire.from_bridge import HUB_METHODS
from forge_hub.reasons import REASONS, Reason

from .reference_markdown import code, table

_REASONS_PROSE = """\
## Reasons

An acknowledgement with `"accepted": false` says why in `reason`. These are all that our hub says;
another hub may have words of its own, for the bridge treats them alike and shows them in its log:

- `RegisterRunner`: no connection; it waits its longest pause and tries again.
- What is answered with [ReplayAck](#replayack): `rejected` sets the message aside in the state
  root, whatever the reason.
- `SubmitOfferDecision`: the reservation runs out, and with it the offer.
- `ReadAttemptSnapshot`: nothing is concluded from it; `Heartbeat`: the next one goes out all the
  same.
- A grant: the attempt fails with `secret_grant_denied` or `publication_denied`."""
_REASONS = {
    Reason.MALFORMED: "It is not what this page says; the detail names the property.",
    Reason.UNSUPPORTED_PROTOCOL: "The hub speaks another `protocolVersion`.",
    Reason.RUNNER_DENIED: "The token belongs to another runner.",
    Reason.TRUST_DOMAIN_MISMATCH: "The token belongs to another trust domain.",
    Reason.INSTANCE_MISMATCH: "It names another instance than this connection's, or than the one "
    "that the dispatch was given to.",
    Reason.RUNNER_MISMATCH: "The dispatch was given to another runner.",
    Reason.REPORTER_MISMATCH: "It names another reporter than this connection's runner and "
    "instance.",
    Reason.UNKNOWN_DISPATCH: "No such attempt and fence, or v1 command, was dispatched.",
    Reason.UNKNOWN_OFFER: "The dispatch was offered under another offer id.",
    Reason.UNKNOWN_REQUEST: "This runner was not asked to reap under that request id.",
    Reason.STALE_FENCE: "A later dispatch of the attempt followed, or this one was given up.",
    Reason.EXPIRED: "The offer had run out, or its instance was gone.",
    Reason.HOST_FALLBACK_DENIED: "It would run on the host, which the project or the operator does "
    "not allow at this moment.",
    Reason.CANCELLED: "The session was cancelled before the start.",
    Reason.SEQUENCE_CONFLICT: "Another event has this sequence.",
    Reason.EVENT_CONFLICT: "The event id belongs to another dispatch.",
    Reason.REPORT_CONFLICT: "The report id belongs to another dispatch, or has other parts.",
    Reason.OUTCOME_CHANGED: "Another outcome or failure code was told before.",
    Reason.GRANT_UNKNOWN: "No such handle was given out for this dispatch.",
    Reason.GRANT_SPENT: "The handle was redeemed before.",
    Reason.NOT_RUNNING: "The dispatch has ended, was cancelled, or its lease is over.",
    Reason.PUBLICATION_MISMATCH: "It names a branch or commit that the grant is not for.",
    Reason.SECRET_UNAVAILABLE: "The hub cannot have a secret; its log says which and why.",
    Reason.CREDENTIAL_UNAVAILABLE: "The hub cannot have the credential; its log says why.",
}
_BLOCKERS_PROSE = """\
## Blockers

`blockers` of [SandboxReadiness](#sandboxreadiness) names the checks of `forge sandbox doctor` that
keep the runner from `sandbox_required`:"""


def reasons() -> Iterator[str]:
    """What an acknowledgement may say; raises KeyError when a reason has no explanation."""
    yield _REASONS_PROSE
    assert REASONS.keys() == HUB_METHODS.keys()
    rows = []
    for reason in Reason:
        methods = [name for name in HUB_METHODS if reason in REASONS[name]]
        said_of = "any" if len(methods) == len(HUB_METHODS) else ", ".join(map(code, methods))
        rows.append((code(reason.value), _REASONS[reason], said_of))
    yield table(("reason", "meaning", "said of"), rows)


def blockers() -> Iterator[str]:
    """The checks that may be named as blockers."""
    yield _BLOCKERS_PROSE
    yield table(("check", "what must hold"), ((code(c.id), c.title) for c in _checks()))


def _checks() -> list[Check]:
    """Every check of the doctor, by its id."""
    modules = (engine_checks, inside_checks, policy_checks, checks)
    found = {c.id: c for m in modules for c in vars(m).values() if isinstance(c, Check)}
    return [found[name] for name in sorted(found)]
