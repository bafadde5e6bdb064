"""The background process of a state directory: it observes nodes, decides, saves the decision, and acts.

All policy is in pure modules: ``decide``, ``group_step``, ``scheduling`` and those that they import.
"""
