"""Starting the processes of one machine's ranks, and stopping them when one fails. The launcher never imports torch."""
