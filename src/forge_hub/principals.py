"""Who speaks to the hub."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiPrincipal:
    """A person or program that uses the API."""

    name: str


@dataclass(frozen=True, slots=True)
class RunnerPrincipal:
    """A bridge: which runner and trust domain its token is good for; None: any."""

    runner_id: str | None = None
    trust_domain_id: str | None = None


Principal = ApiPrincipal | RunnerPrincipal
