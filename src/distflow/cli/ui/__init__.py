"""The local web page of ``distflow ui``, and the same page in one file by ``distflow workflow report``."""
