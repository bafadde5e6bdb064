"""Credentials on disk: their permissions, refused names and payloads, and error messages without secret values."""

from __future__ import annotations

import stat
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from distflow.errors import InputError, NotFound, StateError
from distflow.shell import Secret
from distflow.state.credentials import CredentialStore, CredentialType

DATA = {"access_key_id": "id", "access_key": "hidden-value", "endpoint": "s3://bucket"}


def payload(**values: str) -> Mapping[str, Secret]:
    return {key: Secret(value) for key, value in values.items()}


def test_only_the_owner_can_read_a_credential(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    folder.mkdir(mode=0o755)
    store = CredentialStore(folder)
    store.set("wandb", CredentialType.GENERIC, payload(api_key="hidden-value"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {"wandb.json": 0o600}
    found = store.find("wandb")
    assert found is not None
    assert found.payload["api_key"].reveal() == "hidden-value"
    assert "hidden-value" not in repr(found)


def test_a_missing_directory_has_no_credentials(tmp_path: Path) -> None:
    store = CredentialStore(tmp_path / "nothing")
    assert store.all() == ()
    assert store.find("wandb") is None
    assert store.for_data("s3://bucket") is None
    assert not (tmp_path / "nothing").exists()


def test_a_generic_credential_is_never_replaced(tmp_path: Path) -> None:
    store = CredentialStore(tmp_path)
    store.set("one", CredentialType.GENERIC, payload(key="first"))
    with pytest.raises(InputError, match="already"):
        store.set("one", CredentialType.GENERIC, payload(key="second"))
    with pytest.raises(InputError, match="already"):
        store.set("one", CredentialType.DATA, payload(**DATA))
    found = store.find("one")
    assert found is not None
    assert found.payload["key"].reveal() == "first"
    store.delete("one")
    with pytest.raises(NotFound, match="no credential `one`"):
        store.delete("one")


def test_a_data_credential_replaces_the_one_with_the_same_endpoint(tmp_path: Path) -> None:
    store = CredentialStore(tmp_path)
    store.set("old", CredentialType.DATA, payload(**DATA))
    store.set("other", CredentialType.DATA, payload(**DATA | {"endpoint": "gs://bucket/"}))
    store.set("new", CredentialType.DATA, payload(**DATA | {"access_key": "second"}))
    store.set("new", CredentialType.DATA, payload(**DATA | {"access_key": "third"}))
    assert [one.name for one in store.all()] == ["new", "other"]
    found = store.for_data("s3://bucket")
    assert found is not None
    assert found["access_key"].reveal() == "third"
    assert store.for_data("gs://bucket") is not None
    assert store.for_data("s3://else") is None
    with pytest.raises(InputError, match="already"):
        store.set("other", CredentialType.DATA, payload(**DATA))


@pytest.mark.parametrize("profile", ["s3://b", "gs://b", "az://c", "azure://a", "tos://e/b", "swift://e/a"])
def test_every_profile_can_have_a_credential(tmp_path: Path, profile: str) -> None:
    store = CredentialStore(tmp_path)
    store.set("one", CredentialType.DATA, payload(**DATA | {"endpoint": profile}))
    assert store.for_data(profile) is not None


def test_registry_credentials_are_found_by_the_name_of_the_registry(tmp_path: Path) -> None:
    store = CredentialStore(tmp_path)
    store.set("plain", CredentialType.REGISTRY, payload(auth="a"))
    store.set("ours", CredentialType.REGISTRY, payload(auth="b", registry="registry.example", username="me"))
    plain, ours = store.for_registry(""), store.for_registry("registry.example")
    assert plain is not None
    assert ours is not None
    assert (plain["auth"].reveal(), ours["auth"].reveal()) == ("a", "b")


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (CredentialType.GENERIC, {}, "no payload"),
        (CredentialType.GENERIC, {"": "hidden-value"}, "a key of the payload is empty"),
        (CredentialType.GENERIC, {"key": ""}, "the value of `key` is empty"),
        (CredentialType.GENERIC, {"a/b": "hidden-value"}, "'a/b' is not a valid payload key"),
        (CredentialType.GENERIC, {"..": "hidden-value"}, "is not a valid payload key"),
        (CredentialType.GENERIC, {"a\nb": "hidden-value"}, "is not a valid payload key"),
        (CredentialType.GENERIC, {"key": "hidden-value\0"}, "NUL"),
        (CredentialType.GENERIC, {"key": "hidden-value" * 6000}, "longer than 64 KiB"),
        (CredentialType.REGISTRY, {"username": "hidden-value"}, "needs `auth`"),
        (
            CredentialType.REGISTRY,
            {"auth": "hidden-value", "password": "x"},
            "`password` is not a key of a REGISTRY credential",
        ),
        (CredentialType.DATA, {"endpoint": "s3://b"}, "needs `access_key_id` and `access_key`"),
        (CredentialType.DATA, DATA | {"endpoint": "s3://b/path"}, "is not the beginning"),
        (CredentialType.DATA, DATA | {"endpoint": "file:///hidden-value"}, "is not the beginning"),
        (CredentialType.DATA, DATA | {"endpoint": "swift://only"}, "is not the beginning"),
        (CredentialType.DATA, DATA | {"override_url": "hidden-value"}, "is not a URL"),
        (CredentialType.DATA, DATA | {"addressing_style": "hidden-value"}, "addressing_style"),
    ],
)
def test_a_wrong_payload_is_refused_without_quoting_a_value(
    tmp_path: Path, kind: CredentialType, values: Mapping[str, str], words: str
) -> None:
    store = CredentialStore(tmp_path / "credentials")
    with pytest.raises(InputError) as caught:
        store.set("one", kind, {key: Secret(value) for key, value in values.items()})
    assert words in str(caught.value)
    assert "hidden-value" not in str(caught.value)
    assert store.all() == ()


@pytest.mark.parametrize("name", ["", "1a", "a-", "../a", "a b", "ä", "a" * 65])
def test_a_wrong_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="is not a valid credential name"):
        CredentialStore(tmp_path).set(name, CredentialType.GENERIC, payload(key="value"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "\udcff",
        '{"type": "GENERIC"}',
        '{"type": "NEW", "payload": {"a": "hidden-value"}}',
        '{"type": "DATA", "payload": {}}',
    ],
)
def test_a_damaged_file_is_named_and_not_quoted(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(StateError) as caught:
        CredentialStore(tmp_path).find("one")
    assert str(tmp_path / "one.json") in str(caught.value)
    assert "hidden-value" not in str(caught.value)


def test_only_one_of_several_concurrent_writers_succeeds(tmp_path: Path) -> None:
    store, refused = CredentialStore(tmp_path), []

    def write(number: int) -> None:
        try:
            store.set("one", CredentialType.GENERIC, payload(key=f"value {number}"))
        except InputError:
            refused.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = store.find("one")
    assert found is not None
    (winner,) = set(range(8)) - set(refused)
    assert found.payload["key"].reveal() == f"value {winner}"
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]
