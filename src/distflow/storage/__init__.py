"""Data at URLs: listed, fetched, written and removed, whatever kind of store holds it."""
