"""The rules of rank layouts: whether the claims of a group's tasks add up."""
