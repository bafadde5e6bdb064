"""The types of the arguments and results of ``TrainerClient``, with the fields of ``kubeflow.trainer`` in SDK 0.5.0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

__all__ = [
    "DATASET_PATH",
    "DEFAULT_PIP_INDEX_URL",
    "JOB_STATUSES",
    "MODEL_PATH",
    "TRAINJOB_COMPLETE",
    "TRAINJOB_CREATED",
    "TRAINJOB_FAILED",
    "TRAINJOB_RUNNING",
    "UNKNOWN",
    "BaseInitializer",
    "BuiltinTrainer",
    "CustomTrainer",
    "CustomTrainerContainer",
    "DataCacheInitializer",
    "DataFormat",
    "DataType",
    "Event",
    "HuggingFaceDatasetInitializer",
    "HuggingFaceModelInitializer",
    "Initializer",
    "LoraConfig",
    "Loss",
    "Runtime",
    "RuntimeKind",
    "RuntimeTrainer",
    "S3DatasetInitializer",
    "S3ModelInitializer",
    "Step",
    "TorchTuneConfig",
    "TorchTuneInstructDataset",
    "TrainJob",
    "TrainJobTemplate",
    "TrainerType",
]

TRAINJOB_CREATED, TRAINJOB_RUNNING, TRAINJOB_COMPLETE, TRAINJOB_FAILED = "Created", "Running", "Complete", "Failed"
JOB_STATUSES = frozenset((TRAINJOB_CREATED, TRAINJOB_RUNNING, TRAINJOB_COMPLETE, TRAINJOB_FAILED))
UNKNOWN = "Unknown"
DEFAULT_PIP_INDEX_URL = "https://pypi.org/simple"
DATASET_PATH, MODEL_PATH = "/workspace/dataset", "/workspace/model"

_MODEL_IGNORE_PATTERNS = ("*.msgpack", "*.h5", "*.bin", "*.pt", "*.pth")


# -- what to run ------------------------------------------------------------------------------------------------------


@dataclass
class CustomTrainer:
    """A function that trains.

    Args:
        func: The function. Only its source is sent to the nodes, so it must import the modules that it uses.
        func_args: Its arguments, by name.
        image: A container image, for pools with a container runtime.
        packages_to_install: Python packages, in the syntax of pip.
        pip_index_urls: The package index, and additional ones.
        num_nodes: The number of nodes. Default: 1.
        resources_per_node: The resources to reserve on each node: ``{"gpu": 4, "cpu": 5, "memory": "10Gi"}``. Each node has
            one rank for each GPU, or one rank without GPUs. With the runtimes of jax, tensorflow, ray and custom, it has one
            rank.
        env: Environment variables. A whole number in ``PET_NPROC_PER_NODE`` is the number of ranks on each node.

    """

    func: Callable[..., Any]
    func_args: dict[str, Any] | None = None
    image: str | None = None
    packages_to_install: list[str] | None = None
    pip_index_urls: list[str] = field(default_factory=lambda: [DEFAULT_PIP_INDEX_URL])
    num_nodes: int | None = None
    resources_per_node: dict[str, Any] | None = None
    env: dict[str, str] | None = None


@dataclass
class CustomTrainerContainer:
    """A container image that trains. The option ``TrainerCommand`` sets its command."""

    image: str
    num_nodes: int | None = None
    resources_per_node: dict[str, Any] | None = None
    env: dict[str, str] | None = None


class Loss(Enum):
    """Loss functions of torchtune."""

    CEWithChunkedOutputLoss = "torchtune.modules.loss.CEWithChunkedOutputLoss"


class DataType(Enum):
    """Data types of torchtune."""

    BF16 = "bf16"
    FP32 = "fp32"


class DataFormat(Enum):
    """File formats of torchtune's datasets."""

    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"
    TEXT = "text"
    XML = "xml"


@dataclass
class TorchTuneInstructDataset:
    """A dataset of torchtune."""

    source: DataFormat | None = None
    split: str | None = None
    train_on_input: bool | None = None
    new_system_prompt: str | None = None
    column_map: dict[str, str] | None = None


@dataclass
class LoraConfig:
    """LoRA of torchtune."""

    apply_lora_to_mlp: bool | None = None
    apply_lora_to_output: bool | None = None
    lora_attn_modules: list[str] = field(default_factory=lambda: ["q_proj", "v_proj", "output_proj"])
    lora_rank: int | None = None
    lora_alpha: int | None = None
    lora_dropout: float | None = None
    quantize_base: bool | None = None
    use_dora: bool | None = None


@dataclass
class TorchTuneConfig:
    """The settings of torchtune."""

    dtype: DataType | None = None
    batch_size: int | None = None
    epochs: int | None = None
    loss: Loss | None = None
    num_nodes: int | None = None
    peft_config: LoraConfig | None = None
    dataset_preprocess_config: TorchTuneInstructDataset | None = None
    resources_per_node: dict[str, Any] | None = None


@dataclass
class BuiltinTrainer:
    """torchtune's trainer. distflow does not support it: ``train`` raises ``ValueError``."""

    config: TorchTuneConfig


