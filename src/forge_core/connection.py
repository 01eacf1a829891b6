"""Where the bridge stands with its hub.

::

    disconnected ──▶ connecting ──▶ registering ──▶ online
          ▲              │               │             │
          └──────────────┴───────────────┴─────────────┘  refused, lost, or asked to stop

*Online* begins once the hub's snapshot is settled: before that no offer is taken.
"""

from __future__ import annotations

from enum import StrEnum


class ConnectionPhase(StrEnum):
    """What ``status`` and the metrics show."""

    DISCONNECTED = "disconnected"
    CONNECTING = "connecting"
    REGISTERING = "registering"
    ONLINE = "online"
