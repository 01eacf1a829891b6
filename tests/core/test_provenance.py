"""The provenance statement: what it says, and what is not taken for one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forge_core.dsse import EnvelopeRefused, read_envelope, seal
from forge_core.image_ports import BuiltImage, Evidence
from forge_core.provenance import (
    BUILD_TYPE,
    PAYLOAD_TYPE,
    BuildPlatform,
    Expected,
    ProvenanceRefused,
    read_provenance,
    signed_provenance,
    verify_provenance,
)

pytestmark = pytest.mark.requirement("B-30")

ROOT = Path(__file__).parents[2]
IMAGE_ID = "sha256:" + "1" * 64
BASE = "registry.example:5000/library/debian:12@sha256:" + "2" * 64
COMMIT = "3" * 40
KEY = Ed25519PrivateKey.generate()
PLATFORM = BuildPlatform.of_runner("prod", "runner 1", dedicated=True, version="0.1.0")
BILL = Evidence("sbom.spdx.json", b'{"spdxVersion":"SPDX-2.3"}')
SCAN = Evidence("vulnerabilities.json", b'{"SchemaVersion":2}')
IMAGE = BuiltImage(
    image_id=IMAGE_ID,
    reference="forge.invalid/image:1",
    image_key="5" * 64,
    project_id="p1",
    repository="demo",
    commit=COMMIT,
    materials=(BASE, "sha256:" + "4" * 64),
    parameters={
        "dockerfile": ".forge/Dockerfile",
        "contract": ".forge/forge.sandbox.yml",
        "limits": {"memoryBytes": 1 << 32},
        "dedicatedBuilder": True,
    },
    started_at="2026-11-29T12:00:00.000Z",
    finished_at="2026-11-29T12:01:00.000Z",
)


def statement(image: BuiltImage = IMAGE, platform: BuildPlatform = PLATFORM) -> dict[str, Any]:
    sealed = signed_provenance(image, platform, (BILL, SCAN), KEY)
    payload = read_envelope(sealed.content).verified_payload(KEY.public_key(), PAYLOAD_TYPE)
    found: dict[str, Any] = json.loads(payload)
    return found


def test_the_statement_says_what_went_in_and_who_built() -> None:
    found = statement()
    assert found["_type"] == "https://in-toto.io/Statement/v1"
    assert found["predicateType"] == "https://slsa.dev/provenance/v1"
    assert found["subject"] == [{"name": IMAGE.reference, "digest": {"sha256": "1" * 64}}]
    build = found["predicate"]["buildDefinition"]
    assert build["buildType"] == BUILD_TYPE
    assert build["externalParameters"] == {
        "repository": "demo",
        "commit": COMMIT,
        "dockerfile": ".forge/Dockerfile",
        "contract": ".forge/forge.sandbox.yml",
    }
    assert build["internalParameters"] == {
        "projectId": "p1",
        "imageKey": "5" * 64,
        "limits": {"memoryBytes": 1 << 32},
        "dedicatedBuilder": True,
    }
    assert build["resolvedDependencies"] == [
        {"name": "demo", "digest": {"gitCommit": COMMIT}},
        {
            "uri": f"pkg:oci/debian@sha256%3A{'2' * 64}"
            "?repository_url=registry.example%3A5000/library/debian",
            "digest": {"sha256": "2" * 64},
        },
        {"digest": {"sha256": "4" * 64}},
    ]
    run = found["predicate"]["runDetails"]
    assert run["builder"] == {
        "id": "tag:forge.dev,2026:bridge/runner/prod/runner%201/dedicated-builder",
        "version": {"forge-bridge": "0.1.0"},
    }
    assert run["metadata"]["startedOn"] == IMAGE.started_at
    assert run["metadata"]["finishedOn"] == IMAGE.finished_at
    assert run["byproducts"] == [
        {
            "name": "sbom.spdx.json",
            "digest": {"sha256": hashlib.sha256(BILL.content).hexdigest()},
            "mediaType": "application/spdx+json",
        },
        {
            "name": "vulnerabilities.json",
            "digest": {"sha256": hashlib.sha256(SCAN.content).hexdigest()},
            "mediaType": "application/json",
        },
    ]


def test_the_example_of_the_reference_is_such_a_statement() -> None:
    page = (ROOT / "docs/reference/image-policy.md").read_text("utf-8")
    example = json.loads(page.partition("```json\n")[2].partition("```")[0])
    shown = replace(IMAGE, materials=(BASE,))
    platform = BuildPlatform.of_runner("prod", "runner-1", dedicated=True, version="0.1.0")
    assert example == statement(shown, platform)
    assert read_provenance(json.dumps(example).encode()).commit == COMMIT


def test_one_build_has_one_statement() -> None:
    assert statement() == statement()
    again = replace(IMAGE, started_at="2026-11-30T12:00:00.000Z")
    ids = {
        statement(image)["predicate"]["runDetails"]["metadata"]["invocationId"]
        for image in (IMAGE, again)
    }
    assert len(ids) == 2


def test_two_ways_of_building_are_two_platforms() -> None:
    other = BuildPlatform.of_runner("prod", "runner 1", dedicated=False, version="0.1.0")
    assert other.id != PLATFORM.id
    one = BuildPlatform.of_runner("a/b", "c", dedicated=True, version="1")
    assert one.id != BuildPlatform.of_runner("a", "b/c", dedicated=True, version="1").id


def test_what_was_expected_is_verified() -> None:
    sealed = signed_provenance(IMAGE, PLATFORM, (BILL,), KEY).content
    found = verify_provenance(sealed, KEY.public_key(), Expected(IMAGE_ID, "demo", COMMIT))
    assert found.image_ids == (IMAGE_ID,)
    assert (found.repository, found.commit) == ("demo", COMMIT)
    assert found.builder_id == PLATFORM.id
    assert found.byproducts == {
        "sbom.spdx.json": f"sha256:{hashlib.sha256(BILL.content).hexdigest()}"
    }
    assert verify_provenance(sealed, KEY.public_key(), Expected()) == found
    for expected, reason in (
        (Expected(image_id="sha256:" + "9" * 64), "it is about sha256:1"),
        (Expected(repository="other"), "built from repository 'demo', not 'other'"),
        (Expected(commit="9" * 40), "built from commit"),
    ):
        with pytest.raises(ProvenanceRefused, match=reason):
            verify_provenance(sealed, KEY.public_key(), expected)


def test_the_signature_comes_before_the_meaning() -> None:
    stranger = Ed25519PrivateKey.generate()
    sealed = signed_provenance(IMAGE, PLATFORM, (), stranger).content
    with pytest.raises(EnvelopeRefused, match="no valid signature"):
        verify_provenance(sealed, KEY.public_key(), Expected())
    not_ours = seal("application/other", b"{}", KEY)
    with pytest.raises(EnvelopeRefused, match="of the type"):
        verify_provenance(not_ours, KEY.public_key(), Expected())


def _set(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        *above, last = path.split(".")
        for step in above:
            found = found[step]
        found[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("_type", "https://in-toto.io/Statement/v0.1"), "_type is"),
        (_set("predicateType", "https://slsa.dev/provenance/v0.2"), "predicateType is"),
        (_set("predicate.buildDefinition.buildType", "x"), "buildType is"),
        (_set("predicate.buildDefinition.externalParameters.args", "x"), "'args', which is unkno"),
        (_set("predicate.buildDefinition.externalParameters.commit", 1), "commit is not"),
        (_set("predicate.buildDefinition.externalParameters.commit", "\x1b[2J"), "commit is not"),
        (_set("predicate.buildDefinition", []), "buildDefinition is not an object"),
        (_set("predicate.runDetails.byproducts", [1]), "byproducts is not a list of objects"),
        (_set("predicate.runDetails.builder", {}), "id is not"),
        (_set("subject", []), "subject is empty"),
        (_set("subject", [{"digest": {"sha1": "1"}}]), "a digest is not sha256"),
        (_set("subject", [{"digest": {"sha256": "A" * 64}}]), "a digest is not sha256"),
        (_set("subject", [{"digest": "x"}]), "digest is not an object"),
        (_set("subject", "x"), "subject is not a list"),
    ],
)
def test_what_is_no_provenance_of_ours_is_refused(
    change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    found = statement()
    assert read_provenance(json.dumps(found).encode()).commit == COMMIT
    change(found)
    with pytest.raises(ProvenanceRefused, match=reason):
        read_provenance(json.dumps(found).encode())


def test_unknown_fields_elsewhere_are_ignored_as_the_specification_asks() -> None:
    found = statement()
    found["predicate"]["runDetails"]["forge_more"] = {"a": 1}
    found["predicate"]["runDetails"]["byproducts"] = None
    assert read_provenance(json.dumps(found).encode()).byproducts == {}