class TrainerType(Enum):
    """Kinds of trainers."""

    CUSTOM_TRAINER = "CustomTrainer"
    BUILTIN_TRAINER = "BuiltinTrainer"


# -- runtimes ---------------------------------------------------------------------------------------------------------


class RuntimeKind(Enum):
    """Kinds of runtimes. All runtimes of distflow are ``CLUSTER_TRAINING_RUNTIME``."""

    CLUSTER_TRAINING_RUNTIME = "ClusterTrainingRuntime"
    TRAINING_RUNTIME = "TrainingRuntime"


@dataclass
class RuntimeTrainer:
    """The framework of a runtime, and the devices of one node of the pool."""

    trainer_type: TrainerType
    framework: str
    image: str
    num_nodes: int = 1
    device: str = UNKNOWN
    device_count: str = UNKNOWN
    _command: tuple[str, ...] = field(default=(), init=False, repr=False)

    @property
    def command(self) -> tuple[str, ...]:
        """The program that starts the ranks."""
        return self._command

    def set_command(self, command: tuple[str, ...]) -> None:
        """Change ``command``. Jobs do not use it."""
        self._command = command


@dataclass
class Runtime:
    """A training framework in a pool."""

    name: str
    trainer: RuntimeTrainer
    kind: RuntimeKind
    pretrained_model: str | None = None


# -- jobs -------------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """One node of a job. ``status`` is ``Pending``, ``Running``, ``Succeeded`` or ``Failed``."""

    name: str
    status: str | None
    pod_name: str
    device: str = UNKNOWN
    device_count: str = UNKNOWN


@dataclass
class TrainJob:
    """A job. ``status`` is ``Created``, ``Running``, ``Complete`` or ``Failed``."""

    name: str
    runtime: Runtime
    steps: list[Step]
    num_nodes: int
    creation_timestamp: datetime
    status: str = UNKNOWN


@dataclass
class Event:
    """An event of a job, or of one of its nodes (the kind ``Pod``)."""

    involved_object_kind: str
    involved_object_name: str
    message: str
    reason: str
    event_time: datetime


# -- data -------------------------------------------------------------------------------------------------------------


@dataclass
class BaseInitializer:
    """Data to fetch before a job starts. distflow does not fetch it: ``train`` raises ``ValueError``."""

    storage_uri: str


@dataclass
class HuggingFaceDatasetInitializer(BaseInitializer):
    """A dataset of Hugging Face."""

    ignore_patterns: list[str] | None = None
    access_token: str | None = None


@dataclass
class S3DatasetInitializer(BaseInitializer):
    """A dataset in S3."""

    ignore_patterns: list[str] | None = None
    endpoint: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None
    region: str | None = None
    role_arn: str | None = None

    def __post_init__(self) -> None:
        """Check the URI."""
        _check_s3(self.storage_uri)


@dataclass
class DataCacheInitializer(BaseInitializer):
    """A dataset in Kubeflow's data cache."""

    metadata_loc: str
    num_data_nodes: int
    head_cpu: str | None = None
    head_mem: str | None = None
    worker_cpu: str | None = None
    worker_mem: str | None = None
    iam_role: str | None = None

    def __post_init__(self) -> None:
        """Check the URI and the number of nodes."""
        if self.num_data_nodes <= 1:
            raise ValueError(f"num_data_nodes is {self.num_data_nodes}: it must be 2 or more")
        scheme, _, path = self.storage_uri.partition("://")
        if scheme != "cache" or path.count("/") != 1:
            raise ValueError(f"storage_uri is `{self.storage_uri}`: write cache://SCHEMA/TABLE")


@dataclass
class HuggingFaceModelInitializer(BaseInitializer):
    """A model of Hugging Face."""

    ignore_patterns: list[str] | None = field(default_factory=lambda: [*_MODEL_IGNORE_PATTERNS])
    access_token: str | None = None


@dataclass
class S3ModelInitializer(BaseInitializer):
    """A model in S3."""

    ignore_patterns: list[str] | None = field(default_factory=lambda: [*_MODEL_IGNORE_PATTERNS])
    endpoint: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None
    region: str | None = None
    role_arn: str | None = None

    def __post_init__(self) -> None:
        """Check the URI."""
        _check_s3(self.storage_uri)


def _check_s3(uri: str) -> None:
    if not uri.startswith("s3://"):
        raise ValueError(f"storage_uri is `{uri}`: it must begin with s3://")


@dataclass
class Initializer:
    """The data that a job needs."""

    dataset: HuggingFaceDatasetInitializer | S3DatasetInitializer | DataCacheInitializer | None = None
    model: HuggingFaceModelInitializer | S3ModelInitializer | None = None


@dataclass
class TrainJobTemplate:
    """Arguments of ``train``, for ``client.train(**template)``."""

    trainer: CustomTrainer
    runtime: str | Runtime | None = None
    initializer: Initializer | None = None

    def keys(self) -> list[str]:
        """Return the names of the arguments."""
        return ["trainer", "runtime", "initializer"]

    def __getitem__(self, key: str) -> Any:
        """Return one argument."""
        return getattr(self, key)
