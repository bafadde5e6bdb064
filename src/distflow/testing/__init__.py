"""Fakes and real servers for tests. No other package of distflow imports this one.

The fake backend and the fake engine pass the same contract tests as the real ones.
"""
