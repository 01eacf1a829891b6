"""Where a built image came from: an in-toto Statement v1 with SLSA provenance v1 (B-30).

Sources: in-toto/attestation v1, statement and resource descriptor; SLSA 1.1, provenance;
docs/reference/image-policy.md has a whole example.  The statement travels in a
DSSE envelope (:mod:`forge_core.dsse`).

The external parameters are what a project decides: its repository, the approved commit, and which
files in it say what to build.  All else is the runner's own doing and internal.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from forge_core.dsse import read_envelope, seal
from forge_core.errors import RefusedError
from forge_core.image_ports import BuiltImage, Evidence
from forge_core.sandbox_spec import without_tag
from forge_core.signing import PrivateKey, PublicKey
from forge_core.strict_json import BrokenJson, read_object

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
BUILD_TYPE: Final = "tag:forge.dev,2026:bridge/image-build/v1"
"""A name for good and no address (RFC 4151); docs/reference/image-policy.md describes it."""

MAX_STATEMENT_BYTES: Final = 2 << 20
MEDIA_TYPES: Final = {"sbom.spdx.json": "application/spdx+json"}
PROVENANCE_NAME: Final = "provenance.dsse.json"
EXTERNAL_PARAMETERS: Final = ("dockerfile", "contract")
"""Those of :attr:`BuiltImage.parameters` that a project decides."""

_KNOWN_EXTERNAL: Final = frozenset({"repository", "commit", *EXTERNAL_PARAMETERS})
_SHA256 = re.compile(r"sha256:([0-9a-f]{64})\Z")


class ProvenanceRefused(RefusedError):  # noqa: N818 - says what is the case
    """The statement is no provenance of ours, or not of what was asked for."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="provenance_refused")


