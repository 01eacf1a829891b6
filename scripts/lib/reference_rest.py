"""docs/reference/rest.md, from the hub's routes, models and settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from http import HTTPStatus
from typing import Any

from pydantic import SecretStr

from forge_hub.api.app import bare_app
from forge_hub.settings import HubSettings

from .reference_markdown import code, page, prose, table

Schema = Mapping[str, Any]
MANY_WORDS = 10
_INTRODUCTION = """\
The API of `forge-hub serve`, for people and programs. JSON in camelCase; unknown properties of a
request are refused. Every request under `/api/v1` carries `Authorization: Bearer TOKEN`, made by
`forge-hub token create --role api` or set as `FORGE_HUB_API_TOKEN`. A running hub has the whole
schema at `/api/v1/openapi.json` and a page to try it at `/docs`.

```
curl -H "Authorization: Bearer $TOKEN" -H "Content-Type: application/json" -d '{
  "projectId": "demo", "trustDomainId": "local", "policy": "sandbox_preferred",
  "repository": "sample",
  "inputCommit": "0123456789abcdef0123456789abcdef01234567", "branch": "main",
  "agent": {"provider": "command", "argv": ["make", "test"]}
}' http://127.0.0.1:8080/api/v1/sessions
```

A session that stays `queued` says in its `refusals` why no runner takes it. The
[first attempt](../tutorial/first-attempt.md) shows all of it, step by step."""
_PROBLEMS = """\
## Errors

Every error is `application/problem+json` (RFC 9457): `title`, `status`, `detail` for people,
`code` for programs and, for a request that cannot be read, `fields`: what is wrong with each.
Values are never repeated. 503 comes with `Retry-After`."""
_EVENTS = """\
## The event stream

| `event:` | `data:` | told |
| --- | --- | --- |
| `event` | [EventView](#eventview) | once, with an `id:` |
| `cleanup` | a whole [CleanupReportView](#cleanupreportview) | once, with an `id:` |
| `state` | `state`, `cleanup`, `failureCode` of the [SessionView](#sessionview) | first, and when \
it changes |
| `result` | [ResultView](#resultview) with `attemptId` and `fence` | first, and at each revision |
| `log`, `deadline` | `attemptId`, `fence`, `streamSequence`, `type`, `at`, `payload` | as it \
happens; kept nowhere |
| `end` | as `state` | last |

What is kept has one shape, live and later; the payloads are those of [the wire](wire.md). To
resume, send the last `id:` seen as `Last-Event-ID`: of `event` and `cleanup` nothing is left out
and nothing told twice. Log chunks that were missed are not told again.

`end` comes when the session has ended, nothing of it is left on a runner, and each dispatch that a
runner settled has told its last words: `teardown.finished`, the final revision of its result, and a
cleanup report. A runner that has lost its records never tells them: they are waited for 5 seconds
from the proof of the cleanup. A stream that closes without `end` was cut off, because the hub
stops, the stream is an hour old, or its reader was too slow: resume it."""


def rest_page() -> str:
    """The page."""
    document = bare_app().openapi()
    return page(
        "The hub's REST API",
        _INTRODUCTION,
        "## Endpoints",
        *_endpoints(document["paths"]),
        _EVENTS,
        _PROBLEMS,
        "## Objects",
        *_objects(document),
        "## Settings of the hub",
        "Environment variables; the options of `forge-hub serve` win over them.",
        _settings(),
    )


def _endpoints(paths: Schema) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            takes = _body(operation.get("requestBody", {}))
            status, answer = next(iter(operation["responses"].items()))
            gives = _body(answer)
            phrase = HTTPStatus(int(status)).phrase
            lines = [f"### {method.upper()} {path}", prose(operation["description"])]
            facts = [f"Takes {takes}." if takes else "", _parameters(operation)]
            facts += [f"Answers {status} {phrase}" + (f" with {gives}." if gives else ".")]
            yield "\n\n".join([*lines, " ".join(fact for fact in facts if fact)])


def _parameters(operation: Schema) -> str:
    given = [p for p in operation.get("parameters", ()) if p["in"] != "path"]
    shown = (f"{p['in']} {code(p['name'])} ({_type(p['schema'])})" for p in given)
    text = ", ".join(shown)
    return f"Optional: {text}." if text else ""


def _body(holder: Schema) -> str:
    content = holder.get("content", {}).get("application/json")
    if content:
        return _type(content["schema"])
    return "a `text/event-stream`" if "text/event-stream" in holder.get("content", {}) else ""


def _objects(document: Schema) -> Iterator[str]:
    schemas = document["components"]["schemas"]
    for name in sorted(schemas):
        schema = schemas[name]
        if schema.get("type") != "object" or name in {"HTTPValidationError", "ValidationError"}:
            continue
        required = set(schema.get("required", ()))
        about, notes = _docstring(schema.get("description"))
        rows = []
        for field, part in schema.get("properties", {}).items():
            words = ["" if field in required else _optional(part), notes.get(code(field), "")]
            rows.append((code(field), _type(part), "; ".join(word for word in words if word)))
        yield "\n\n".join([f"### {name}", about, table(("property", "type", ""), rows)])


def _optional(part: Schema) -> str:
    default = part.get("default")
    return "optional" if default in (None, [], {}) else f"optional, default {code(_shown(default))}"


def _shown(default: Any) -> str:
    if isinstance(default, dict):
        default = {name: value for name, value in default.items() if value not in (0, [], None)}
    return default if isinstance(default, str) else json.dumps(default)


def _docstring(text: str | None) -> tuple[str, dict[str, str]]:
    """A docstring's prose, and what its ``:ivar`` say of each property."""
    about, *variables = re.split(r"(?m)^\s*:(?:ivar|param) ", text or "")
    notes = {}
    for variable in variables:
        name, _, meaning = variable.partition(":")
        first, *rest = name.split("_")
        notes[code(first + "".join(word.title() for word in rest))] = prose(meaning)
    return prose(about), notes


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        return _link(str(schema["$ref"]).rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " ".join(code(str(word)) for word in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties", True)
        return "object" if values is True else f"object of {_type(values)}"
    return str(schema.get("type", "any"))


def _link(name: str) -> str:
    words = _enumerations().get(name)
    return f"[{name}](#{name.lower()})" if words is None else words


@cache
def _enumerations() -> dict[str, str]:
    schemas = bare_app().openapi()["components"]["schemas"]
    return {
        name: _words(name, schema["enum"]) for name, schema in schemas.items() if "enum" in schema
    }


def _words(name: str, words: list[str]) -> str:
    if len(words) > MANY_WORDS:
        return f"[{name}](codes.md#{name.lower()})"
    return " ".join(code(word) for word in words)


def _settings() -> str:
    _, notes = _docstring(HubSettings.__doc__)
    rows = []
    for name, field in HubSettings.model_fields.items():
        default = field.default
        shown = default.get_secret_value() if isinstance(default, SecretStr) else default
        camel = code(re.sub(r"_(.)", lambda m: m[1].upper(), name))
        variable = code(f"FORGE_HUB_{name.upper()}")
        rows.append((variable, notes[camel], "none" if shown is None else code(str(shown))))
    return table(("variable", "meaning", "default"), rows)
