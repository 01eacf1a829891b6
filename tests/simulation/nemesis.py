"""What happens to the parts as a whole: kills, freezes, partitions, restarts, and the operators.

A seed switches each kind on or off.  Every fault ends by itself, so that stopping the nemesis is
enough for everything to work again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from .disk import LEDGERS
from .engine import PROCESS as ENGINE
from .setup import THIS_RUNNER

if TYPE_CHECKING:
    from .simulation import Simulation

MEAN_GAPS_S: Final = (12.0, 40.0, 120.0)
"""From one disaster to the next; an attempt takes about as long as the longest."""


class Nemesis:
    """Does one thing after the other at random moments.

    :ivar kinds: what this seed's does.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._rng = simulation.world.rng("nemesis")
        self._reaps = 0
        self._strangers = itertools.count(1)
        self._mean_gap_s = self._rng.choice(MEAN_GAPS_S)
        every: dict[str, Callable[[], None]] = {
            "kill the bridge": lambda: simulation.host.kill(power_cut=False),
            "cut the power": lambda: simulation.host.kill(power_cut=True),
            "stop the bridge": self._stop_bridge,
            "freeze the bridge": self._freeze_bridge,
            "kill the engine": self._kill_engine,
            "freeze the engine": lambda: self._freeze("engine", 40.0),
            "replace the engine": self._replace_engine,
            "take subnets": self._take_subnets,
            "flip a bit": self._flip_a_bit,
            "freeze a container": self._freeze_container,
            "suspend the host": self._suspend,
            "partition": self._partition,
            "cut the connection": simulation.network.cut,
            "restart the hub": self._restart_hub,
            "step the wall clock": self._step_clock,
            "fill the disk": self._fill_disk,
        }
        people = {
            "cancel": self._cancel,
            "supersede": self._supersede,
            "forget": self._forget,
            "start unasked": self._start_unasked,
            "drain": self._drain,
            "switch the fallback": self._switch_fallback,
            "reap": self._reap,
        }
        self.kinds = {name: do for name, do in every.items() if self._rng.random() < 0.4}
        self.kinds |= {name: do for name, do in people.items() if self._rng.random() < 0.7}
        self._stopped = False
        self._next()
        self._images = simulation.world.rng("nemesis of images")
        if any(attempt.approved for attempt in simulation.hub.attempts):
            self._press()

    def stop(self) -> None:
        """Nothing new happens from here on."""
        self._stopped = True

    def _next(self) -> None:
        if self.kinds:
            gap_s = self._rng.expovariate(1 / self._mean_gap_s)
            self._simulation.world.later("world", gap_s, self._act)

    def _act(self) -> None:
        if not self._stopped:
            name = self._rng.choice(list(self.kinds))
            self._simulation.world.note("nemesis", name)
            self.kinds[name]()
            self._next()

    def _for_a_while(self, most_s: float, undo: Callable[[], object]) -> None:
        self._simulation.world.later("world", self._rng.uniform(0.2, most_s), undo)

    def _freeze(self, process: str, most_s: float) -> None:
        loop = self._simulation.world.processes
        loop.freeze(process)
        self._for_a_while(most_s, lambda: loop.thaw(process))

    def _stop_bridge(self) -> None:
        life = self._simulation.host.life
        if life is not None:
            life.stop()

    def _freeze_bridge(self) -> None:
        life = self._simulation.host.life
        if life is not None:
            self._freeze(life.process, 40.0)

    def _freeze_container(self) -> None:
        running = [c for c in self._simulation.engine.containers.values() if c.status == "running"]
        if running:
            self._freeze(self._rng.choice(running).process, 60.0)

    def _suspend(self) -> None:
        """Everything on the machine stands still, while the hub and CLOCK_BOOTTIME go on."""
        loop, simulation = self._simulation.world.processes, self._simulation
        life = simulation.host.life
        processes = [ENGINE, *(c.process for c in simulation.engine.containers.values())]
        processes += [p.process for p in simulation.machine.processes.values()]
        processes += [] if life is None else [life.process]
        for process in processes:
            loop.freeze(process)

        def resume() -> None:
            for process in processes:
                loop.thaw(process)

        self._for_a_while(120.0, resume)

    def _kill_engine(self) -> None:
        engine = self._simulation.engine
        keeps = self._rng.random() < 0.5
        if engine.up:
            engine.die()
            self._for_a_while(15.0, lambda: engine.restart(keeps_containers=keeps))

    def _replace_engine(self) -> None:
        engine = self._simulation.engine
        if not engine.is_replaced:
            engine.replace()
            self._for_a_while(90.0, engine.replace)

    def _take_subnets(self) -> None:
        """Somebody else makes a network where ours might be, be it all over the pool."""
        engine, pool = self._simulation.engine, self._simulation.setup.pool
        prefix = self._rng.choice((pool.prefixlen, pool.prefixlen + 1, 28, 29))
        subnet = self._rng.choice(list(pool.subnets(new_prefix=prefix)))
        name = f"stranger-{next(self._strangers)}"
        if not engine.nets.has_part_of(subnet):
            network = engine.nets.add_foreign(name, subnet)
            self._for_a_while(90.0, lambda: engine.networks.pop(network, None))

    def _flip_a_bit(self) -> None:
        """In the middle of a ledger, while no bridge has it open."""
        host = self._simulation.host
        host.kill(power_cut=False)
        paths = host.disk.names(LEDGERS, ".ledger")
        whole = [path for path in paths if host.disk.files[path].count(b"\n") > 1]
        if whole:
            path = self._rng.choice(whole)
            content = bytearray(host.disk.files[path])
            content[self._rng.randrange(content.rindex(b"\n", 0, -1))] ^= 1
            host.disk.files[path] = host.disk.synced[path] = bytes(content)

    def _partition(self) -> None:
        network = self._simulation.network
        network.partitioned = True

        def heal() -> None:
            network.partitioned = False

        self._for_a_while(60.0, heal)

    def _restart_hub(self) -> None:
        network = self._simulation.network
        network.hub_is_up = False
        network.cut()

        def start() -> None:
            network.hub_is_up = True

        self._for_a_while(20.0, start)

    def _step_clock(self) -> None:
        self._simulation.world.wall_offset_s += self._rng.choice((-86_400, -3_600, 3_600, 86_400))

    def _fill_disk(self) -> None:
        disk = self._simulation.disk
        before = disk.usage
        disk.usage = replace(before, used_percent=self._rng.choice((85, 91, 99)))

        def clear() -> None:
            disk.usage = replace(before, used_percent=40)

        self._for_a_while(30.0, clear)

    def _press(self) -> None:
        """Where there are images, the disk is full often enough for some to go."""
        gap_s = self._images.uniform(15, 90)

        def act() -> None:
            if not self._stopped:
                self._fill_disk()
                self._press()

        self._simulation.world.later("world", gap_s, act)

    def _cancel(self) -> None:
        live = self._simulation.hub.live()
        if live:
            self._simulation.hub.cancel(self._rng.choice(live))

    def _supersede(self) -> None:
        live = self._simulation.hub.live()
        if live:
            self._simulation.hub.supersede(self._rng.choice(live))

    def _forget(self) -> None:
        live = self._simulation.hub.live()
        if live:
            self._simulation.hub.forget(self._rng.choice(live))

    def _start_unasked(self) -> None:
        for dispatch in self._simulation.hub.live():
            self._simulation.hub.start_unasked(dispatch)

    def _drain(self) -> None:
        hub = self._simulation.hub
        hub.drain(True)
        self._for_a_while(60.0, lambda: hub.drain(False))

    def _switch_fallback(self) -> None:
        hub = self._simulation.hub
        hub.allow_host(not hub.settings["hostFallbackEnabled"])

    def _reap(self) -> None:
        hub = self._simulation.hub
        self._reaps += 1
        live = hub.live()
        one = self._rng.choice(live) if live and self._rng.random() < 0.5 else None
        hub.reap(self._reaps, THIS_RUNNER, one)
