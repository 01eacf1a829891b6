"""Project images: built from the approved commit, proven, kept, and given back (B-27…B-34).

``pipeline`` is the way from a contract to a promoted image; ``tooling`` is what PID 1 runs from
in an image that is not ours; ``collect`` gives disk space back.
"""
