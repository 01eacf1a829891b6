"""What may go wrong, and how often: chosen anew by each seed (swarm testing).

A seed switches each kind of fault on or off and gives it a rate, so that some seeds try one
kind thoroughly and others many at once.  After :meth:`Faults.stop` nothing new goes wrong.
"""

from __future__ import annotations

import random  # noqa: TID251 - an argument's type; the instances are seeded
from dataclasses import dataclass, fields


@dataclass(slots=True)
class Faults:
    """Probabilities per request, message or container; 0: never.

    Engine: ``engine_slow`` answers after the caller gave up, but does it; ``engine_lost`` breaks
    the connection before or after it was done; ``engine_full`` has no room for a new thing;
    ``engine_stuck`` resists a removal for a while; ``exit_lies`` tells a wrong exit code.
    Networks: ``pools_empty`` has no address left for one; ``network_lies`` drops its options;
    ``endpoint_stuck`` keeps the endpoint of a container that has ended.
    ``proxy_dies`` and ``service_dies`` sooner or later; ``probe_lies`` about what it saw.
    Host: ``host_stays`` leaves something running; ``host_resists`` the end of a process.
    Containers: ``pid1_hostile`` does not do what the supervisor must; ``oom`` kills the agent.
    Network: ``lost``, ``doubled`` and ``late`` messages from the hub; ``forged`` renewals with the
    MAC of others; ``ack_lost`` drops the hub's answer with the connection, ``ack_late`` takes most
    of a minute over it; ``dropped`` ends a connection at a message; ``refused`` lets none begin.
    Disk: ``disk_full`` refuses a write, ``disk_broken`` a sync; ``disk_slow`` takes seconds;
    ``ledger_full`` at an append: from then on that ledger takes nothing but an end.
    Git: ``git_refuses`` a commit or a bundle.  Hub: ``hub_errs`` answers with an error.
    Remote: ``remote_away`` for a moment, ``remote_refuses`` for good, ``remote_slow`` to carry out
    a push or to answer it; ``remote_human`` pushes too.
    Images: ``build_fails`` in a step, ``build_lost`` breaks the connection once the image is there;
    ``builder_away`` for a moment; ``gate_refuses`` an image, a signature, or to work at all.
    """

    engine_slow: float = 0.0
    engine_lost: float = 0.0
    engine_full: float = 0.0
    engine_stuck: float = 0.0
    exit_lies: float = 0.0
    pools_empty: float = 0.0
    network_lies: float = 0.0
    endpoint_stuck: float = 0.0
    proxy_dies: float = 0.0
    service_dies: float = 0.0
    host_stays: float = 0.0
    host_resists: float = 0.0
    probe_lies: float = 0.0
    pid1_hostile: float = 0.0
    oom: float = 0.0
    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    forged: float = 0.0
    ack_lost: float = 0.0
    ack_late: float = 0.0
    refused: float = 0.0
    dropped: float = 0.0
    disk_full: float = 0.0
    disk_broken: float = 0.0
    disk_slow: float = 0.0
    ledger_full: float = 0.0
    git_refuses: float = 0.0
    hub_errs: float = 0.0
    remote_away: float = 0.0
    remote_refuses: float = 0.0
    remote_slow: float = 0.0
    remote_human: float = 0.0
    build_fails: float = 0.0
    build_lost: float = 0.0
    builder_away: float = 0.0
    gate_refuses: float = 0.0

    @classmethod
    def of(cls, rng: random.Random, builds: random.Random) -> Faults:
        """Those of one seed: few kinds or about half of them, from rare to frequent.

        :param builds: chooses those of images, which few seeds would try otherwise.
        """
        chosen = cls()
        share = rng.choice(SHARES)
        for name, most in MOST.items():
            if rng.random() < share:
                setattr(chosen, name, most * rng.random() ** 2)
        for name in OF_BUILDS:
            if builds.random() < SHARES[-1]:
                setattr(chosen, name, MOST[name] * builds.random())
        return chosen

    def stop(self) -> None:
        """From here on everything works."""
        for field in fields(self):
            setattr(self, field.name, 0.0)


SHARES = (0.05, 0.2, 0.5)
"""Of the kinds: with half of them hardly an attempt reaches its end by itself."""
MOST = {
    "engine_slow": 0.2,
    "engine_lost": 0.2,
    "engine_full": 0.1,
    "engine_stuck": 0.5,
    "exit_lies": 0.5,
    "pools_empty": 0.2,
    "network_lies": 0.1,
    "endpoint_stuck": 0.8,
    "proxy_dies": 0.5,
    "service_dies": 0.5,
    "host_stays": 0.8,
    "host_resists": 0.5,
    "probe_lies": 0.2,
    "pid1_hostile": 0.6,
    "oom": 0.3,
    "lost": 0.3,
    "doubled": 0.5,
    "late": 0.5,
    "forged": 0.5,
    "ack_lost": 0.1,
    "ack_late": 0.2,
    "refused": 0.8,
    "dropped": 0.05,
    "disk_full": 0.2,
    "disk_broken": 0.05,
    "disk_slow": 0.2,
    "ledger_full": 0.05,
    "git_refuses": 0.3,
    "hub_errs": 0.2,
    "remote_away": 0.5,
    "remote_refuses": 0.2,
    "remote_slow": 0.5,
    "remote_human": 0.3,
    "build_fails": 0.4,
    "build_lost": 0.5,
    "builder_away": 0.3,
    "gate_refuses": 0.5,
}
OF_BUILDS = ("build_fails", "build_lost", "builder_away", "gate_refuses")
assert set(MOST) == {field.name for field in fields(Faults)}
