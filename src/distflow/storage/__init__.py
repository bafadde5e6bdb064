"""Data at URLs in stores: list, download, upload and delete it."""
