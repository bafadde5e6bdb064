"""The parallelism of a group: strategies, the forms in which specs write them, and the memory that they need."""
