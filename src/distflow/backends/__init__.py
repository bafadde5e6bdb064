"""Backends, which run plans on plain machines (``machines``) or on nodes that a cluster engine allocates (``allocated``)."""
