"""Services with their own connections: sending and receiving blobs, and commands inside a running task."""
