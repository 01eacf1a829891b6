"""``forge sandbox verify-provenance``: does a document prove where an image came from (B-30)?"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from forge_bridge.command_options import Json
from forge_bridge.terminal import EXIT_FAILURE, complain, print_json, print_table, reported
from forge_core.errors import RefusedError
from forge_core.tree_rules import is_object_id

if TYPE_CHECKING:
    from forge_core.provenance import Provenance

MAX_DOCUMENT_BYTES: Final = 32 << 20
_IMAGE_ID = re.compile(r"(?:sha256:)?([0-9a-f]{64})\Z")
_DOCUMENT = re.compile(r"[a-z][a-z0-9-]{0,40}(?:\.[a-z0-9]{1,10}){1,2}\Z")

File = Annotated[Path, typer.Argument(help="The provenance: provenance.dsse.json.")]
Key = Annotated[
    Path, typer.Option("--key", metavar="FILE", help="Public half of the signing key, in PEM.")
]
Image = Annotated[
    str | None,
    typer.Option("--image", metavar="ID", help="It must be about this image: sha256:…"),
]
Commit = Annotated[
    str | None, typer.Option("--commit", metavar="SHA", help="It must be built from this commit.")
]
Repository = Annotated[
    str | None,
    typer.Option("--repository", metavar="NAME", help="It must be built from this repository."),
]
Documents = Annotated[
    bool,
    typer.Option("--documents", help="Check the documents beside it that it names, too."),
]


@reported
def verify_provenance(
    file: File,
    key: Key,
    image: Image = None,
    commit: Commit = None,
    repository: Repository = None,
    documents: Documents = False,
    json: Json = False,
) -> None:
    """Check the signed provenance of an image.

    Who signed it, and that it is about the image, commit or repository that is named.

    Without --image, --commit or --repository it only says what the document is about.

    Exit status: 0 valid, 1 not valid, 2 it could not be looked at.
    """
    from forge_core.provenance import Expected
    from forge_core.provenance import verify_provenance as verified
    from forge_edges.signing_key import load_public_key

    expected = Expected(_image_id(image), repository, _commit(commit))
    public_key = load_public_key(key)
    try:
        found = verified(_read(file), public_key, expected)
        if documents:
            _check_documents(found, file.parent)
    except RefusedError as error:
        if error.code == "configuration":
            raise
        _say_invalid(file, str(error), json=json)
        raise typer.Exit(EXIT_FAILURE) from None
    _say_valid(found, json=json)


def _say_valid(found: Provenance, *, json: bool) -> None:
    if json:
        print_json({"valid": True, **_as_json(found)})
        return
    rows = [
        ("image", ", ".join(found.image_ids)),
        ("repository", found.repository),
        ("commit", found.commit),
        ("builder", found.builder_id),
        ("built", f"{found.started_on} to {found.finished_on}"),
        *((name, digest) for name, digest in sorted(found.byproducts.items())),
    ]
    print_table(("valid", ""), rows)


def _say_invalid(file: Path, reason: str, *, json: bool) -> None:
    if json:
        print_json({"valid": False, "reason": reason})
    else:
        complain(f"error: {file} does not prove it: {reason}")


def _as_json(found: Provenance) -> dict[str, Any]:
    return {
        "images": list(found.image_ids),
        "repository": found.repository,
        "commit": found.commit,
        "builder": found.builder_id,
        "startedOn": found.started_on,
        "finishedOn": found.finished_on,
        "documents": dict(found.byproducts),
    }


def _check_documents(found: Provenance, directory: Path) -> None:
    for name, digest in found.byproducts.items():
        if not _DOCUMENT.match(name):
            raise RefusedError(f"it names the document {name[:80]!r}", code="provenance_refused")
        if f"sha256:{hashlib.sha256(_read(directory / name)).hexdigest()}" != digest:
            raise RefusedError(f"{name} is not the one that it names", code="provenance_refused")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise _unusable(f"cannot read {path}: {error.strerror}") from None
    if len(content) > MAX_DOCUMENT_BYTES:
        raise _unusable(f"cannot read {path}: it has more than {MAX_DOCUMENT_BYTES} bytes")
    return content


def _image_id(text: str | None) -> str | None:
    match = _IMAGE_ID.match(text or "")
    if text is not None and match is None:
        raise _unusable(
            f"cannot use --image {text[:80]!r}: it is no image id; "
            "docker image inspect --format '{{.Id}}' IMAGE shows it"
        )
    return None if match is None else f"sha256:{match[1]}"


def _commit(text: str | None) -> str | None:
    if text is not None and not is_object_id(text):
        raise _unusable(f"cannot use --commit {text[:80]!r}: it is no full commit id")
    return text


def _unusable(message: str) -> RefusedError:
    return RefusedError(message, code="configuration")
