"""Projects that have an image of their own, and what an engine has of such images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from engines import Engine, extra_image
from rig import Rig

CONTRACT = "version: 1\nimage:\n  dockerfile: .forge/Dockerfile\n"


def commit(rig: Rig, *steps: str, wishes: str = "", files: Mapping[str, str] | None = None) -> str:
    """A project whose image is busybox and these steps; returns the commit's id.

    :param wishes: what its contract says besides.
    :param files: others, and in place of these.
    """
    dockerfile = "\n".join((f"FROM {rig.engine.busybox_image}", "USER root", *steps, ""))
    ours = {".forge/forge.sandbox.yml": CONTRACT + wishes, ".forge/Dockerfile": dockerfile}
    return rig.add_commit({**ours, **(files or {})})


def dispatch(rig: Rig, approved: str, *argv: str, **more: Any) -> str:
    """A session on a commit that is approved as it is; without ``argv`` it does nothing."""
    given = {"inputCommit": approved, "approvedCommit": approved, **more}
    return rig.dispatch(*(argv or ("true",)), **given)


class Images:
    """What a runner has built, by another door than ours."""

    def __init__(self, engine: Engine, runner_id: str) -> None:
        self._api = engine.api
        labels = [f"dev.forge.runner-id={runner_id}", "dev.forge.managed=image"]
        self._filters = json.dumps({"label": labels})

    def all(self) -> dict[str, list[str]]:
        """The names of each image, by its id."""
        found = self._api.get("/images/json", {"filters": self._filters})
        return {image["Id"]: sorted(image["RepoTags"] or ()) for image in found}

    def names(self) -> list[str]:
        return sorted(name for names in self.all().values() for name in names)

    def tag(self, image: str, name: str) -> None:
        repository, _, tag = name.rpartition(":")
        path = f"/images/{quote(image, safe='')}/tag"
        status, answer = self._api.call("POST", path, {"repo": repository, "tag": tag})
        assert status == 201, answer

    def commit(self, image: str, name: str) -> str:
        """An image made of another one's container, as anybody could; its id."""
        container = json.dumps({"Image": image})
        created = json.loads(self._api.call("POST", "/containers/create", body=container)[1])["Id"]
        try:
            repository, _, tag = name.rpartition(":")
            query = {"container": created, "repo": repository, "tag": tag}
            return str(json.loads(self._api.call("POST", "/commit", query)[1])["Id"])
        finally:
            self._api.call("DELETE", f"/containers/{created}", {"force": "1"})

    def remove(self, name: str) -> None:
        self._api.call("DELETE", f"/images/{quote(name, safe='')}", {"force": "1"})

    def clear(self) -> None:
        """Remove them all."""
        for image in self.all():
            self.remove(image)
        assert self.all() == {}


@contextmanager
def rig_with_builder(
    directory: Path, engine: Engine, runner_id: str, **settings: str
) -> Iterator[Rig]:
    """A rig whose images are built in a builder of its own; it leaves nothing, no cache either."""
    rig = Rig(directory, engine, runner_id)
    try:
        rig.start_hub()
        rig.start_bridge(settings, FORGE_SANDBOX_BUILDKIT_IMAGE=extra_image(engine, "buildkit"))
        yield rig
    finally:
        rig.stop()
        for name in rig.resources():
            assert name.startswith("forge-build-cache-"), name  # it outlives its builder
            engine.api.call("DELETE", f"/volumes/{name}", {"force": "1"})
        Images(engine, runner_id).clear()
