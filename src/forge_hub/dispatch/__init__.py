"""Who runs what: placement, offers, leases, and the end of dispatches.

``dispatcher`` is the loop that acts when time passes or something changed; ``decisions`` what a
runner's answer does; ``endings`` how dispatches end, ``publications`` what came of pushes and
``signing_off`` how sessions go on; ``remotes`` looks at remotes; ``leases``, ``offers`` and
``looks`` are what lives in memory only, with its deadlines.
"""
