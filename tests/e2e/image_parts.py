"""Images for tests, made without a builder, and what is left of them."""

from __future__ import annotations

import io
import json
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lib.engine_api import EngineApi


def layer(files: Mapping[str, bytes]) -> bytes:
    """A root file system; every file is executable."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@contextmanager
def imported_image(api: EngineApi, files: Mapping[str, bytes], *changes: str) -> Iterator[str]:
    """An image of these files; its id.  It is gone afterwards.

    :param changes: instructions of a Dockerfile, such as ``ENV A=B``.
    """
    name = f"forge-test-{uuid.uuid4().hex}:1"
    repository, _, tag = name.partition(":")
    query = {"fromSrc": "-", "repo": repository, "tag": tag}
    if changes:
        query["changes"] = "\n".join(changes)
    status, answer = api.call(
        "POST", "/images/create", query, body=layer(files), content_type="application/x-tar"
    )
    assert status == 200, answer
    identity = json.loads(answer.splitlines()[-1])["status"]
    try:
        yield str(identity)
    finally:
        api.call("DELETE", f"/images/{name}", {"force": "1"})


@contextmanager
def changed_image(
    api: EngineApi, base: str, files: Mapping[str, bytes], *changes: str
) -> Iterator[str]:
    """An image that is another one with these files and instructions; its id.  Gone afterwards."""
    _, answer = api.call("POST", "/containers/create", body=json.dumps({"Image": base}))
    container = json.loads(answer)["Id"]
    tag = uuid.uuid4().hex
    try:
        status, answer = api.call(
            "PUT",
            f"/containers/{container}/archive",
            {"path": "/"},
            body=layer(files),
            content_type="application/x-tar",
        )
        assert status == 200, answer
        query = {"container": container, "repo": "forge-test", "tag": tag}
        if changes:
            query["changes"] = "\n".join(changes)
        status, answer = api.call("POST", "/commit", query, body="{}")
        assert status == 201, answer
        yield str(json.loads(answer)["Id"])
    finally:
        api.call("DELETE", f"/containers/{container}", {"force": "1"})
        api.call("DELETE", f"/images/forge-test:{tag}", {"force": "1"})


def file_in_image(api: EngineApi, image: str, path: str) -> bytes:
    """A regular file of an image."""
    _, answer = api.call("POST", "/containers/create", body=json.dumps({"Image": image}))
    container = json.loads(answer)["Id"]
    try:
        status, archive = api.call("GET", f"/containers/{container}/archive", {"path": path})
        assert status == 200, archive
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            (entry,) = tar.getmembers()
            content = tar.extractfile(entry)
            assert content is not None, entry.linkname
            return content.read()
    finally:
        api.call("DELETE", f"/containers/{container}", {"force": "1"})
