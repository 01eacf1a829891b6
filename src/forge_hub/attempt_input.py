"""What an attempt is given, once and for all."""

from __future__ import annotations

from typing import Annotated, Final, Self

import structlog
from pydantic import Field, ValidationError
from sqlalchemy import RowMapping

from forge_core.placement import Wanted
from forge_core.resources import ResourceVector
from forge_core.wire.base import Commit, Id, Name, WireModel
from forge_core.wire.codes import Policy, PublicationMode
from forge_core.wire.from_hub import (
    Agent,
    Branch,
    EnvironmentName,
    HostFallback,
    LeaseGrant,
    Limits,
    Network,
    Offer,
    Publication,
    Requirements,
    Start,
)
from forge_core.wire.shapes import Service
from forge_hub.grants import Handles

MAX_LEASE_TTL_MS: Final = 3_600_000
LeaseTtlMs = Annotated[int, Field(strict=True, ge=1_000, le=MAX_LEASE_TTL_MS)]
_log = structlog.get_logger(__name__)


class PublicationRequest(WireModel):
    """How the result is to leave the runner; the credential comes as a grant (B-61)."""

    mode: PublicationMode = PublicationMode.SHARED_FILESYSTEM


class AttemptInput(WireModel):
    """Immutable: each dispatch of an attempt sends exactly this (protocol.md, Attempts and fences).

    ``agent.env`` is kept in the database as it is; secrets travel as grants instead.
    """

    project_id: Id
    trust_domain_id: Id
    policy: Policy = Policy.SANDBOX_REQUIRED
    repository: Name
    input_commit: Commit
    approved_commit: Commit | None = None
    branch: Branch
    resources: ResourceVector = Field(
        default=ResourceVector(slots=1),
        # Of a dataclass the schema would show Python's names (it is no model with aliases).
        json_schema_extra={"default": {"slots": 1}},
    )
    agent: Agent
    limits: Limits = Limits(
        hard_wall_ms=3_600_000, idle_ms=900_000, max_output_bytes=256 * 1024 * 1024
    )
    lease_ttl_ms: LeaseTtlMs = 60_000
    network: Network = Network()
    services: Annotated[tuple[Service, ...], Field(max_length=16)] = ()
    secrets: Annotated[tuple[EnvironmentName, ...], Field(max_length=256)] = ()
    publication: PublicationRequest = PublicationRequest()

    @classmethod
    def kept(cls, row: RowMapping) -> Self | None:
        """The ``input`` of a row with ``attempt_id``.

        None: an earlier version took it, and this one cannot; the log says why, by field.
        """
        try:
            return cls.model_validate(row["input"])
        except ValidationError as error:
            faults = [".".join(map(str, fault["loc"])) for fault in error.errors()]
            _log.error("attempt.input_unusable", attempt_id=row["attempt_id"], fields=faults)
            return None

    @property
    def requirements(self) -> Requirements:
        """What a runner must offer besides resources."""
        return Requirements(
            network_policy=self.network.policy,
            services=self.services,
            publication_mode=self.publication.mode,
        )

    @property
    def publishes(self) -> bool:
        """Whether a runner is to push the result."""
        return self.publication.mode is PublicationMode.BRIDGE_PUSH

    def wanted(self, pinned_runner_id: str | None, host_fallback: HostFallback | None) -> Wanted:
        """The question for placement.

        :param host_fallback: the project's permission, if it counts now.
        """
        return Wanted(
            trust_domain_id=self.trust_domain_id,
            policy=self.policy,
            repository=self.repository,
            resources=self.resources,
            requirements=self.requirements,
            has_approved_commit=self.approved_commit is not None,
            runner_id=pinned_runner_id,
            host_fallback=host_fallback,
        )

    def offer(
        self, to: Addressee, *, expires_in_ms: int, host_fallback: HostFallback | None = None
    ) -> Offer:
        """May I?"""
        return Offer(
            offer_id=to.offer_id,
            attempt_id=to.attempt_id,
            fence=to.fence,
            runner_instance_id=to.instance_id,
            session_id=to.session_id,
            project_id=self.project_id,
            trust_domain_id=self.trust_domain_id,
            policy=self.policy,
            resources=self.resources,
            repository=self.repository,
            approved_commit=self.approved_commit,
            expires_in_ms=expires_in_ms,
            host_fallback=host_fallback,
            requirements=self.requirements,
        )

    def start(self, to: Addressee, *, key: str, handles: Handles) -> Start:
        """Go; ``key`` is the lease key in base64."""
        return Start(
            attempt_id=to.attempt_id,
            fence=to.fence,
            offer_id=to.offer_id,
            runner_instance_id=to.instance_id,
            session_id=to.session_id,
            project_id=self.project_id,
            trust_domain_id=self.trust_domain_id,
            repository=self.repository,
            input_commit=self.input_commit,
            approved_commit=self.approved_commit,
            branch=self.branch,
            agent=self.agent,
            lease=LeaseGrant(ttl_ms=self.lease_ttl_ms, sequence=0, key=key),
            limits=self.limits,
            network=self.network,
            services=self.services,
            secret_grants=() if handles.secrets is None else (handles.secrets,),
            publication=Publication(mode=self.publication.mode, handle=handles.publication),
        )


class Addressee(WireModel):
    """One dispatch of an attempt: who is asked, under which fence."""

    session_id: Id
    attempt_id: Id
    fence: int
    offer_id: Id
    runner_id: Id
    instance_id: Id

    @classmethod
    def of(cls, row: RowMapping) -> Addressee:
        """Out of a dispatch's row."""
        return cls.model_validate({name: row[name] for name in cls.model_fields})
