"""What several of the tests on real parts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from project_parts import Images

from engines import Engine
from own_daemon import OwnDaemon
from rig import Rig, running_rig


@pytest.fixture(scope="module")
def rig(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory, module_runner_id: str
) -> Iterator[Rig]:
    """Hub and bridge with their own settings, for the tests of one module."""
    with running_rig(tmp_path_factory.mktemp("rig"), engine, module_runner_id) as rig:
        yield rig


@pytest.fixture(scope="module")
def images(engine: Engine, module_runner_id: str) -> Iterator[Images]:
    """The images that the runner of one module builds; none stays."""
    images = Images(engine, module_runner_id)
    yield images
    images.clear()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnDaemon]:
    """An engine that the tests of one module may freeze and kill."""
    own = OwnDaemon(tmp_path_factory.mktemp("own"))
    yield own
    own.remove()
