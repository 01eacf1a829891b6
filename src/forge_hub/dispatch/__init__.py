"""Who runs what: placement, offers, leases, and the end of dispatches.

``dispatcher`` is the loop that acts when time passes or something changed; ``decisions`` what a
runner's answer does; ``endings`` how dispatches end; ``leases`` and ``offers`` what lives in
memory only, with its deadlines.
"""
