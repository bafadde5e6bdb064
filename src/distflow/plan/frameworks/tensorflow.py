"""TensorFlow: ``TF_CONFIG``, one worker for each task; it uses all GPUs that it sees.

Every worker listens at the same port number, each on its own node: the one that is free on the master's.

Format: https://www.tensorflow.org/guide/distributed_training#setting_up_the_tf_config_environment_variable
"""

from __future__ import annotations

import json

from distflow.plan.frameworks.model import PORT, Place, Started
from distflow.plan.model import address_of

__all__ = ["tensorflow"]


def tensorflow(place: Place) -> Started:
    """Return the command as it is, with the cluster in its environment."""
    workers = [f"{address_of(item.task)}:{PORT}" for item in place.world.tasks]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": place.ranks.node_rank}}
    return Started(argv=place.argv, environment={"TF_CONFIG": json.dumps(config)})
