"""The secrets of a workflow at its submission."""

from __future__ import annotations

import base64

import pytest

from distflow.client.credentials import gather_secrets
from distflow.errors import InputError
from distflow.plan.model import GroupPlan, Launch, Plan
from distflow.pools.model import Node, Pool
from distflow.shell import Secret
from distflow.state.credentials import CredentialStore, CredentialType
from distflow.state.directory import StateDirectory
from distflow.structs import replace


@pytest.mark.parametrize(
    ("payload", "login"),
    [
        ({"auth": "token"}, "$oauthtoken:token"),
        ({"auth": "token", "username": "me"}, "me:token"),
        ({"auth": base64.b64encode(b"me:word").decode()}, "me:word"),
    ],
)
def test_registry_logins_are_gathered_only_for_pools_with_containers(
    payload: dict[str, str], login: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = StateDirectory(tmp_path_factory.mktemp("state"))
    values = {key: Secret(value) for key, value in payload.items()} | {"registry": Secret("registry.example")}
    CredentialStore(directory.credentials).set("images", CredentialType.REGISTRY, values)
    launch = Launch(task="t", lead=True, argv=("true",), environment={}, image="registry.example/a")
    plan = Plan(name="p", pool="x", groups=(GroupPlan(name="g", launches=(launch,)),))
    bare = Node(name="n", host="", root="", python="")
    for node, expected in ((bare, {}), (replace(bare, container="podman"), {"@registry:registry.example": login})):
        found = gather_secrets(plan, Pool(name="x", backend="local", nodes=(node,)), directory, {})
        assert {name: base64.b64decode(value.reveal()).decode() for name, value in found.items()} == expected


def test_a_secret_with_a_nul_byte_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = StateDirectory(tmp_path_factory.mktemp("state"))
    with pytest.raises(
        InputError, match="the value of `TOKEN` contains a NUL byte, which an environment variable cannot"
    ) as caught:
        gather_secrets(
            Plan(name="w", pool="x", groups=()),
            Pool(name="x", backend="local", nodes=()),
            directory,
            {"TOKEN": Secret("hidden\0")},
        )
    assert "hidden" not in str(caught.value)
