"""REST under ``/api/v1`` for people and programs (docs/reference/rest.md).

JSON in camelCase, a bearer token, errors as RFC 9457 problem details.
"""

from forge_hub.api.app import api_app

__all__ = ["api_app"]
