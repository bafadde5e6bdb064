"""Images of tasks that Slurm starts with its plugin Pyxis: one ``srun`` starts all tasks of a group in the same image.

https://github.com/NVIDIA/pyxis
"""

from __future__ import annotations

from collections.abc import Collection

from distflow.plan.credentials import registry_of

__all__ = ["images_problem", "pyxis_image"]


def pyxis_image(image: str) -> str:
    """Return the name of an image for Slurm's plugin Pyxis, which separates the registry by ``#``.

    >>> pyxis_image("nvcr.io/nvidia/pytorch:24.03-py3"), pyxis_image("ubuntu"), pyxis_image("/images/train.sqsh")
    ('nvcr.io#nvidia/pytorch:24.03-py3', 'ubuntu', '/images/train.sqsh')
    """
    registry = registry_of(image)
    return f"{registry}#{image.removeprefix(f'{registry}/')}" if registry else image


def images_problem(images: Collection[str | None], group: str) -> tuple[str, str]:
    """Return why one ``srun`` cannot start the tasks of a group that have these different images, and the remedy."""
    some = f"only some tasks of group `{group}` have an `image`"
    which = some if None in images else f"the tasks of group `{group}` have different images"
    return f"{which}, but one `srun` starts all tasks of the group", "give all tasks of the group the same `image`"
