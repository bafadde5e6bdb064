"""Check that the ranks that a group's tasks claim form one world."""
