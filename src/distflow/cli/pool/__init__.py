"""Commands of ``distflow pool``, ``resource`` and ``profile``."""
