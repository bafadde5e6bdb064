"""The stored credentials of a workflow that a task gets: variables, directories and the login of a registry."""

from __future__ import annotations

import pytest

from distflow.plan.credentials import registry_of, task_secrets
from distflow.plan.model import Launch, PlannedCredential
from distflow.shell import Secret

STORED = {
    "TOKEN": Secret("by --set-env"),
    "wandb:key": Secret("one line"),
    "wandb:a:b": Secret("two\nlines"),
    "@registry:registry.example": Secret("bG9naW4="),
}


def launch(*credentials: PlannedCredential, names: tuple[str, ...] = (), image: str | None = None) -> Launch:
    return Launch(task="t", lead=True, argv=("true",), environment={}, credentials=credentials, secret_names=names, image=image)


def test_credentials_become_variables_and_directories() -> None:
    one = PlannedCredential(name="wandb", variables={"KEY": "key", "TOKEN": "key"})
    two = PlannedCredential(name="wandb", path="files/x")
    given = task_secrets(launch(one, two, names=("TOKEN",)), STORED)
    assert {name: value.reveal() for name, value in given.variables.items()} == {"KEY": "one line", "TOKEN": "by --set-env"}
    files = given.directories["files/x"]
    # Programs that read keys need a line feed at the end of the last line.
    assert {name: value.reveal() for name, value in files.items()} == {"key": "one line", "a:b": "two\nlines\n"}


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (launch(PlannedCredential(name="wandb", variables={"A": "gone"})), "the key `gone` of the credential `wandb`"),
        (launch(PlannedCredential(name="wand", path="files/x")), "the files of the credential `wand`"),
        (launch(names=("OTHER",)), "the value of `--set-env OTHER`"),
    ],
)
def test_the_error_names_the_missing_value(given: Launch, missing: str) -> None:
    with pytest.raises(LookupError, match=f"^{missing}$"):
        task_secrets(given, STORED)


@pytest.mark.parametrize(
    ("image", "registry"),
    [
        ("registry.example/team/train:3", "registry.example"),
        ("localhost/train", "localhost"),
        ("node:5000/train", "node:5000"),
        ("team/train:3", ""),
        ("train:3", ""),
        ("", ""),
    ],
)
def test_a_task_gets_the_login_of_its_images_registry(image: str, registry: str) -> None:
    assert registry_of(image) == registry
    login = task_secrets(launch(image=image), STORED).login
    assert (login is not None) == (registry == "registry.example")
