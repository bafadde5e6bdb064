"""Commands of ``distflow workflow``."""
