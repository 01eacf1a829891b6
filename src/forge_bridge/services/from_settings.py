"""The service images that the settings name (B-38)."""

from __future__ import annotations

from forge_bridge.services.images import ServiceImages, SignatureCheck
from forge_bridge.settings import BridgeSettings
from forge_core.wire.codes import ServiceName


def service_images(settings: BridgeSettings, check_signature: SignatureCheck) -> ServiceImages:
    """Not tried yet.

    :param check_signature: of an image, before it runs for the first time.
    """
    configured = {
        ServiceName.POSTGRES: settings.service_postgres_image,
        ServiceName.REDIS: settings.service_redis_image,
        ServiceName.BROWSER: settings.service_browser_image,
    }
    named = {name: image for name, image in configured.items() if image is not None}
    return ServiceImages(named, check_signature)
