"""The one background process that observes, decides, acts and saves.

All policy is in ``decide`` and ``queue``, which are pure.
"""
