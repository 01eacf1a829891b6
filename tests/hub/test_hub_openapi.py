"""The published schema says what the hub takes and gives, in the words of the wire."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from scripted_bridge import session

from forge_hub.api.app import bare_app
from forge_hub.api.models import NewSession

SNAKE_CASE = re.compile(r"[a-z0-9]+_")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return bare_app().openapi()


def defaults(part: Any, path: str = "") -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Every default in the document with the schema that it belongs to."""
    if isinstance(part, list):
        for number, item in enumerate(part):
            yield from defaults(item, f"{path}/{number}")
    elif isinstance(part, dict):
        for name, value in part.items():
            if name == "default" and not path.endswith("/responses"):
                yield path, value, part
            yield from defaults(value, f"{path}/{name}")


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


@pytest.mark.requirement("B-95")
def test_every_property_and_every_default_is_in_camel_case(document: dict[str, Any]) -> None:
    for name, schema in document["components"]["schemas"].items():
        for field in schema.get("properties", ()):
            assert not SNAKE_CASE.match(field), f"{name}.{field}"
    found = list(defaults(document))
    assert found
    for path, value, _ in found:
        assert [name for name in keys(value) if SNAKE_CASE.match(name)] == [], path


@pytest.mark.requirement("B-95")
def test_every_default_is_what_its_own_schema_allows(document: dict[str, Any]) -> None:
    for path, value, schema in defaults(document):
        whole = {**schema, "components": document["components"]}
        errors = jsonschema.Draft202012Validator(whole).iter_errors(value)
        assert [error.message for error in errors] == [], path


@pytest.mark.requirement("B-95")
def test_a_default_that_is_sent_is_the_default(document: dict[str, Any]) -> None:
    properties = document["components"]["schemas"]["NewSession"]["properties"]
    shown = {name: part["default"] for name, part in properties.items() if "default" in part}
    assert {"resources", "limits", "leaseTtlMs"} <= shown.keys()
    assert NewSession.model_validate(session(**shown)) == NewSession.model_validate(
        {name: value for name, value in session().items() if name not in shown}
    )
