"""Services on a connection of their own: sending and receiving blobs, and commands inside a running task."""
