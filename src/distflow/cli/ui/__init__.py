"""The local web page of ``distflow ui``, which ``distflow workflow report`` also writes to a single file."""
