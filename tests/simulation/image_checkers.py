"""The invariants of images: who builds, what runs, and what is left of both.

``one build``     of a key at a time, as long as the life that asked for it lives
``promoted``      what runs was recorded as promoted, passed its gates, and is the key's
``active``        no image is asked to go that an attempt has resolved and still needs
``nothing left``  in the end, each image of ours has its record and its own name alone, each
                  record its image and evidence, and no more evidence is kept than may be
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forge_core.attempt import Phase
from forge_core.image_names import IMAGE_KEY, ImageIdentity, images_of
from forge_core.image_ports import BuildRequest
from forge_core.labels import ROLE
from forge_core.ledger import parse_ledger
from forge_core.ports import EngineImage
from forge_core.wire.codes import EventType

from .disk import ledger_path
from .images import ATTESTATIONS, LOGS, RECORDS, key_in, record_in
from .setup import KEPT_EVIDENCE, THIS_RUNNER

if TYPE_CHECKING:
    from .bridge import Life
    from .checkers import Checkers

AGENT = "agent"


class ImageCheckers:
    """Told by builder, disk and the bridge's doors what they see."""

    def __init__(self, checkers: Checkers) -> None:
        self._checkers = checkers
        self._world = checkers.world
        self._promoted: set[tuple[str, str]] = set()

    def build_begins(self, process: str, request: BuildRequest) -> None:
        """A life asks for one."""
        key = request.labels[IMAGE_KEY]
        at_it = [
            build
            for build in self._checkers.simulation.builds.running
            if build.process == process and build.request.labels[IMAGE_KEY] == key
        ]
        self._world.require(not at_it, "one build", f"{key} is built twice at once")

    def synced(self, path: str, data: bytes) -> None:
        """Something is on disk for good; a record, perhaps."""
        if path.startswith(RECORDS):
            record = record_in(data)
            self._promoted.add((record.image_key, record.image_id))
            evident = (
                f"{ATTESTATIONS}{record.image_key}.json" in self._checkers.simulation.disk.synced
            )
            self._world.require(evident, "promoted", f"{record.image_id} has no evidence on disk")

    def asks_for_container(self, request: Any) -> None:
        """Of an image of ours: that of an agent must have been promoted."""
        simulation = self._checkers.simulation
        image = simulation.engine.images.get(request["Image"])
        if request["Labels"][ROLE] != AGENT or image is None or not image.labels:
            return
        key = image.labels[IMAGE_KEY]
        recorded = (key, image.id) in self._promoted
        self._world.require(recorded, "promoted", f"{image.id} runs and was never recorded")
        passes = simulation.builds.verdicts.get(image.id, False)
        self._world.require(passes, "promoted", f"{image.id} runs and did not pass its gates")

    def asks_to_remove(self, life: Life, name: str) -> None:
        """A name of an image, which goes with its last."""
        simulation = self._checkers.simulation
        for image in simulation.engine.images.values():
            if name in (*image.names, image.id) and not {*image.names} - {name}:
                ours = image.labels.items() >= images_of(THIS_RUNNER).items()
                self._world.require(ours, "foreign", f"{name} is removed")
                needed = [key for key in self._running(life) if self._resolved(key) == image.id]
                self._world.require(not needed, "active", f"{image.id} goes, {needed} need it")

    def left(self) -> list[str]:
        """What nothing can use, or what lacks what it needs."""
        simulation = self._checkers.simulation
        files = simulation.disk.files
        records = [record_in(files[path]) for path in simulation.disk.names(RECORDS, ".json")]
        ids = {record.image_key: record.image_id for record in records}
        there = {image.id: image for image in simulation.engine.images.values() if image.labels}
        found = [f"{i.id} {i.names}" for i in there.values() if not _is_used(i, ids)]
        found += [f"record of {ids[key]}" for key in ids if ids[key] not in there]
        attested = set(map(key_in, simulation.disk.names(ATTESTATIONS, ".json")))
        logged = set(map(key_in, simulation.disk.names(LOGS, ".json")))
        found += [f"no evidence of {key}" for key in sorted(ids.keys() - attested)]
        unused = sorted((attested | logged) - ids.keys())
        return found + [f"evidence of {unused}"] * (len(unused) > KEPT_EVIDENCE)

    def _running(self, life: Life) -> list[Any]:
        attempts = {} if life.runner is None else life.runner.attempts
        return [key for key, run in attempts.items() if run.state.phase is Phase.RUNNING]

    def _resolved(self, key: Any) -> str | None:
        data = self._checkers.simulation.disk.synced.get(ledger_path(*key), b"")
        for record in parse_ledger(data).records:
            if record.data.get("type") == EventType.IMAGE_RESOLVED:
                return str(record.data["payload"]["digest"])
        return None


def _is_used(image: EngineImage, ids: dict[str, str]) -> bool:
    identity = ImageIdentity.from_labels(image.labels)
    assert identity is not None, image
    return ids.get(identity.image_key) == image.id and image.names == (identity.promoted,)
