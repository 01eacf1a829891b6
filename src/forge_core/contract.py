"""The contract: what a project asks of its sandbox, in its own repository (B-27, B-41, B-52).

``.forge/forge.sandbox.yml`` of the approved commit.  It is written by whoever can push to the
repository, so it is read with suspicion: bounded, without the hazards of YAML
(:mod:`forge_core.strict_yaml`), and with no field that could loosen the container.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from forge_core.egress_domains import Domain
from forge_core.errors import RefusedError
from forge_core.sandbox_spec import BLANKED_VARIABLES, require_pinned
from forge_core.strict_yaml import read_yaml
from forge_core.wire.codes import NetworkPolicy, ServiceName
from forge_core.yaml_model import validate
from forge_core.yaml_tree import Document, Fault

CONTRACT_PATH: Final = ".forge/forge.sandbox.yml"
DOCKERFILE_PATH: Final = ".forge/Dockerfile"
CONTRACT_VERSION: Final = 1
MAX_CONTRACT_BYTES: Final = 65_536
MAX_DEPTH: Final = 8
MAX_VALUES: Final = 4_096
MAX_FAULTS_SHOWN: Final = 20

_VARIABLE: Final = "[A-Za-z_][A-Za-z0-9_]{0,255}"
_PORT: Final = "[a-z](?:[a-z0-9-]{0,30}[a-z0-9])?"
_VERSION: Final = "[0-9A-Za-z][0-9A-Za-z._-]{0,63}"
_PROXY_VARIABLES: Final = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_REFUSED_NAMES: Final = "|".join(
    (
        "LD_[A-Za-z0-9_]*",
        "FORGE_[A-Za-z0-9_]*",
        *(name for name in BLANKED_VARIABLES if not name.startswith("LD_")),
        *_PROXY_VARIABLES,
        *(name.lower() for name in _PROXY_VARIABLES),
    )
)


def _form(pattern: str, meaning: str) -> Callable[[str], str]:
    """A check of a text; ``meaning`` continues "it must be …"."""

    def check(value: str) -> str:
        # fullmatch, because the $ of Python would take a line break too.
        if re.fullmatch(pattern, value) is None:
            raise ValueError(f"it must be {meaning}")
        return value

    return check


def _unreserved(name: str) -> str:
    if re.fullmatch(_REFUSED_NAMES, name):
        raise ValueError(
            "it is not a project's to set: the bridge sets it, or it makes programs load other code"
        )
    return name


def _pinned(reference: str) -> str:
    if "@" not in reference:
        raise ValueError("it must be repository@sha256:<64 hex>")
    try:
        return require_pinned(reference, field_name="image")
    except RefusedError:
        raise ValueError(
            "it must be repository@sha256:<64 hex>, without a tag (docker image inspect "
            "--format '{{.RepoDigests}}' IMAGE)"
        ) from None


PinnedReference = Annotated[
    str,
    Field(max_length=512),
    AfterValidator(_pinned),
    Field(json_schema_extra={"pattern": "^[^@]+@sha256:[0-9a-f]{64}$"}),
]
VariableName = Annotated[
    str,
    AfterValidator(_form(_VARIABLE, "up to 256 letters, digits and _, not beginning with a digit")),
    AfterValidator(_unreserved),
    Field(json_schema_extra={"pattern": f"^(?!(?:{_REFUSED_NAMES})$){_VARIABLE}$"}),
]
PortName = Annotated[
    str,
    AfterValidator(_form(_PORT, "up to 32 of a-z, 0-9 and -, beginning with a-z")),
    Field(json_schema_extra={"pattern": f"^{_PORT}$"}),
]
ServiceVersion = Annotated[
    str,
    AfterValidator(_form(_VERSION, 'a version such as "15" or "15.2"')),
    Field(json_schema_extra={"pattern": f"^{_VERSION}$"}),
]


class ContractModel(BaseModel):
    """A group of fields of the contract; what it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class ImageSource(ContractModel):
    """Where the image of the sandbox comes from; exactly one of the two."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    dockerfile: Literal[".forge/Dockerfile"] | None = Field(
        default=None,
        description="Built from this file and the tracked files of the approved commit.",
    )
    reference: PinnedReference | None = Field(
        default=None,
        description="An image of a registry, pinned: repository@sha256:<64 hex>.",
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.dockerfile is None) == (self.reference is None):
            raise ValueError("write exactly one of dockerfile and reference")
        return self


class Tmp(ContractModel):
    """The directory /tmp, which is kept in memory."""

    executable: bool = Field(
        default=False, description="Whether programs in /tmp can run; some tools need it."
    )


class Network(ContractModel):
    """What the sandbox may reach."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {
                "properties": {"policy": {"const": NetworkPolicy.PUBLIC_ALLOWLIST.value}},
                "required": ["policy"],
            },
            "then": {"properties": {"domains": {"minItems": 1}}, "required": ["domains"]},
            "else": {"properties": {"domains": {"maxItems": 0}}},
        }
    )

    policy: Annotated[NetworkPolicy, Field(strict=False)] = Field(
        default=NetworkPolicy.NONE,
        description="none; public_allowlist: the domains below and nothing else, through a proxy; "
        "open_public: everything, on runners of developers only.",
    )
    domains: Annotated[
        tuple[Domain, ...], Field(max_length=256, json_schema_extra={"uniqueItems": True})
    ] = Field(
        default=(),
        description="example.org is that host alone, .example.org that and every name below it; "
        "ports 80 and 443. Only with public_allowlist, and then at least one.",
    )

    @field_validator("domains")
    @classmethod
    def _are_different(cls, domains: tuple[str, ...]) -> tuple[str, ...]:
        _require_unique("domain", domains)
        return domains

    @model_validator(mode="after")
    def _agree(self) -> Self:
        wanted = self.policy is NetworkPolicy.PUBLIC_ALLOWLIST
        if wanted and not self.domains:
            raise ValueError("public_allowlist needs at least one entry in domains")
        if self.domains and not wanted:
            raise ValueError(
                f"domains count with public_allowlist only, and the policy is {self.policy.value}"
            )
        return self


