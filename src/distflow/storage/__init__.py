"""Data at URLs: list, download, upload and delete it, in every kind of store."""