@dataclass(frozen=True, slots=True)
class BuildPlatform:
    """Who vouches for the build (SLSA ``runDetails.builder``).

    :param id: an URI; one runner and one way of building.
    :param versions: of the parts that build, by name.
    """

    id: str
    versions: Mapping[str, str]

    @classmethod
    def of_runner(
        cls, trust_domain_id: str, runner_id: str, *, dedicated: bool, version: str
    ) -> BuildPlatform:
        """A runner; with a builder of its own it is another platform than with the engine's."""
        kind = "dedicated-builder" if dedicated else "engine-builder"
        names = "/".join(quote(name, safe="") for name in (trust_domain_id, runner_id, kind))
        return cls(f"tag:forge.dev,2026:bridge/runner/{names}", {"forge-bridge": version})


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a statement says, as far as it is asked for.

    :param image_ids: the subjects, ``sha256:…`` each.
    :param byproducts: ``sha256:…`` of each document of the gates, by its name.
    """

    image_ids: tuple[str, ...]
    repository: str
    commit: str
    builder_id: str
    byproducts: Mapping[str, str]
    started_on: str
    finished_on: str


@dataclass(frozen=True, slots=True)
class Expected:
    """What a statement should be about; None: whatever it says."""

    image_id: str | None = None
    repository: str | None = None
    commit: str | None = None


def signed_provenance(
    image: BuiltImage, platform: BuildPlatform, gates: Sequence[Evidence], key: PrivateKey
) -> Evidence:
    """The statement about ``image`` in its envelope.

    :param gates: what the earlier gates found; the statement names their digests.
    """
    payload = json.dumps(_statement(image, platform, gates), separators=(",", ":"), sort_keys=True)
    return Evidence(PROVENANCE_NAME, seal(PAYLOAD_TYPE, payload.encode(), key))


def verify_provenance(envelope: bytes, key: PublicKey, expected: Expected) -> Provenance:
    """What the envelope says, once it is proven that the holder of ``key`` says it.

    :raises EnvelopeRefused: it is no envelope, or the key has not signed it.
    :raises ProvenanceRefused: it is no provenance of an image of ours, or of another one.
    """
    found = read_provenance(read_envelope(envelope).verified_payload(key, PAYLOAD_TYPE))
    if expected.image_id is not None and expected.image_id not in found.image_ids:
        raise ProvenanceRefused(
            f"it is about {', '.join(found.image_ids)}, not {expected.image_id}"
        )
    for name, wanted, said in (
        ("repository", expected.repository, found.repository),
        ("commit", expected.commit, found.commit),
    ):
        if wanted is not None and wanted != said:
            raise ProvenanceRefused(
                f"it was built from {name} {said[:256]!r}, not {wanted[:256]!r}"
            )
    return found


def read_provenance(payload: bytes) -> Provenance:
    """Read a statement; unknown fields are ignored except among the external parameters.

    :raises ProvenanceRefused: it is none, or of another kind of build.
    """
    try:
        statement = read_object(payload, max_bytes=MAX_STATEMENT_BYTES)
    except BrokenJson as error:
        raise ProvenanceRefused(f"its payload cannot be read: {error}") from None
    _require(statement, "_type", STATEMENT_TYPE)
    _require(statement, "predicateType", PREDICATE_TYPE)
    predicate = _object(statement, "predicate")
    build = _object(predicate, "buildDefinition")
    _require(build, "buildType", BUILD_TYPE)
    external = _object(build, "externalParameters")
    if unknown := sorted(set(external) - _KNOWN_EXTERNAL):
        # SLSA: verifiers should reject what they do not expect here.
        raise ProvenanceRefused(f"externalParameters holds {unknown[0][:80]!r}, which is unknown")
    details = _object(predicate, "runDetails")
    metadata = _object(details, "metadata")
    byproducts = {_text(one, "name"): _digest(one) for one in _objects(details, "byproducts")}
    image_ids = tuple(_digest(subject) for subject in _objects(statement, "subject"))
    if not image_ids:
        raise ProvenanceRefused("it is about nothing: subject is empty")
    return Provenance(
        image_ids=image_ids,
        repository=_text(external, "repository"),
        commit=_text(external, "commit"),
        builder_id=_text(_object(details, "builder"), "id"),
        byproducts=byproducts,
        started_on=_text(metadata, "startedOn"),
        finished_on=_text(metadata, "finishedOn"),
    )


def _statement(
    image: BuiltImage, platform: BuildPlatform, gates: Sequence[Evidence]
) -> dict[str, Any]:
    internal = {
        name: value for name, value in image.parameters.items() if name not in EXTERNAL_PARAMETERS
    }
    build = {
        "buildType": BUILD_TYPE,
        "externalParameters": {
            "repository": image.repository,
            "commit": image.commit,
            **{name: value for name, value in image.parameters.items() if name not in internal},
        },
        "internalParameters": {
            "projectId": image.project_id,
            "imageKey": image.image_key,
            **internal,
        },
        "resolvedDependencies": [
            {"name": image.repository, "digest": {"gitCommit": image.commit}},
            *(_image_descriptor(reference) for reference in image.materials),
        ],
    }
    run = {
        "builder": {"id": platform.id, "version": dict(platform.versions)},
        "metadata": {
            "invocationId": f"{image.image_key}/{image.started_at}",
            "startedOn": image.started_at,
            "finishedOn": image.finished_at,
        },
        "byproducts": [_byproduct(document) for document in gates],
    }
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": image.reference, "digest": _digest_set(image.image_id)}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {"buildDefinition": build, "runDetails": run},
    }


def _image_descriptor(reference: str) -> dict[str, Any]:
    """A pinned image as a package URL (purl-spec, type ``oci``); a local image id has none."""
    repository, _, digest = without_tag(reference).rpartition("@")
    descriptor: dict[str, Any] = {"digest": _digest_set(digest)}
    if repository:
        name = quote(repository.rpartition("/")[2].lower(), safe="")
        where = f"repository_url={quote(repository)}"
        descriptor["uri"] = f"pkg:oci/{name}@{quote(digest, safe='')}?{where}"
    return descriptor


def _byproduct(document: Evidence) -> dict[str, Any]:
    return {
        "name": document.name,
        "digest": {"sha256": hashlib.sha256(document.content).hexdigest()},
        "mediaType": MEDIA_TYPES.get(document.name, "application/json"),
    }


def _digest_set(digest: str) -> dict[str, str]:
    match = _SHA256.match(digest)
    assert match is not None, digest
    return {"sha256": match[1]}


def _require(container: Mapping[str, Any], name: str, wanted: str) -> None:
    found = container.get(name)
    if found != wanted:
        raise ProvenanceRefused(f"{name} is {str(found)[:120]!r}, not {wanted!r}")


def _object(container: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = container.get(name)
    if not isinstance(value, dict):
        raise ProvenanceRefused(f"{name} is not an object")
    return value


def _objects(container: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A list of objects; one that is not there is empty (SLSA, Parsing rules)."""
    value = container.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ProvenanceRefused(f"{name} is not a list of objects")
    return value


def _text(container: Mapping[str, Any], name: str) -> str:
    value = container.get(name)
    if not isinstance(value, str) or not value.isprintable():
        raise ProvenanceRefused(f"{name} is not a printable text")
    return value


def _digest(descriptor: Mapping[str, Any]) -> str:
    digest = f"sha256:{_object(descriptor, 'digest').get('sha256')}"
    if _SHA256.match(digest) is None:
        raise ProvenanceRefused("a digest is not sha256 in 64 hexadecimal digits")
    return digest
