"""Kubeflow's ``TrainerClient`` for distflow's pools: to run a ``kubeflow.trainer`` notebook, change only its import.

Names, fields, signatures and exceptions are those of the Kubeflow SDK 0.5.0; ``docs/kubeflow.md`` lists the differences.
A submodule is imported when one of its names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distflow.kubeflow.backends import (
        ContainerBackendConfig,
        KubernetesBackendConfig,
        LocalProcessBackendConfig,
        SSHBackendConfig,
    )
    from distflow.kubeflow.trainer_client import TrainerClient
    from distflow.kubeflow.types import (
        DATASET_PATH,
        MODEL_PATH,
        BuiltinTrainer,
        CustomTrainer,
        CustomTrainerContainer,
        DataCacheInitializer,
        DataFormat,
        DataType,
        Event,
        HuggingFaceDatasetInitializer,
        HuggingFaceModelInitializer,
        Initializer,
        LoraConfig,
        Loss,
        Runtime,
        RuntimeKind,
        RuntimeTrainer,
        S3DatasetInitializer,
        S3ModelInitializer,
        Step,
        TorchTuneConfig,
        TorchTuneInstructDataset,
        TrainerType,
        TrainJob,
        TrainJobTemplate,
    )

__all__ = [
    "DATASET_PATH",
    "MODEL_PATH",
    "BuiltinTrainer",
    "ContainerBackendConfig",
    "CustomTrainer",
    "CustomTrainerContainer",
    "DataCacheInitializer",
    "DataFormat",
    "DataType",
    "Event",
    "HuggingFaceDatasetInitializer",
    "HuggingFaceModelInitializer",
    "Initializer",
    "KubernetesBackendConfig",
    "LocalProcessBackendConfig",
    "LoraConfig",
    "Loss",
    "Runtime",
    "RuntimeKind",
    "RuntimeTrainer",
    "S3DatasetInitializer",
    "S3ModelInitializer",
    "SSHBackendConfig",
    "Step",
    "TorchTuneConfig",
    "TorchTuneInstructDataset",
    "TrainJob",
    "TrainJobTemplate",
    "TrainerClient",
    "TrainerType",
]


def __getattr__(name: str) -> object:
    """Import a name's module when the name is first used (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  keeps `import distflow.kubeflow` fast

    module = "backends" if name.endswith("BackendConfig") else "trainer_client" if name == "TrainerClient" else "types"
    found: object = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = found
    return found
