"""The core is fast, so its properties are tried often; a busy machine must not make them fail."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "core", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("core")
