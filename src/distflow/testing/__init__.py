"""Fakes and real servers for tests. No other package of distflow imports this one.

A fake implements one of distflow's protocols, and passes the same contract tests as the real implementation.
"""
