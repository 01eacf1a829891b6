"""The hub methods: the only part that talks to bridges (wire.md, Bridge → hub).

``methods`` routes and guards, ``presence`` is who is there, ``replayed`` takes what is sent until
it is acknowledged.
"""

from forge_hub.runner_hub.methods import attach

__all__ = ["attach"]
