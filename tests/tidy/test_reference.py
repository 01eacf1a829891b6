"""What is generated is up to date, and what is written by hand agrees with the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from lib.reference_requirements import marked_tests
from tracked import ROOT, tracked_files

from forge_bridge.settings import VARIABLES, load_settings
from forge_bridge.settings_file import read_settings_file
from forge_core.wire.events import PAYLOADS
from forge_core.wire.from_bridge import HUB_METHODS
from forge_core.wire.from_hub import CLIENT_TARGETS

OF_AGENTS = {"FORGE_ATTEMPT_ID", "FORGE_BRANCH", "FORGE_HOST_RESOURCE", "FORGE_PROMPT"}
"""What an agent finds in its environment."""

SCHEMA = ROOT / "docs/reference/wire.schema.json"


def _generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/generate-reference"), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_generated_pages_are_up_to_date() -> None:
    checked = _generate("--check")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.requirement("B-19")
def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs/reference/settings.md").read_text("utf-8")
    missing = [variable for variable in VARIABLES if f"`{variable}`" not in page]
    assert missing == []


def test_every_variable_that_is_named_anywhere_is_a_setting() -> None:
    """A document or a unit file that sets what nobody reads misleads."""
    others = ("FORGE_HUB_", "FORGE_TESTBED_", "FORGE_DEMO_")
    files = [p for p in tracked_files() if p.parts[0] in {"docs", "examples", "systemd"}]
    named = {
        name
        for path in [*files, Path("README.md"), Path("CONTRIBUTING.md")]
        for name in re.findall(r"\bFORGE_[A-Z][A-Z0-9_]+\b", (ROOT / path).read_text("utf-8"))
    }
    known = {*VARIABLES, "FORGE_BRIDGE_SETTINGS_FILE", *OF_AGENTS}
    assert {name for name in named - known if not name.startswith(others)} == set()


def test_the_example_of_a_settings_file_is_accepted(tmp_path: Path) -> None:
    text = (ROOT / "examples/bridge.env").read_text("utf-8")
    every = re.sub(r"^#(FORGE_)", r"\1", text, flags=re.MULTILINE)
    for content in (text, every):
        file = tmp_path / "bridge.env"
        file.write_text(content)
        file.chmod(0o600)
        assert load_settings(file, {}).warnings == ()
    values, problems = read_settings_file(file, "FORGE_BRIDGE_SETTINGS_FILE")
    assert problems == ()
    assert set(values) <= set(VARIABLES)
    assert {"FORGE_SERVER_URL", "FORGE_TRUST_DOMAIN_ID", "FORGE_API_TOKEN_FILE"} <= set(values)


def _parts(schema: object) -> Iterator[dict[str, object]]:
    if isinstance(schema, dict):
        yield schema
    below = schema.values() if isinstance(schema, dict) else schema
    assert isinstance(below, Iterable)
    for item in below:
        if isinstance(item, dict | list):
            yield from _parts(item)


def test_the_schema_is_whole_and_portable() -> None:
    document = json.loads(SCHEMA.read_text("utf-8"))
    assert set(document["hubMethods"]) == set(HUB_METHODS)
    assert set(document["clientTargets"]) == set(CLIENT_TARGETS)
    assert set(document["eventPayloads"]) == {kind.value for kind in PAYLOADS}
    parts = list(_parts(document))
    references = {part["$ref"] for part in parts if "$ref" in part}
    assert references == {f"#/$defs/{name}" for name in document["$defs"]}
    # ECMA 262 knows no \\Z, and the $ of Python would take a line break as well.
    patterns = [str(part["pattern"]) for part in parts if "pattern" in part]
    assert patterns
    assert not [pattern for pattern in patterns if "\\Z" in pattern or not pattern.endswith("$")]
    offer = document["$defs"]["Offer"]
    assert {"offerId", "expiresInMs"} <= set(offer["required"])
    assert offer["properties"]["attemptId"]["pattern"] == "^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$"


def test_every_requirement_that_a_test_names_is_one() -> None:
    titles = tomllib.loads((ROOT / "docs/requirements.toml").read_text("utf-8"))
    known = {row for rows in titles.values() for row in rows}
    assert set(marked_tests(ROOT / "tests")) <= known


def test_marks_are_found_wherever_pytest_takes_them(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        'pytestmark = [pytest.mark.requirement("B-01")]\n'
        '@pytest.mark.requirement("B-02", "B-03")\nasync def test_a(): ...\n'
        "@pytest.mark.parametrize('x', ["
        'pytest.param(1, marks=pytest.mark.requirement("B-04"))])\ndef test_b(x): ...\n'
        '@pytest.mark.requirement("B-05")\nclass TestC:\n'
        '    @pytest.mark.requirement("B-06")\n    def test_d(self): ...\n'
        "def helper(): ...\n"
    )
    found = {row: {test for _, test in tests} for row, tests in marked_tests(tmp_path).items()}
    assert found == {
        "B-01": {"test_a", "test_b", "TestC.test_d"},
        "B-02": {"test_a"},
        "B-03": {"test_a"},
        "B-04": {"test_b"},
        "B-05": {"TestC.test_d"},
        "B-06": {"TestC.test_d"},
    }
