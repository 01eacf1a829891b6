"""Hub → bridge: every client target's payload (wire.md, Hub → bridge)."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Final, Self

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from forge_core.egress_domains import Domain
from forge_core.resources import ResourceVector
from forge_core.wire.base import (
    Commit,
    Count,
    Fence,
    Id,
    Name,
    Positive,
    Text,
    Timestamp,
    WireModel,
)
from forge_core.wire.codes import NetworkPolicy, Policy, PublicationMode, ReapScope
from forge_core.wire.lease_mac import KEY_BYTES
from forge_core.wire.shapes import RunnerSettings, Service

MAX_WALL_MS: Final = 8 * 60 * 60 * 1000
"""Nothing runs longer than eight hours (B-36)."""

MAX_ARGUMENT_BYTES: Final = 130_048
"""127 KiB: Linux starts no program with an argument, or a variable and its name, of 128 KiB
(execve(2), MAX_ARG_STRLEN); the longest name has room beside such a value."""


def _can_be_passed(value: str) -> str:
    if len(value.encode("utf-8", "surrogatepass")) > MAX_ARGUMENT_BYTES:
        raise ValueError(f"must have at most {MAX_ARGUMENT_BYTES} bytes of UTF-8")
    return value


Argument = Annotated[
    str,
    Field(max_length=MAX_ARGUMENT_BYTES, pattern=r"^[^\0]*\Z"),
    AfterValidator(_can_be_passed),
]
Argv = Annotated[tuple[Argument, ...], Field(min_length=1, max_length=4096)]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}\Z")]
Environment = Annotated[dict[EnvironmentName, Argument], Field(max_length=4096)]
DurationMs = Annotated[int, Field(strict=True, ge=1, le=MAX_WALL_MS)]
Branch = Annotated[
    str,
    Field(
        min_length=1,
        max_length=255,
        pattern=(
            r"^(?!-)(?!/)(?!.*(?:\.\.|//|@\{|/\.|\.lock(?:/|\Z)))(?!\.)"
            r"[^\x00-\x20\x7f~^:?*\[\\]+(?<![/.])\Z"
        ),
    ),
]
"""What ``git check-ref-format --branch`` lets through, and never an option."""


class Dispatch(WireModel):
    """v1: one command on the host (B-03)."""

    dispatch_id: Id
    repository: Name
    command: Argv
    env: Environment = Field(default_factory=dict, repr=False)
    timeout_ms: DurationMs


class HostFallback(WireModel):
    """The project owner's permission to run on the host for a while (B-53)."""

    reason: Text
    expires_at: Timestamp


class Requirements(WireModel):
    """What the attempt needs besides resources."""

    network_policy: NetworkPolicy = NetworkPolicy.NONE
    services: Annotated[tuple[Service, ...], Field(max_length=16)] = ()
    publication_mode: PublicationMode = PublicationMode.SHARED_FILESYSTEM


class Offer(WireModel):
    """May I?"""

    offer_id: Id
    attempt_id: Id
    fence: Fence
    runner_instance_id: Id
    session_id: Id
    project_id: Id
    trust_domain_id: Id
    policy: Policy
    resources: ResourceVector
    repository: Name
    approved_commit: Commit | None = None
    expires_in_ms: DurationMs
    host_fallback: HostFallback | None = None
    requirements: Requirements = Requirements()


class Agent(WireModel):
    """What to run; the prompt is its variable ``FORGE_PROMPT``."""

    provider: Name
    argv: Argv
    env: Environment = Field(default_factory=dict, repr=False)
    prompt: Argument | None = Field(default=None, repr=False)


class LeaseGrant(WireModel):
    """The first lease and the key that binds its renewals; the key lives in memory only."""

    ttl_ms: DurationMs
    sequence: Count
    key: str = Field(repr=False)

    @field_validator("key")
    @classmethod
    def _thirty_two_bytes(cls, value: str) -> str:
        try:
            raw = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != KEY_BYTES:
            raise ValueError("must be base64 of exactly 32 bytes")
        return value

    @property
    def key_bytes(self) -> bytes:
        """The key as HMAC takes it."""
        return base64.b64decode(self.key)


class Limits(WireModel):
    """The deadlines and the output bound of one attempt (B-36)."""

    hard_wall_ms: DurationMs
    idle_ms: DurationMs
    max_output_bytes: Annotated[int, Field(strict=True, ge=1, le=2**40)]


class Network(WireModel):
    """What the sandbox may reach (B-54)."""

    policy: NetworkPolicy = NetworkPolicy.NONE
    domains: Annotated[tuple[Domain, ...], Field(max_length=1024)] = ()


class Publication(WireModel):
    """How the result leaves; the handle is opaque and works once (B-61)."""

    mode: PublicationMode = PublicationMode.SHARED_FILESYSTEM
    handle: Name | None = Field(default=None, repr=False)


class Start(WireModel):
    """Go."""

    attempt_id: Id
    fence: Fence
    offer_id: Id
    runner_instance_id: Id
    session_id: Id
    project_id: Id
    trust_domain_id: Id
    repository: Name
    input_commit: Commit
    approved_commit: Commit | None = None
    branch: Branch
    agent: Agent
    lease: LeaseGrant
    limits: Limits
    network: Network = Network()
    services: Annotated[tuple[Service, ...], Field(max_length=16)] = ()
    secret_grants: Annotated[tuple[Name, ...], Field(max_length=256)] = Field(
        default=(), repr=False
    )
    publication: Publication = Publication()


class LeaseUpdate(WireModel):
    """A renewal; believed only with its MAC (B-70)."""

    attempt_id: Id
    fence: Fence
    sequence: Count
    ttl_ms: DurationMs
    issued_at: Timestamp
    mac: Annotated[str, Field(max_length=64)]


class Cancel(WireModel):
    """End it; for v1, ``attemptId`` is the dispatch id and ``fence`` is 0."""

    attempt_id: Id
    fence: Count
    reason: str | None = None


class Reap(WireModel):
    """Run a pass now (B-88); of scope ``attempt``, over the one dispatch that it names."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"scope": {"const": "attempt"}}},
            "then": {"required": ["attemptId", "fence"]},
        }
    )

    request_id: Id
    runner_id: Id
    runner_instance_id: Id
    scope: ReapScope
    attempt_id: Id | None = None
    fence: Positive | None = None

    @model_validator(mode="after")
    def _names_its_attempt(self) -> Self:
        if self.scope is ReapScope.ATTEMPT and self.dispatch is None:
            raise ValueError("scope attempt needs attemptId and fence")
        return self

    @property
    def dispatch(self) -> tuple[str, int] | None:
        """The only dispatch that the pass is about; None: all."""
        if self.scope is ReapScope.ORPHANS or self.attempt_id is None or self.fence is None:
            return None
        return self.attempt_id, self.fence


class RunnerSettingsChanged(WireModel):
    """The hub's Profile Settings changed."""

    settings: RunnerSettings


CLIENT_TARGETS: Final[dict[str, type[WireModel]]] = {
    "Dispatch": Dispatch,
    "Offer": Offer,
    "Start": Start,
    "LeaseUpdate": LeaseUpdate,
    "Cancel": Cancel,
    "Reap": Reap,
    "RunnerSettings": RunnerSettingsChanged,
}
