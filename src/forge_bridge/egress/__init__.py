"""The way out of a sandbox (sandbox.md, Network; B-54).

::

    agent ─▶ agent network ─▶ egress proxy ─▶ egress network ─▶ (upstream proxy ─▶) the web
             nobody of the     names first,    one address
             host in it        then addresses  in it
"""
