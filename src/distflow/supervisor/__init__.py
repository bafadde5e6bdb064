"""The one background process that observes, decides, saves and acts.

All policy is in ``decide`` and ``queue``, which are pure.
"""
