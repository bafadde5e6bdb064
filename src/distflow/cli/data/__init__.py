"""The commands of ``distflow data`` and ``distflow dataset``."""
