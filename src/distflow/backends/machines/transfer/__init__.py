"""File transfers to and from nodes."""