class Service(ContractModel):
    """A server that runs beside the sandbox, from the image that the runner has for it."""

    name: Annotated[ServiceName, Field(strict=False)] = Field(description="Which one.")
    version: ServiceVersion | None = Field(
        default=None, description="The version that is expected of it; without it, any."
    )


class Port(ContractModel):
    """A port of the sandbox that people look at, on the loopback address of the runner's host."""

    name: PortName = Field(description="What it is called.")
    container: Annotated[int, Field(ge=1, le=65_535)] = Field(
        description="The port that is listened on in the sandbox."
    )


class Contract(ContractModel):
    """What a project asks of its sandbox."""

    model_config = ConfigDict(title="forge.sandbox.yml")

    version: Literal[1] = Field(description="The version of this format.")
    image: ImageSource | None = Field(
        default=None, description="Without it, the tooling image of the runner."
    )
    tmp: Tmp = Tmp()
    network: Network = Network()
    services: Annotated[tuple[Service, ...], Field(max_length=len(ServiceName))] = Field(
        default=(), description="Each at most once."
    )
    ports: Annotated[tuple[Port, ...], Field(max_length=16)] = Field(
        default=(), description="Every name and every port at most once."
    )
    environment: Annotated[dict[VariableName, str], Field(max_length=256)] = Field(
        default={},
        description="Variables of the agent. Never secrets: this file is in the repository.",
    )
    secrets: Annotated[
        tuple[VariableName, ...], Field(max_length=256, json_schema_extra={"uniqueItems": True})
    ] = Field(
        default=(),
        description="Names of the variables that the hub must hand over; their values come from "
        "there alone.",
    )

    @field_validator("services")
    @classmethod
    def _services_differ(cls, services: tuple[Service, ...]) -> tuple[Service, ...]:
        _require_unique("service", (service.name for service in services))
        return services

    @field_validator("ports")
    @classmethod
    def _ports_differ(cls, ports: tuple[Port, ...]) -> tuple[Port, ...]:
        _require_unique("name", (port.name for port in ports))
        _require_unique("port", (port.container for port in ports))
        return ports

    @field_validator("secrets")
    @classmethod
    def _secrets_differ(cls, secrets: tuple[str, ...]) -> tuple[str, ...]:
        _require_unique("secret", secrets)
        return secrets

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        both = sorted(set(self.environment) & set(self.secrets))
        if both:
            raise ValueError(f"{both[0]} is in environment and in secrets; leave one out")
        return self


def read_contract(data: bytes) -> Contract:
    """The contract in ``data``; takes a tenth of a second at the very worst.

    :param data: the whole file, exactly as committed.
    :raises RefusedError: code ``contract_invalid``: every fault with its line and field, up to
        :data:`MAX_FAULTS_SHOWN`; ``field`` is the path of the first.  Values of ``environment``
        are never shown.
    """
    document = read_yaml(
        data, max_bytes=MAX_CONTRACT_BYTES, max_depth=MAX_DEPTH, max_nodes=MAX_VALUES
    )
    faults = _version_faults(document)
    contract = None
    if not faults:
        contract, faults = validate(Contract, document, private=frozenset({"environment"}))
    if contract is None:
        raise _invalid(faults)
    return contract


def _version_faults(document: Document) -> tuple[Fault, ...]:
    """Of a file in another form nothing else can be said than that."""
    root = document.root
    version = root.value.get("version") if root and isinstance(root.value, Mapping) else None
    if version is None or not isinstance(version.value, int):
        return ()
    if version.text == str(CONTRACT_VERSION):  # to Python, true is 1 as well
        return ()
    what = f"{version.text} is unknown here; this program reads version {CONTRACT_VERSION}"
    return (Fault(version.line, ("version",), what),)


def _require_unique(what: str, values: Iterable[object]) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{what} {value} is there twice")
        seen.add(value)


def _invalid(faults: tuple[Fault, ...]) -> RefusedError:
    lines = [f"  {fault}" for fault in faults[:MAX_FAULTS_SHOWN]]
    if more := len(faults) - len(lines):
        lines.append(f"  and {more} more")
    return RefusedError(
        "\n".join([f"cannot use {CONTRACT_PATH}:", *lines]),
        code="contract_invalid",
        field=faults[0].where,
    )
