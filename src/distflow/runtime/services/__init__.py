"""Services with a connection each, such as transfers and commands next to tasks; and programs that connect to nodes."""
