"""The commands of ``distflow pool``, ``distflow resource`` and ``distflow profile``."""
