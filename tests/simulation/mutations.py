"""Bugs that are put into the code in memory, to show that the simulation finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import forge_bridge.attempt_run as attempt_run
import forge_bridge.perform as perform
from forge_bridge.attempt_run import AttemptRun
from forge_bridge.flows import start, teardown
from forge_bridge.images.collect import ImageCollector
from forge_bridge.images.gates import Gates
from forge_bridge.images.pipeline import ImagePipeline
from forge_bridge.sandbox import publish
from forge_core import offer_rules
from forge_core.admission import Admission
from forge_core.ready import Ready, RecordKind
from forge_core.wire.codes import CleanupTrigger, RemovalOutcome


def _drop_record() -> Any:
    """What is intended is not recorded."""
    honest = perform.record

    async def record(ready: Ready, *rest: Any) -> None:
        kept = tuple(line for line in ready.records if line.kind is not RecordKind.INTENT)
        await honest(replace(ready, records=kept), *rest)

    return mock.patch.object(attempt_run, "record", record)


def _free_early() -> Any:
    """What resisted its removal counts as removed."""
    honest = teardown.remove

    async def remove(*arguments: Any) -> Any:
        removed = await honest(*arguments)
        return removed.model_copy(update={"outcome": RemovalOutcome.REMOVED, "detail": None})

    return mock.patch.object(teardown, "remove", remove)


def _skip_fence() -> Any:
    """A higher fence ends nothing of the lower ones."""
    return mock.patch.object(Admission, "superseded_by", return_value=())


def _overwrite() -> Any:
    """A branch that somebody else has moved is pushed to all the same."""
    return mock.patch.object(publish, "before_push", return_value=None)


def _ignore_expiry() -> Any:
    """A permission to run on the host counts, whatever it says."""
    return mock.patch.object(offer_rules, "refuse_fallback", return_value=None)


def _free_subnets_early() -> Any:
    """The subnets of a dispatch are anybody's while its networks are being removed."""
    honest = teardown.tear_down

    async def tear_down(run: AttemptRun, trigger: CleanupTrigger) -> Any:
        run.runner.admission.subnets.release(run.state.key)
        return await honest(run, trigger)

    return mock.patch.object(start, "tear_down", tear_down)


def _skip_gates() -> Any:
    """What a gate says no to is used all the same."""
    return mock.patch.object(Gates, "_refuse", return_value=None)


def _hold_nothing() -> Any:
    """Disk pressure takes images that attempts have, too."""
    return mock.patch.object(ImagePipeline, "held", return_value=set())


def _tidy_nothing() -> Any:
    """What was never promoted stays."""
    return mock.patch.object(ImageCollector, "_tidy_image", mock.AsyncMock())


MUTATIONS: Final[dict[str, Callable[[], Any]]] = {
    "drop-record": _drop_record,
    "free-early": _free_early,
    "free-subnets-early": _free_subnets_early,
    "hold-nothing": _hold_nothing,
    "ignore-expiry": _ignore_expiry,
    "overwrite": _overwrite,
    "skip-fence": _skip_fence,
    "skip-gates": _skip_gates,
    "tidy-nothing": _tidy_nothing,
}


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """The code with this bug, for the block; None: as it is."""
    if name is None:
        yield
        return
    with MUTATIONS[name]():
        yield
