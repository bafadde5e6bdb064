"""Services with a connection each: transfers of blobs and outputs, Python environments, and commands inside running tasks."""
