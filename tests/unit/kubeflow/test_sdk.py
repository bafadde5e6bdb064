"""The names, fields and signatures of the Kubeflow SDK 0.5.0, read from its package; and its own objects as arguments.

``scripts/setup.sh`` installs the package without its dependencies. Stub modules replace them, which is enough for signatures.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import distflow.kubeflow
import distflow.kubeflow.options
import distflow.kubeflow.types
from distflow.api.spec import Spec
from distflow.kubeflow import CustomTrainer, TrainerClient
from distflow.kubeflow.backends import PoolChoice, pool_choice
from distflow.kubeflow.job_specs import check_initializer, job_spec, read_options
from distflow.kubeflow.runtimes import RUNTIMES, runtime_name
from distflow.pools.model import Pool

ABSENT = {
    "TrainingRuntimeSource": "runtimes are a table, not files at URLs",
    "get_tpu_num_nodes": "distflow does not know TPUs",
    "update_trainjob_status": "programs report by printing (docs/metrics.md)",
}
PATCHES = "Patch"
"""The names of options that change Kubernetes objects end with this word."""
OWN = {"SSHBackendConfig", "Step", "TrainJob"}
"""Names that Kubeflow does not have, or not in ``kubeflow.trainer``."""


class _StubModule(types.ModuleType):
    """A module that has every name: lowercase names are stub modules, and others are empty classes."""

    def __init__(self, name: str, **known: Any) -> None:
        super().__init__(name)
        self.__path__ = []
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _StubModule(name) if name.islower() else type(name, (), {})
        vars(self)[name] = made
        return made


class _BaseModel:
    """A replacement for pydantic's ``BaseModel``. It has only the fields."""

    def __init_subclass__(cls) -> None:
        for name, value in list(vars(cls).items()):
            if isinstance(value, list):
                setattr(cls, name, dataclasses.field(default_factory=value.copy))
        dataclasses.dataclass(kw_only=True)(cls)


def _field(default: Any = dataclasses.MISSING, default_factory: Any = dataclasses.MISSING, **_: Any) -> Any:
    return (
        dataclasses.field(default=default)
        if default_factory is dataclasses.MISSING
        else dataclasses.field(default_factory=default_factory)
    )


@pytest.fixture(scope="module")
def kubeflow() -> Iterator[Any]:
    """The module ``kubeflow.trainer``."""
    if importlib.util.find_spec("kubeflow") is None:
        pytest.skip("kubeflow is not installed: pip install --no-deps kubeflow==0.5.0")
    stubs = [_StubModule(name) for name in ("kubernetes", "kubeflow_trainer_api", "requests")]
    stubs.append(_StubModule("pydantic", BaseModel=_BaseModel, Field=_field))
    with pytest.MonkeyPatch.context() as patch:
        for stub in stubs:
            patch.setitem(sys.modules, stub.__name__, stub)
        yield importlib.import_module("kubeflow.trainer")
        for name in [name for name in sys.modules if name.partition(".")[0] == "kubeflow"]:
            del sys.modules[name]


def _interface(found: Any) -> Any:
    """Return the parts of a public object that callers use: members, parameters, methods and fields."""
    if isinstance(found, type) and issubclass(found, enum.Enum):
        return {member.name: member.value for member in found}
    if not isinstance(found, type):
        return found
    methods = {
        name: _parameters(value) for name, value in inspect.getmembers(found, inspect.isfunction) if not name.startswith("_")
    }
    fields = (
        [_field_interface(one) for one in dataclasses.fields(found) if not one.name.startswith("_")]
        if dataclasses.is_dataclass(found)
        else None
    )
    return _parameters(found), methods, fields


def _parameters(function: Any) -> list[Any]:
    shown = []
    for one in inspect.signature(function).parameters.values():
        default = one.default() if isinstance(one.default, type) and one.default is not inspect.Parameter.empty else one.default
        shown.append((one.name, one.kind, "<factory>" if "factory" in repr(default) else default))
    return shown


def _field_interface(one: dataclasses.Field[Any]) -> Any:
    default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
    return one.name, one.init, default


