"""Files on the node: the directories of attempts, records, logs, secrets, blobs and archives."""
