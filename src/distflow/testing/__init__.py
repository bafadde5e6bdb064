"""Fakes and test servers. The fakes implement distflow's protocols and pass the same contract suites as the real ones.

No other part of distflow imports them.
"""
