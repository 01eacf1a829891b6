"""What the tests of the contract share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_core.contract import CONTRACT_PATH, read_contract
from forge_core.errors import RefusedError

REFERENCE = Path(__file__).resolve().parents[2] / "docs/reference"
CORPUS = Path(__file__).with_name("contract_faults.txt")
WHOLE = {
    "version": 1,
    "image": {"dockerfile": ".forge/Dockerfile"},
    "tmp": {"executable": True},
    "network": {"policy": "public_allowlist", "domains": ["api.example.org", ".example.net"]},
    "services": [{"name": "postgres", "version": "15"}, {"name": "redis"}],
    "ports": [{"name": "web", "container": 8080}],
    "environment": {"LOG_LEVEL": "debug", "NOTHING": ""},
    "secrets": ["API_KEY"],
}


def refusal(data: str | bytes) -> RefusedError:
    """How a contract is refused; that it is not fails the test."""
    with pytest.raises(RefusedError) as caught:
        read_contract(data.encode() if isinstance(data, str) else data)
    assert caught.value.code == "contract_invalid"
    return caught.value


def faults(data: str | bytes) -> list[str]:
    """Every line of the refusal but its head."""
    head, *lines = str(refusal(data)).split("\n")
    assert head == f"cannot use {CONTRACT_PATH}:"
    return [line.removeprefix("  ") for line in lines]


def as_json(document: object) -> bytes:
    """JSON as YAML takes it: every value in the one way in which it may be written."""
    return json.dumps(document, ensure_ascii=False).encode()


def corpus() -> dict[str, tuple[str, list[str]]]:
    """Title → contract and what is said of it."""
    blocks = {}
    for block in CORPUS.read_text("utf-8").split("\n== ")[1:]:
        title, _, rest = block.partition("\n")
        text, _, said = rest.partition("\n--\n")
        blocks[title] = (f"{text}\n", said.strip().split("\n"))
    return blocks
