"""What Prometheus scrapes: the same status that ``forge-bridge status`` shows, as numbers.

The names are in docs/reference/metrics.md, which a test compares with what is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from forge_bridge.status import BridgeStatus
from forge_core.connection import ConnectionPhase
from forge_core.resources import COMPONENTS
from forge_edges.http_pages import Page

PREFIX: Final = "forge_bridge"


class _StatusCollector(Collector):
    def __init__(self, status: BridgeStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield InfoMetricFamily(
            PREFIX,
            "Who this bridge is.",
            {
                "version": status.version,
                "runner_id": status.runner_id,
                "runner_instance_id": status.runner_instance_id,
            },
        )
        yield _gauge("connected", "1 while registered with the hub.", _is_online(status))
        yield _gauge(
            "engine_away",
            "1 while no container can be made: the engine does not answer, another one stands in "
            "its place, or what it runs could not be looked at.",
            _flag(status.engine_away),
        )
        yield _gauge(
            "parts_unseen",
            "Parts that could not be tried and are not offered until another look sees them.",
            len(status.parts_unseen),
        )
        yield _gauge("draining", "1 while no offer is taken.", _flag(status.drained_by))
        yield self._attempts()
        yield self._ended()
        yield from self._resources()
        yield _gauge(
            "degraded_reservations",
            "Dispatches whose teardown is not proven: their capacity stays taken.",
            status.degraded_reservation_count,
        )
        yield _gauge(
            "pending_reports",
            "Cleanup reports that the hub has not acknowledged.",
            status.pending_reports,
        )
        yield from self._disk()

    def _attempts(self) -> Metric:
        status = self._status
        family = GaugeMetricFamily(
            f"{PREFIX}_attempts", "Dispatches by state of their reservation.", labels=["state"]
        )
        family.add_metric(["reserved"], status.reserved_count)
        family.add_metric(["starting"], status.starting_count)
        family.add_metric(["active"], status.active_count)
        family.add_metric(["degraded"], status.degraded_reservation_count)
        return family

    def _ended(self) -> Metric:
        family = CounterMetricFamily(
            f"{PREFIX}_attempts_ended",
            "Dispatches that ended, cleanup proven, by failure code.",
            labels=["code"],
        )
        for code, count in sorted(self._status.ended.items()):
            family.add_metric([code], count)
        return family

    def _resources(self) -> Iterator[Metric]:
        used = GaugeMetricFamily(
            f"{PREFIX}_used_resources", "What reservations hold.", labels=["component"]
        )
        capacity = GaugeMetricFamily(
            f"{PREFIX}_resource_capacity",
            "What there is; a component without a ceiling is absent.",
            labels=["component"],
        )
        for name in COMPONENTS:
            used.add_metric([name], getattr(self._status.used_resources, name))
            ceiling = getattr(self._status.resource_capacity, name)
            if ceiling is not None:
                capacity.add_metric([name], ceiling)
        yield used
        yield capacity

    def _disk(self) -> Iterator[Metric]:
        disk = self._status.disk
        if disk is not None:
            yield _gauge("disk_used_percent", "Of the fullest disk.", disk.used_percent)
            yield _gauge("disk_free_bytes", "On the fullest disk.", disk.free_bytes)
            yield _gauge("disk_pressure", "1 while offers are refused for it.", disk.latched)


def metrics_page(status: BridgeStatus) -> Page:
    """The status in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatusCollector(status))
    return Page(CONTENT_TYPE_LATEST, generate_latest(registry))


def health_page() -> Page:
    """That it answers at all: the event loop turns."""
    return Page("text/plain; charset=utf-8", b"ok\n")


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", meaning, value=float(value))


def _flag(value: object) -> float:
    return 1.0 if value else 0.0


def _is_online(status: BridgeStatus) -> float:
    return _flag(status.connection is ConnectionPhase.ONLINE)
