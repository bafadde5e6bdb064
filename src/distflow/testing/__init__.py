"""Fakes that ship: small, real implementations of distflow's protocols, held to the same contract suites as the real ones.

Nothing in distflow imports them.
"""
