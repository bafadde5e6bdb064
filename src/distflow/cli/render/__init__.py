"""Records and measurements as text for people and as JSON for programs."""
