"""Key expiry.

Each task is a key with a time to live, and the server tells when it has deleted one. The event reaches only who listens
at that moment, and comes when the server gets round to the deletion.
"""
