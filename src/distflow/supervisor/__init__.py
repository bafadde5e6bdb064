"""The one background process that observes, decides, saves and acts.

All policy is in pure modules: ``decide``, ``group_step``, ``scheduling`` and those that they import.
"""
