"""The workflow document: template, schema, typed model. Reads the files that a spec names; knows nothing above it."""
