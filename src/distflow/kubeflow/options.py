"""The options of ``TrainerClient.train``. Kubeflow's options that patch Kubernetes objects are not supported."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ActiveDeadlineSeconds", "Annotations", "Labels", "Name", "TrainerArgs", "TrainerCommand"]


@dataclass
class Name:
    """The name of the job. Default: a letter and 11 hexadecimal digits."""

    name: str


@dataclass
class Labels:
    """Labels of the workflow, for ``distflow list --label``."""

    labels: dict[str, str]


@dataclass
class Annotations:
    """Not supported: ``train`` raises ``ValueError``. Use ``Labels``."""

    annotations: dict[str, str]


@dataclass
class TrainerCommand:
    """The command of a ``CustomTrainerContainer``."""

    command: list[str]


@dataclass
class TrainerArgs:
    """The arguments of the command of a ``CustomTrainerContainer``."""

    args: list[str]


@dataclass
class ActiveDeadlineSeconds:
    """The maximum run time, in seconds. A job that runs longer is stopped, and its status is ``Failed``."""

    seconds: int

    def __post_init__(self) -> None:
        """Check the number."""
        if type(self.seconds) is not int or self.seconds < 1:
            raise ValueError(f"ActiveDeadlineSeconds is {self.seconds!r}: it must be a whole number, 1 or more")
