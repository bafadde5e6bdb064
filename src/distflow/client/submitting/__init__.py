"""Check, plan and submit specs, and resubmit or restart workflows."""
