"""The pages of docs/ that are generated, and the command that writes or checks them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .reference_cli import cli_page
from .reference_codes import codes_page
from .reference_contract import contract_page, contract_schema_page
from .reference_requirements import requirements_page
from .reference_rest import rest_page
from .reference_settings import settings_page
from .reference_wire import schema_page, wire_page


def pages(root: Path) -> Iterator[tuple[Path, str]]:
    """Path below ``root`` → what must be in it."""
    reference = Path("docs/reference")
    yield reference / "settings.md", settings_page()
    yield reference / "wire.md", wire_page()
    yield reference / "wire.schema.json", schema_page()
    yield reference / "contract.md", contract_page()
    yield reference / "forge.sandbox.schema.json", contract_schema_page()
    yield reference / "codes.md", codes_page()
    yield reference / "cli.md", cli_page()
    yield reference / "rest.md", rest_page()
    yield Path("docs/requirements.md"), requirements_page(root)


def main(arguments: Sequence[str], root: Path) -> int:
    """Write what changed; with ``--check`` say what would, and fail if anything would."""
    parser = argparse.ArgumentParser(prog="generate-reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if stale")
    check = parser.parse_args(arguments).check
    stale = []
    for path, text in pages(root):
        file = root / path
        if file.exists() and file.read_text("utf-8") == text:
            continue
        stale.append(path)
        if not check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path}")
    if check and stale:
        print("run scripts/generate-reference and commit what it writes", file=sys.stderr)
        return 1
    return 0
