"""From a spec to a stored workflow: checking, planning, submitting again, restarting."""
