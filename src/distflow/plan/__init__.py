"""The plan of a workflow: the commands, environments and files of its tasks, and its export as scripts and manifests."""
