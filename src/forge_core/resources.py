"""Weighted resource vectors and the one question asked of them (B-10, B-21, B-22)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Final

from pydantic import ConfigDict

from forge_core.errors import RefusedError
from forge_core.wire.base import MAX_INT, WIRE_CONFIG, Count
from forge_core.wire.codes import RejectionCode


@dataclass(frozen=True, slots=True)
class ResourceVector:
    """What is used or asked for; an absent component is nothing.

    ``memory_bytes`` and ``disk_bytes`` in bytes, ``cpu_millis`` in thousandths of one CPU.
    """

    __pydantic_config__: ClassVar[ConfigDict] = WIRE_CONFIG

    slots: Count = 0
    builds: Count = 0
    pids: Count = 0
    memory_bytes: Count = 0
    cpu_millis: Count = 0
    disk_bytes: Count = 0

    def __add__(self, other: ResourceVector) -> ResourceVector:
        return ResourceVector(
            self.slots + other.slots,
            self.builds + other.builds,
            self.pids + other.pids,
            self.memory_bytes + other.memory_bytes,
            self.cpu_millis + other.cpu_millis,
            self.disk_bytes + other.disk_bytes,
        )

    def __sub__(self, other: ResourceVector) -> ResourceVector:
        return ResourceVector(
            self.slots - other.slots,
            self.builds - other.builds,
            self.pids - other.pids,
            self.memory_bytes - other.memory_bytes,
            self.cpu_millis - other.cpu_millis,
            self.disk_bytes - other.disk_bytes,
        )


@dataclass(frozen=True, slots=True)
class ResourceCapacity:
    """What there is; an absent component has no ceiling, except ``slots``, always present."""

    __pydantic_config__: ClassVar[ConfigDict] = WIRE_CONFIG

    slots: Count
    builds: Count | None = None
    pids: Count | None = None
    memory_bytes: Count | None = None
    cpu_millis: Count | None = None
    disk_bytes: Count | None = None

    @property
    def whole(self) -> ResourceVector:
        """Everything that has a ceiling: beside it nothing fits, since all requests take a slot."""
        return ResourceVector(
            self.slots,
            self.builds or 0,
            self.pids or 0,
            self.memory_bytes or 0,
            self.cpu_millis or 0,
            self.disk_bytes or 0,
        )


COMPONENTS: Final[tuple[str, ...]] = tuple(field.name for field in fields(ResourceVector))

CAPACITY_CODES: Final = {
    "slots": RejectionCode.CAPACITY_SLOTS,
    "builds": RejectionCode.CAPACITY_BUILDS,
    "pids": RejectionCode.CAPACITY_PIDS,
    "memory_bytes": RejectionCode.CAPACITY_MEMORY,
    "cpu_millis": RejectionCode.CAPACITY_CPU,
    "disk_bytes": RejectionCode.CAPACITY_DISK,
}
"""How a refusal names the component that has no room left (codes.md, RejectionCode)."""


def _check(vector: ResourceVector | ResourceCapacity, what: str) -> None:
    for name in COMPONENTS:
        value = getattr(vector, name)
        if value is None and isinstance(vector, ResourceCapacity) and name != "slots":
            continue
        if type(value) is not int or not 0 <= value <= MAX_INT:
            raise RefusedError(
                f"cannot weigh {what}: {name} must be an integer from 0 to 2^63-1",
                code="malformed",
                field=name,
            )


def exceeded_component(
    used: ResourceVector, requested: ResourceVector, capacity: ResourceCapacity
) -> str | None:
    """The first component, in wire order, that has no room left; None when all fit.

    Without a ceiling the sum must still be a number that the wire can carry.
    """
    for name in COMPONENTS:
        ceiling = getattr(capacity, name)
        limit = MAX_INT if ceiling is None else ceiling
        if getattr(used, name) + getattr(requested, name) > limit:
            return name
    return None


def can_reserve_sandbox_resources(
    used: ResourceVector, requested: ResourceVector, capacity: ResourceCapacity
) -> bool:
    """Whether ``requested`` fits beside ``used`` under every ceiling of ``capacity`` (B-10).

    :raises RefusedError: a component is negative, not an integer, or beyond 2^63-1.
    """
    _check(used, "the used resources")
    _check(requested, "the requested resources")
    _check(capacity, "the capacity")
    return exceeded_component(used, requested, capacity) is None
