"""The contract: what it may say, how the rest is refused, and that its schema agrees."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from contract_parts import REFERENCE, WHOLE, as_json, corpus, faults, refusal
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from forge_core.contract import MAX_FAULTS_SHOWN, Contract, read_contract
from forge_core.errors import RefusedError
from forge_core.sandbox_spec import BLANKED_VARIABLES
from forge_core.wire.codes import NetworkPolicy, ServiceName

pytestmark = pytest.mark.requirement("B-41", "B-52")

SCHEMA_TEXT = (REFERENCE / "forge.sandbox.schema.json").read_text("utf-8")


def _for_python(part: dict[str, Any]) -> dict[str, Any]:
    """Patterns of ECMA 262 as Python has them, whose own $ takes a line break too."""
    pattern = part.get("pattern")
    return part | {"pattern": pattern.replace("$", r"\Z")} if isinstance(pattern, str) else part


SCHEMA = Draft202012Validator(json.loads(SCHEMA_TEXT, object_hook=_for_python))
PINNED = f"registry.example:5000/team/image@sha256:{'a' * 64}"
SECRET = "S3CRET-VALUE"
CORPUS = corpus()
BEYOND_THE_SCHEMA = (
    "is there twice",
    "is in environment and in secrets",
    "it is no domain name",
    "it must be repository@sha256:<64 hex>",
)
"""What contract.md says that the schema does not know."""


def test_the_smallest_contract_asks_for_nothing() -> None:
    contract = read_contract(b"version: 1\n")
    assert contract == Contract(version=1)
    assert contract.image is None
    assert contract.network.policy is NetworkPolicy.NONE
    assert not contract.tmp.executable
    assert (contract.services, contract.ports, contract.secrets) == ((), (), ())
    assert contract.environment == {}


@pytest.mark.requirement("B-54", "B-55")
def test_a_whole_contract_is_read() -> None:
    contract = read_contract(as_json(WHOLE))
    assert contract.image is not None
    assert contract.image.dockerfile == ".forge/Dockerfile"
    assert contract.tmp.executable
    assert contract.network.policy is NetworkPolicy.PUBLIC_ALLOWLIST
    assert contract.network.domains == ("api.example.org", ".example.net")
    assert [(s.name, s.version) for s in contract.services] == [
        (ServiceName.POSTGRES, "15"),
        (ServiceName.REDIS, None),
    ]
    assert [(port.name, port.container) for port in contract.ports] == [("web", 8080)]
    assert contract.environment == {"LOG_LEVEL": "debug", "NOTHING": ""}
    assert contract.secrets == ("API_KEY",)


def test_the_documented_example_is_read() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (REFERENCE / "contract.md").read_text(), re.DOTALL)
    assert read_contract(text.encode()).environment["PATH"].startswith("/opt/venv/bin:")


def test_an_image_that_is_there_already_is_pinned() -> None:
    contract = read_contract(as_json({"version": 1, "image": {"reference": PINNED}}))
    assert contract.image is not None
    assert contract.image.reference == PINNED


def test_line_breaks_of_windows_change_nothing() -> None:
    text = as_json(WHOLE).decode().replace(", ", ",\n  ")
    assert read_contract(text.encode()) == read_contract(text.replace("\n", "\r\n").encode())
    assert read_contract(b"--- # a comment\nversion: 1\n...\n") == Contract(version=1)


@pytest.mark.requirement("B-54", "B-55")
@pytest.mark.parametrize("title", CORPUS)
def test_what_is_wrong_is_told_with_its_line_and_field(title: str) -> None:
    text, said = CORPUS[title]
    assert faults(text) == said


def test_the_field_is_that_of_the_first_fault() -> None:
    assert refusal("version: 1\nservices: [{name: x}]\nimage: {}").field == "services[0].name"
    assert refusal("").field == ""


def test_the_list_of_what_is_wrong_is_bounded() -> None:
    lines = faults("version: 1\n" + "".join(f"field{n}: 1\n" for n in range(500)))
    assert len(lines) == MAX_FAULTS_SHOWN + 1
    assert lines[-1] == f"and {500 - MAX_FAULTS_SHOWN} more"
    long = refusal(f"version: 1\n{'x' * 1000}: 1\nimage: {{dockerfile: {'y' * 60_000}}}")
    assert len(str(long)) < 1000
    assert len(long.field or "") < 100
    moving = refusal('version: 1\n"\\e[2J\\r": 1\nservices: [{name: "\\e[2J\\u202e"}]')
    assert all(line.isprintable() for line in str(moving).split("\n"))


@pytest.mark.parametrize(
    "value",
    ["{}", "[{}]", "&{} 1", "*{}", "!{} 1", "!{}!x 1", "'{}' x", '"{}', "\n  - {}", "|\n {}\n  x"],
)
def test_no_value_of_the_environment_is_ever_shown(value: str) -> None:
    text = f"version: 1\nenvironment:\n  A: 1\n  B: {value.replace('{}', SECRET)}\n"
    assert SECRET not in str(refusal(text))


@pytest.mark.parametrize("name", [*BLANKED_VARIABLES, "LD_ANYTHING", "FORGE_X", "https_proxy"])
def test_variables_of_the_loader_and_of_the_bridge_are_refused(name: str) -> None:
    for text in (f"version: 1\nenvironment: {{{name}: x}}", f"version: 1\nsecrets: [{name}]"):
        assert "it is not a project's to set" in str(refusal(text))


JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, 1, 2, -1, 65_536, "", "x", "15", "yes", [], ["x"], [1], {}, {"x": "y"}, [{}]]
)
ENTRIES = st.sampled_from(
    [
        *("example.org", ".example.org", "a.b.example", "bücher.example", "xn--a.example", "a.1b"),
        *("1.2.3.4", "x", "*.example.org", "Example.org", "example.org:1", "a.internal", "a..b"),
        *("a.0x1", "-a.org", ".org", "example.org.", f"{'a' * 64}.org", ".".join(["a" * 62] * 4)),
        f".{'.'.join(['a' * 62] * 4)}",
    ]
)
NAMES = st.sampled_from(
    ["A", "B_1", "PATH", "1A", "LD_X", "no_proxy", "PYTHONPATH", "A-B", "ENV", "", "A\n"]
)


def _field(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return values | values | values | JUNK


def _group(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    spoilt = {name: _field(values) for name, values in fields.items()}
    return st.fixed_dictionaries({}, optional=fields) | st.fixed_dictionaries(
        {}, optional={**spoilt, "other": JUNK}
    )


DOCUMENTS = st.fixed_dictionaries(
    {"version": st.sampled_from([1, 1, 1, 1, 2, "1", True])},
    optional={
        "image": _group(
            dockerfile=st.sampled_from([".forge/Dockerfile", "Dockerfile"]),
            reference=st.sampled_from([PINNED, "image", f"i:1@sha256:{'a' * 64}", f"{PINNED}a"]),
        ),
        "tmp": _group(executable=st.booleans()),
        "network": _group(
            policy=st.sampled_from([*NetworkPolicy, "all"]),
            domains=st.lists(_field(ENTRIES), max_size=3),
        ),
        "services": st.lists(
            _group(
                name=st.sampled_from([*ServiceName, "mysql"]),
                version=st.sampled_from(["15", "15.2", "", "-", 15, "x" * 64, "x" * 65]),
            ),
            max_size=4,
        ),
        "ports": st.lists(
            _group(
                name=st.sampled_from(["web", "a-1", "A", "a-", "-a", "a" * 32, "a" * 33, "a\n"]),
                container=st.integers(-1, 65_536),
            ),
            max_size=17,
        ),
        "environment": st.dictionaries(NAMES, _field(st.just("x")), max_size=3),
        "secrets": st.lists(_field(NAMES), max_size=3),
    },
)


@settings(max_examples=500)
@given(DOCUMENTS, st.dictionaries(st.sampled_from([*WHOLE, "other"]), JUNK, max_size=1))
@example(WHOLE, {})
@example({"version": 1, "secrets": ["A\n"]}, {})
def test_the_schema_and_the_reader_agree(
    document: dict[str, Any], replaced: dict[str, Any]
) -> None:
    document |= replaced
    said: list[str] | None = None
    try:
        read_contract(as_json(document))
    except RefusedError as error:
        said = str(error).split("\n")[1:]
    if not SCHEMA.is_valid(document):
        assert said
    elif said:
        assert [line for line in said if not any(rule in line for rule in BEYOND_THE_SCHEMA)] == []


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA.schema)
    assert SCHEMA.is_valid(WHOLE)
    for field, value in WHOLE.items():
        assert not SCHEMA.is_valid({**WHOLE, field: None}), field
        if isinstance(value, dict):
            assert not SCHEMA.is_valid({**WHOLE, field: {**value, "1x": "x"}}), field
    patterns = re.findall(r'"pattern": "(.*)"', SCHEMA_TEXT)
    assert patterns
    # ECMA 262 knows neither \Z nor \U.
    assert not [pattern for pattern in patterns if re.search(r"\\[ZU]", pattern)]
