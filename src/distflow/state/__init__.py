"""distflow's data on the submitter's machine: records, the store that keeps them, and the mirrored logs."""
