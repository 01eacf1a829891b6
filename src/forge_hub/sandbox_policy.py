"""What the owner of a project has decided about its attempts (B-20, B-52, B-53, B-95)."""

from __future__ import annotations

from typing import Final

from forge_core.errors import RefusedError
from forge_core.host_fallback import refuse_fallback
from forge_core.wire.base import Commit, Id, WireModel
from forge_core.wire.codes import Policy
from forge_core.wire.from_hub import HostFallback
from forge_core.wire.shapes import RunnerSettings
from forge_hub.attempt_input import AttemptInput

_STRICTEST_FIRST: Final = (Policy.SANDBOX_REQUIRED, Policy.SANDBOX_PREFERRED, Policy.HOST)


class SandboxPolicy(WireModel):
    """The least that every session of the project must keep.

    :ivar policy: no session may ask for a weaker one.
    :ivar approved_commit: the one whose contract counts; absent: each session may name its own.
    :ivar host_fallback: permission for `sandbox_preferred` sessions to run on a host that has no
        sandbox at the moment; ends at most 30 days from when it is saved.
    """

    policy: Policy = Policy.SANDBOX_REQUIRED
    trust_domain_id: Id
    approved_commit: Commit | None = None
    host_fallback: HostFallback | None = None

    def require_sound(self, now: str) -> None:
        """Whether it may be saved at this moment.

        :raises RefusedError: code ``host_fallback_refused``.
        """
        if self.host_fallback is None:
            return
        why = refuse_fallback(self.host_fallback, utc=now, skew_ms=0)
        if self.policy is not Policy.SANDBOX_PREFERRED:
            why = f"means nothing where the policy is {self.policy}, which never falls back"
        if why is not None:
            raise RefusedError(
                f"cannot save the sandbox policy: the permission to fall back to a host {why}",
                code="host_fallback_refused",
                field="hostFallback",
            )

    def applied(self, given: AttemptInput) -> AttemptInput:
        """What a session asks for, with the approved commit of the project.

        :raises RefusedError: code ``policy_conflict``: it asks for what the project rules out.
        """
        if given.trust_domain_id != self.trust_domain_id:
            raise _conflict(
                given, "trustDomainId", f"belongs to trust domain {self.trust_domain_id}"
            )
        if _STRICTEST_FIRST.index(given.policy) > _STRICTEST_FIRST.index(self.policy):
            raise _conflict(given, "policy", f"asks for {self.policy} at least")
        commit = given.approved_commit or self.approved_commit
        if self.approved_commit is not None and commit != self.approved_commit:
            raise _conflict(given, "approvedCommit", f"has approved {self.approved_commit}")
        return given.model_copy(update={"approved_commit": commit})


def usable_fallback(fallback: HostFallback | None, policy: Policy, now: str) -> HostFallback | None:
    """The permission, if it counts at this moment for an attempt with this policy."""
    if policy is not Policy.SANDBOX_PREFERRED or refuse_fallback(fallback, utc=now) is not None:
        return None
    return fallback


def refuse_host(
    policy: Policy, fallback: HostFallback | None, settings: RunnerSettings, now: str
) -> str | None:
    """Why a runner may not take an attempt on its host at this moment; None: it may.

    Whether host execution is allowed there at all, only the runner knows.
    """
    if policy is Policy.HOST:
        return None
    if policy is Policy.SANDBOX_REQUIRED:
        return "sandbox_required never runs on a host"
    if not settings.host_fallback_enabled:
        return "host fallback is not enabled for the runner"
    why = refuse_fallback(fallback, utc=now)
    return None if why is None else f"the project's permission {why}"


def _conflict(given: AttemptInput, field: str, why: str) -> RefusedError:
    return RefusedError(
        f"cannot dispatch this session: project {given.project_id} {why}",
        code="policy_conflict",
        field=field,
    )
