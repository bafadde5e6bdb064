"""Services on a node that each have their own connection, such as transfers; and programs that relay commands to nodes."""
