"""What is in an image, as an SPDX 2.2 or 2.3 document in JSON (B-30).

Checked are the fields that the specification requires and that the document describes something;
it is kept byte for byte.  Source: SPDX 2.3, clauses 6 (document), 7 (packages), 11
(relationships).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_core.errors import RefusedError

MAX_BILL_BYTES: Final = 32 << 20
DOCUMENT_ID: Final = "SPDXRef-DOCUMENT"


class BillRefused(RefusedError):  # noqa: N818 - says what is the case
    """The output is no bill of materials."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="bill_refused")


@dataclass(frozen=True, slots=True)
class BillOfMaterials:
    """What a document says of itself.

    :param packages: how many there are beside what is described.
    :param tool: who made it, such as ``syft-1.18.1``; empty where it is not said.
    """

    spdx_version: str
    packages: int
    tool: str


_Text = Annotated[str, Field(min_length=1)]
_Reference = Annotated[str, Field(pattern=r"^SPDXRef-[A-Za-z0-9.+-]+$")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)


class _Creation(_Part):
    created: _Text
    creators: Annotated[list[_Text], Field(min_length=1)]


class _Package(_Part):
    id: _Reference = Field(alias="SPDXID")
    name: _Text
    download_location: _Text = Field(alias="downloadLocation")


class _Relationship(_Part):
    source: str = Field(alias="spdxElementId")
    target: str = Field(alias="relatedSpdxElement")
    kind: str = Field(alias="relationshipType")


class _Document(_Part):
    version: Literal["SPDX-2.2", "SPDX-2.3"] = Field(alias="spdxVersion")
    license: Literal["CC0-1.0"] = Field(alias="dataLicense")
    id: Literal["SPDXRef-DOCUMENT"] = Field(alias="SPDXID")
    name: _Text
    namespace: _Text = Field(alias="documentNamespace")
    creation: _Creation = Field(alias="creationInfo")
    packages: list[_Package] = Field(default_factory=list)
    described: list[str] = Field(default_factory=list, alias="documentDescribes")
    relationships: list[_Relationship] = Field(default_factory=list)


def read_bill(data: bytes) -> BillOfMaterials:
    """Check the document.

    :raises BillRefused: it is none, contradicts itself, or names nothing in the image.
    """
    if len(data) > MAX_BILL_BYTES:
        raise BillRefused(f"the document has more than {MAX_BILL_BYTES} bytes")
    try:
        document = _Document.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in fault["loc"]) or "document"
        raise BillRefused(
            f"the output is no SPDX 2.2 or 2.3 document in JSON: {where}: {fault['msg']}"
        ) from None
    names = {package.id for package in document.packages}
    if len(names) < len(document.packages):
        raise BillRefused("two packages of the document have one SPDXID")
    described = _described(document)
    if not described:
        raise BillRefused("the document does not say what it describes")
    if unknown := sorted(described - names):
        raise BillRefused(
            f"the document describes {unknown[0][:80]}, which is not among its packages"
        )
    if not names - described:
        raise BillRefused("the document names no package in the image, so it says nothing about it")
    return BillOfMaterials(document.version, len(names - described), _tool(document.creation))


def _described(document: _Document) -> set[str]:
    """``documentDescribes`` is the shorthand for the relationship in either direction."""
    told = {r.target for r in document.relationships if _is(r, "DESCRIBES", r.source)}
    of = {r.source for r in document.relationships if _is(r, "DESCRIBED_BY", r.target)}
    return {*document.described, *told, *of}


def _is(relationship: _Relationship, kind: str, document: str) -> bool:
    return relationship.kind == kind and document == DOCUMENT_ID


def _tool(creation: _Creation) -> str:
    tools = (c.removeprefix("Tool:").strip() for c in creation.creators if c.startswith("Tool:"))
    return next(tools, "")[:80]