def test_every_public_name_has_the_signature_of_the_sdk(kubeflow: Any) -> None:
    names = {*kubeflow.__all__}
    assert names - {*ABSENT} == {*distflow.kubeflow.__all__} - OWN
    assert {*ABSENT} <= names
    sdk_types = importlib.import_module("kubeflow.trainer.types.types")
    for name in sorted({*distflow.kubeflow.__all__} - {"SSHBackendConfig"}):
        theirs, ours = getattr(kubeflow, name, None) or getattr(sdk_types, name), getattr(distflow.kubeflow, name)
        if name == "ContainerBackendConfig":  # the default of `runtime_source` is an object that distflow does not have
            assert [one.name for one in dataclasses.fields(ours)] == [one.name for one in dataclasses.fields(theirs)]
        else:
            assert _interface(ours) == _interface(theirs), name


def test_every_option_that_does_not_patch_kubernetes_objects_is_that_of_the_sdk(kubeflow: Any) -> None:
    sdk = importlib.import_module("kubeflow.trainer.options")
    assert {name for name in sdk.__all__ if not name.endswith(PATCHES)} == {*distflow.kubeflow.options.__all__}
    for name in distflow.kubeflow.options.__all__:
        assert _interface(getattr(distflow.kubeflow.options, name)) == _interface(getattr(sdk, name)), name


def test_the_constants_for_statuses_are_those_of_the_sdk(kubeflow: Any) -> None:
    constants = importlib.import_module("kubeflow.trainer.constants.constants")
    for name in ("TRAINJOB_CREATED", "TRAINJOB_RUNNING", "TRAINJOB_COMPLETE", "TRAINJOB_FAILED", "DATASET_PATH"):
        assert getattr(distflow.kubeflow.types, name) == getattr(constants, name)
    assert constants.DEFAULT_TRAINING_RUNTIME in RUNTIMES


def _train(lr: float) -> None:
    """Train nothing."""


def test_objects_of_the_sdk_are_accepted(kubeflow: Any) -> None:
    sdk_types = importlib.import_module("kubeflow.trainer.types.types")
    sdk_options = importlib.import_module("kubeflow.trainer.options")
    pool = Pool(name="lab", backend="ssh", nodes=())

    def spec(trainer: object, options: list[object]) -> Spec:
        return job_spec("job", "torch-distributed", trainer, read_options(options), pool)

    given: dict[str, Any] = {
        "func": _train,
        "func_args": {"lr": 0.1},
        "num_nodes": 2,
        "resources_per_node": {"gpu": 4},
        "env": {"A": "b"},
    }
    ours = spec(CustomTrainer(**given), [distflow.kubeflow.options.ActiveDeadlineSeconds(60)])
    assert spec(kubeflow.CustomTrainer(**given), [sdk_options.ActiveDeadlineSeconds(60)]) == ours
    assert read_options([sdk_options.Name("x"), sdk_options.Labels({"team": "vision"})]).labels == {"team": "vision"}
    with pytest.raises(ValueError, match="the option `RuntimePatch` is not supported"):
        read_options([sdk_options.RuntimePatch()])
    with pytest.raises(ValueError, match="torchtune"):
        spec(kubeflow.BuiltinTrainer(config=kubeflow.TorchTuneConfig()), [])
    trainer = sdk_types.RuntimeTrainer(kubeflow.TrainerType.CUSTOM_TRAINER, "jax", "image")
    assert (
        runtime_name(kubeflow.Runtime("jax-distributed", trainer, kubeflow.RuntimeKind.TRAINING_RUNTIME)) == "jax-distributed"
    )
    check_initializer(kubeflow.Initializer())
    with pytest.raises(ValueError, match="does not run Kubeflow's initializers"):
        check_initializer(kubeflow.Initializer(dataset=kubeflow.S3DatasetInitializer("s3://bucket/data")))
    assert pool_choice(kubeflow.LocalProcessBackendConfig()) == PoolChoice(pool="local")
    assert pool_choice(kubeflow.KubernetesBackendConfig()) == PoolChoice()
    with pytest.raises(
        ValueError, match=r"KubernetesBackendConfig\(namespace=…\) is not supported, because .* of a cluster from a pool"
    ):
        TrainerClient(kubeflow.KubernetesBackendConfig(namespace="team"))
