"""Commands of ``distflow data`` and ``dataset``."""
