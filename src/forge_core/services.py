"""The servers that can run beside an agent: what each needs, and how the agent finds it (B-55).

sandbox.md, *Services*; what their images must bring is in docs/reference/service-images.md.
What a service takes comes out of the attempt's own resources, so that a reservation holds
whatever its containers may use together.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_core.errors import RefusedError
from forge_core.resources import ResourceVector
from forge_core.sandbox_spec import MIN_CPU_MILLIS
from forge_core.wire.codes import ServiceName

USER: Final = "forge"
DATABASE: Final = "forge"
DATA: Final = "/data"
"""Where a server keeps what it is given: in memory, half of what the container has."""

AGENT_ALIAS: Final = "agent"
"""How services find the agent, the browser above all."""

PASSWORD_VARIABLE: Final = "FORGE_SERVICE_PASSWORD"  # noqa: S105 - its name, not its value
MAX_LINE_CHARACTERS: Final = 4_096
LEAST_AGENT: Final = ResourceVector(pids=16, memory_bytes=64 * 2**20, cpu_millis=MIN_CPU_MILLIS)
"""What its services must leave an agent."""

_ONE_MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class ServiceKind:
    """One entry of the catalogue.

    :param port: where it listens, in its container.
    :param account: of its image, as which it runs, because it insists on one; None: any user does.
    :param has_password: whether it knows who may use it; else only the network decides.
    :param least: what it cannot do without.
    :param percent: what it gets of each of the attempt's resources, when that is more.
    """

    name: ServiceName
    port: int
    account: str | None
    has_password: bool
    least: ResourceVector
    percent: ResourceVector

    @property
    def role(self) -> str:
        """Of its container, in labels and names."""
        return f"service-{self.name.value}"

    @property
    def check_id(self) -> str:
        """Of its finding in the preflight."""
        return f"service_{self.name.value}"

    def share(self, whole: ResourceVector) -> ResourceVector:
        """What it gets of an attempt's resources."""
        least, percent = self.least, self.percent
        return ResourceVector(
            pids=max(least.pids, whole.pids * percent.pids // 100),
            memory_bytes=max(least.memory_bytes, whole.memory_bytes * percent.memory_bytes // 100),
            cpu_millis=max(least.cpu_millis, whole.cpu_millis * percent.cpu_millis // 100),
        )


_KINDS: Final = (
    ServiceKind(
        ServiceName.POSTGRES,
        port=5432,
        account="postgres",  # initdb refuses a user without a name
        has_password=True,
        least=ResourceVector(pids=48, memory_bytes=192 * _ONE_MIB, cpu_millis=MIN_CPU_MILLIS),
        percent=ResourceVector(pids=20, memory_bytes=25, cpu_millis=25),
    ),
    ServiceKind(
        ServiceName.REDIS,
        port=6379,
        account=None,
        has_password=True,
        least=ResourceVector(pids=16, memory_bytes=64 * _ONE_MIB, cpu_millis=MIN_CPU_MILLIS),
        percent=ResourceVector(pids=5, memory_bytes=10, cpu_millis=10),
    ),
    ServiceKind(
        ServiceName.BROWSER,
        port=9222,
        account=None,
        has_password=False,
        least=ResourceVector(pids=160, memory_bytes=512 * _ONE_MIB, cpu_millis=MIN_CPU_MILLIS),
        percent=ResourceVector(pids=40, memory_bytes=30, cpu_millis=35),
    ),
)
CATALOGUE: Final[Mapping[ServiceName, ServiceKind]] = MappingProxyType(
    {kind.name: kind for kind in _KINDS}
)


@dataclass(frozen=True, slots=True)
class Shares:
    """An attempt's resources, container by container; together they are the whole."""

    agent: ResourceVector
    services: Mapping[ServiceName, ResourceVector]


def share_out(whole: ResourceVector, names: Collection[ServiceName]) -> Shares:
    """Divide what an attempt holds among its agent and its services.

    :raises RefusedError: code ``policy_unsatisfied``: too little is left for the agent.
    """
    services = {name: CATALOGUE[name].share(whole) for name in names}
    agent = whole
    for share in services.values():
        agent -= share
    for component in ("memory_bytes", "cpu_millis", "pids"):
        left, least = getattr(agent, component), getattr(LEAST_AGENT, component)
        if services and left < least:
            asked = getattr(whole, component)
            raise RefusedError(
                f"cannot run {', '.join(sorted(services))} beside the agent: of {asked} "
                f"{component} they leave it {max(left, 0)}, and it needs {least}; ask for more",
                code="policy_unsatisfied",
                field=component,
            )
    return Shares(agent, services)


def variables(name: ServiceName, password: str, address: str) -> dict[str, str]:
    """How the agent finds a service: the variables that its common clients read.

    :param address: of the service's container on the agent's network; the browser answers to no
        name (its DevTools refuse a ``Host`` that is one), the others are called by theirs.
    """
    host, port = name.value, str(CATALOGUE[name].port)
    match name:
        case ServiceName.POSTGRES:
            return {
                "DATABASE_URL": f"postgresql://{USER}:{password}@{host}:{port}/{DATABASE}",
                "PGHOST": host,
                "PGPORT": port,
                "PGUSER": USER,
                "PGPASSWORD": password,
                "PGDATABASE": DATABASE,
            }
        case ServiceName.REDIS:
            return {
                "REDIS_URL": f"redis://:{password}@{host}:{port}/0",
                "REDIS_HOST": host,
                "REDIS_PORT": port,
                "REDIS_PASSWORD": password,
            }
        case ServiceName.BROWSER:
            return {"BROWSER_CDP_URL": f"http://{address}:{port}"}


def serve_request(kind: ServiceKind, share: ResourceVector, *, proxy: str | None = None) -> str:
    """The argument of ``service.py`` that starts a server.

    :param proxy: through which alone the browser reaches the world; None: it reaches nothing.
    """
    return json.dumps(
        {
            "serve": {
                "service": kind.name.value,
                "port": kind.port,
                "user": USER,
                "database": DATABASE,
                "memoryBytes": share.memory_bytes,
                "dataBytes": data_bytes(share),
                "proxy": proxy,
                "bypass": ";".join((AGENT_ALIAS, *CATALOGUE)),
            }
        }
    )


def look_request(account: str) -> str:
    """The argument of ``service.py`` that looks an account up."""
    return json.dumps({"look": account})


def data_bytes(share: ResourceVector) -> int:
    """How much of its memory a service may fill with what it is given."""
    return share.memory_bytes // 2


def version_fits(wanted: str | None, actual: str) -> bool:
    """Whether what a contract asks for is what runs: ``15`` is any 15, ``15.2`` any 15.2."""
    if wanted is None:
        return True
    asked = wanted.split(".")
    return actual.split(".")[: len(asked)] == asked


class _Line(BaseModel):
    """A line that ``service.py`` prints; a claim of a container, so bounded."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, hide_input_in_errors=True)


class ServiceReady(_Line):
    """A client was answered, and told this version."""

    version: Annotated[str, Field(max_length=64, pattern=r"^[0-9A-Za-z][0-9A-Za-z._+~-]*$")]


class ServiceAccount(_Line):
    """Numeric user and group of an account; None: the image has none of that name."""

    user: Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(max_length=2)] | None


def read_ready(line: str) -> ServiceReady:
    """The line with which a service says that it is ready.

    :raises RefusedError: code ``service_not_ready``.
    """
    try:
        return ServiceReady.model_validate_json(line)
    except ValidationError:
        raise RefusedError(
            "cannot use the service: what it says is no version", code="service_not_ready"
        ) from None


def read_account(line: str) -> tuple[int, int] | None:
    """The user and group that an account stands for; None: there is no such account.

    :raises RefusedError: code ``image_policy_denied``: it is root, or nonsense.
    """
    try:
        user = ServiceAccount.model_validate_json(line).user
    except ValidationError:
        user = []
    if user is None:
        return None
    if len(user) != 2 or 0 in user:
        raise RefusedError(
            "cannot use the service's image: the account that it should run as is root's",
            code="image_policy_denied",
        )
    return user[0], user[1]
