"""Rank layouts: what a spec claims, whether it adds up, and which node takes which task. Pure."""
