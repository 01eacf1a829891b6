"""Servers beside an agent (sandbox.md, *Services*; B-55).

``images``: which of the configured images can be used, tried once each.  ``container``: what a
service's container is.  ``process``: what is said with its PID 1.  An attempt's own services are
``sandbox/services.py``'s.
"""
