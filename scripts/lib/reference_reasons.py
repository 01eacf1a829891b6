"""The closed lists of wire.md that are no enumeration of the wire: reasons and blockers."""

from __future__ import annotations

from collections.abc import Iterator

from forge_bridge.doctor import (
    checks,
    egress_checks,
    engine_checks,
    inside_checks,
    policy_checks,
)
from forge_bridge.doctor.results import Gate
from forge_core.blockers import OF_A_SESSION, Blocker
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

`blockers` of [SandboxReadiness](#sandboxreadiness) names what keeps the runner from
`sandbox_required`. The names are the ids of the checks of `forge sandbox doctor`, which shows what
was seen, and the remedy that fits it; [what each looks at](hardening.md#preflight). A hub that
places no session there says the same names."""
_BLOCKERS = {
    Blocker.ENGINE: "Start the engine, or name it: `FORGE_DOCKER_CONTEXT`.",
    Blocker.DOCKER_DESKTOP: "Use a rootless engine on Linux; "
    "`FORGE_ALLOW_DOCKER_DESKTOP_SANDBOX=true` allows the other policies only.",
    Blocker.ROOTLESS: "`dockerd-rootless-setuptool.sh install`, and `docker context use rootless`.",
    Blocker.TOOLING_IMAGE: "Set `FORGE_AGENT_TOOLING_IMAGE=repository@sha256:<64 hex>`, pull that "
    "image, and build it as [the page about it](tooling-image.md) says.",
    Blocker.CONTAINER: "See the engine's log; of a profile that it cannot use, mend "
    "`FORGE_SANDBOX_SECCOMP_PROFILE`.",
    **dict.fromkeys(
        (
            Blocker.USER,
            Blocker.CAPABILITIES,
            Blocker.NO_NEW_PRIVILEGES,
            Blocker.READ_ONLY_ROOT,
            Blocker.TMPFS,
            Blocker.MOUNTS,
            Blocker.NETWORK,
        ),
        "Do not use this engine: it does not apply what it was asked for.",
    ),
    Blocker.SECCOMP: "Set `FORGE_SANDBOX_SECCOMP_PROFILE` to [a hardened profile](seccomp.md).",
    Blocker.LSM: "Enable AppArmor or SELinux on the host, load the profile, and set "
    "`FORGE_SANDBOX_LSM_SECURITY_OPT`.",
    Blocker.LIMITS: "Boot with cgroup v2, and delegate `cpu cpuset io memory pids` to the user of "
    "a rootless engine (`Delegate=` of `user@.service`).",
    Blocker.DISK_QUOTA: "Put the engine's data root on XFS mounted with `pquota`, or give it a "
    "disk of its own and set `FORGE_SANDBOX_DEDICATED_DISK=true`.",
    Blocker.IMAGE_POLICY: "Set `FORGE_SANDBOX_IMAGE_POLICY_ENFORCED=true`, its two tools and the "
    "signing key, so that each works on the tooling image ([image policy](image-policy.md)).",
    Blocker.SIGNATURES: "Set `FORGE_SANDBOX_SIGNATURE_EXECUTABLE` and "
    "`FORGE_SANDBOX_SIGNATURE_PUBLIC_KEY`, and sign the tooling image with that key.",
    Blocker.BUILDER: "Set `FORGE_SANDBOX_BUILDKIT_IMAGE`, on an engine that enforces limits.",
    Blocker.BUILD_EGRESS: "Set `FORGE_SANDBOX_BUILD_EGRESS_ENFORCED=true` for a builder of its own "
    "behind such control.",
    Blocker.PUBLICATION_MODE: "Set `FORGE_SANDBOX_PUBLICATION_MODE=bridge_push`, with Git 2.31 or "
    "later and its https transport on the host.",
    Blocker.EGRESS: "Mend [the proxy](egress.md), or unset `FORGE_SANDBOX_EGRESS_ENFORCED`.",
}
_OF_A_SESSION_PROSE = """\
What a session itself lacks is named in the same way, when it is placed and again when a runner is
asked:"""
_OF_A_SESSION = {
    Blocker.APPROVED_COMMIT: (
        "A commit is approved, whose contract counts",
        "Send `approvedCommit` with the session, or save it in the project's sandbox policy.",
    ),
    Blocker.OPEN_PUBLIC: (
        "The network policy is another than `open_public`, which is for development",
        "Ask for `none` or `public_allowlist`.",
    ),
}


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
    """What may be named as a blocker; raises KeyError when one has no check or no remedy."""
    modules = (engine_checks, inside_checks, policy_checks, egress_checks, checks)
    gates = {g.id: g for m in modules for g in vars(m).values() if isinstance(g, Gate)}
    yield _BLOCKERS_PROSE
    yield table(
        ("blocker", "what must hold", "what to do"),
        (
            (code(blocker.value), gates[blocker].title, _BLOCKERS[blocker])
            for blocker in Blocker
            if blocker not in OF_A_SESSION
        ),
    )
    yield _OF_A_SESSION_PROSE
    yield table(
        ("blocker", "what must hold", "what to do"),
        (
            (code(blocker.value), *_OF_A_SESSION[blocker])
            for blocker in Blocker
            if blocker in OF_A_SESSION
        ),
    )
