"""The bridge: runs attempts for a hub on this machine."""

__version__ = "0.1.0"
