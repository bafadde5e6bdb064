"""Kubernetes as a cluster engine: one pod for each task of an allocation."""
