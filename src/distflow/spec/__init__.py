"""Parse workflow specs: render the template, check the schema, build a typed model, and read the files that a spec names."""
