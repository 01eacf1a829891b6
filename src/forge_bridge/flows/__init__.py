"""One story a file: what happens at boot, in a session, on an offer, a start, a renewal …"""
