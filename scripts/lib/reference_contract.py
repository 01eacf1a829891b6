"""docs/reference/contract.md and forge.sandbox.schema.json, from the model of the contract."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from forge_core.contract import (
    CONTRACT_PATH,
    CONTRACT_VERSION,
    MAX_CONTRACT_BYTES,
    MAX_DEPTH,
    MAX_VALUES,
    Contract,
    read_contract,
)

from .reference_markdown import code, page, prose, table

Schema = Mapping[str, Any]

EXAMPLE = """\
version: 1
image:
  dockerfile: .forge/Dockerfile
tmp:
  executable: true
network:
  policy: public_allowlist
  domains:
    - api.example.org        # this host
    - .packages.example.net  # this domain and every name below it
services:
  - name: postgres
    version: "15"
ports:
  - name: web
    container: 8080
environment:
  PATH: "/opt/venv/bin:/usr/local/bin:/usr/bin:/bin"
  LOG_LEVEL: debug
secrets:
  - API_KEY
"""

_INTRODUCTION = f"""\
`{CONTRACT_PATH}` says what a project asks of its sandbox. It is read from the commit that was
approved, never from a working tree. What is asked is not what is given: each runner decides what
it offers, and nothing in this file loosens the container ([hardening](hardening.md)).

How to begin: [Give a project its own environment](../how-to/project-environment.md). For editors
and other programs there is [forge.sandbox.schema.json](forge.sandbox.schema.json) (JSON Schema
2020-12).

```yaml
{EXAMPLE}```

Only `version` is required. Everything that is left out has its default; a field without a value is
refused."""

_TEXT = f"""\
## What is refused

The file is YAML, of which only what every reader takes alike is let in. Each fault is named with
its line and field, all of them at once:

```
cannot use {CONTRACT_PATH}:
  line 7: services[0].version: 15 is a number here; write it in quotes
  line 9: network.domian: it is no field of this file; did you mean domains?
```

| refused | because |
| --- | --- |
| `no`, `on`, `1e3`, `0x1F`, `0o17`, `1_000`, `12:30`, `2001-01-01`, `~` without quotes where \
text is meant | YAML 1.1 and 1.2 disagree on what they are |
| anything but `true`, `false` and decimal digits where those are meant | likewise |
| anchors, aliases and merge keys (`&`, `*`, `<<`) | a small file could become a huge one |
| the same key twice | one of the two would be lost |
| tags (`!`), directives (`%`), a second document | they change what values mean |
| tabs, control characters, a byte order mark, anything but UTF-8 | it would not be what it \
looks like |
| fields that are not below | they would be ignored, or are misspelt |
| more than {MAX_CONTRACT_BYTES} bytes, {MAX_VALUES} values, {MAX_DEPTH} levels | |

## Domains

`example.org` is that host, `.example.org` that and every name below it. Names are in lower case and
have at least two labels. A name in another script is taken when IDNA (RFC 5891) turns it into ASCII
and back into itself. Refused by name: IP addresses in every notation, wildcards, ports, users,
paths and URLs, a dot at the end, and what is never public (`localhost`, `local`, `internal`).

The proxy decides by the name that is asked for: who controls one allowed name behind a shared front
can reach others there (domain fronting).

## Variables

Names in `environment` and `secrets` are letters, digits and `_`. Refused are those that the bridge
sets (`FORGE_…`, the proxy variables), and those that make programs load other code (`LD_…`,
`PYTHONPATH`, `NODE_OPTIONS`, `BASH_ENV` and their like). No name may be in both.

The environment of the image does not reach the agent: a `PATH` that leads to what a Dockerfile
installed belongs into `environment`.

## What the schema does not know

It accepts a little more than the bridge does, because it cannot say: what IDNA makes of a name, how
an image's repository is written, that each service, port and port's name is there once, that no
name is in both `environment` and `secrets`, that values hold no control characters."""


class _ContractSchema(GenerateJsonSchema):
    """What is left out is not null; and the names of variables bind for every variable."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        made = super().dict_schema(schema)
        by_pattern = made.pop("patternProperties", None)
        if by_pattern is not None:
            ((pattern, values),) = by_pattern.items()
            made |= {"propertyNames": {"pattern": pattern}, "additionalProperties": values}
        return made


def contract_schema() -> dict[str, Any]:
    """The schema as a JSON object."""
    made = Contract.model_json_schema(schema_generator=_ContractSchema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_plain(made),
        "title": f"{CONTRACT_PATH}, version {CONTRACT_VERSION}",
    }


def contract_schema_page() -> str:
    """The schema for programs."""
    return json.dumps(contract_schema(), indent=2, ensure_ascii=False) + "\n"


def contract_page() -> str:
    """The page for people."""
    read_contract(EXAMPLE.encode())
    return page("The contract", _INTRODUCTION, "## Fields", *_fields(), _TEXT)


def _fields() -> Iterator[str]:
    schema = contract_schema()
    rows = []
    for path, part, required in _walk(schema, schema, ""):
        default = "required" if required else _default(part)
        rows.append((code(path), _type(part), default, prose(part.get("description"))))
    yield table(("field", "value", "default", "meaning"), rows)


def _walk(root: Schema, part: Schema, prefix: str) -> Iterator[tuple[str, Schema, bool]]:
    """Every field by its path, in the order of the model."""
    for name, child in part.get("properties", {}).items():
        resolved = _resolved(root, child)
        path = f"{prefix}{name}"
        yield path, resolved, name in part.get("required", ())
        yield from _walk(root, resolved, f"{path}.")
        if "items" in resolved:
            yield from _walk(root, _resolved(root, resolved["items"]), f"{path}[].")


def _resolved(root: Schema, part: Schema) -> Schema:
    if "$ref" not in part:
        return part
    target = root["$defs"][str(part["$ref"]).rpartition("/")[2]]
    return {**target, **part}


def _type(part: Schema) -> str:
    if "enum" in part or "const" in part:
        return ", ".join(code(str(word)) for word in part.get("enum", [part.get("const")]))
    match part["type"]:
        case "integer":
            return f"{part['minimum']} to {part['maximum']}"
        case "string":
            return "text"
        case "boolean":
            return "`true`, `false`"
        case "array":
            return f"list, at most {part['maxItems']}"
        case "object" if "properties" in part:
            return ""
        case _:
            return f"text by name, at most {part['maxProperties']}"


def _default(part: Schema) -> str:
    match part.get("default"):
        case None | [] | {}:
            return ""
        case bool(value):
            return code(str(value).lower())
        case str(value):
            return code(value)
        case _:
            return ""


def _plain(schema: Any) -> Any:
    """Without titles, which only repeat the names, and without defaults that are null."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _plain(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
        and not (key == "default" and value is None)
    }
