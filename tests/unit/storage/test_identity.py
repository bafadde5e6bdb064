"""The identity that nodes get for a store: its own credentials and variables, and no others."""

from __future__ import annotations

import json

import pytest

from distflow.documents.urls import parse_url
from distflow.shell import Secret
from distflow.storage.credentials import Credentials, Identity, identity_of

KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
WHERE = {"AWS_ENDPOINT_URL": "http://store", "AWS_REGION": "eu-1"}
AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "name", "AZURE_STORAGE_ACCOUNT_KEY": "key"}


@pytest.mark.parametrize(
    ("url", "environ", "names"),
    [
        ("s3://b/x", KEYS | WHERE | {"AWS_SESSION_TOKEN": "t", "HOME": "/h"}, {*KEYS, *WHERE, "AWS_SESSION_TOKEN"}),
        # Credentials of other stores are left out.
        ("s3://b/x", KEYS | AZURE, {*KEYS}),
        ("az://c/x", KEYS | AZURE, {*AZURE}),
        ("az://c/x", AZURE | {"AWS_PROFILE": "work"}, {*AZURE}),
        ("azure://a/c/x", AZURE, {*AZURE}),
        # The credentials are in files or are a role of this machine, so a node cannot get them.
        ("s3://b/x", WHERE, None),
        ("s3://b/x", AZURE, None),
        ("s3://b/x", KEYS | {"AWS_PROFILE": "work"}, None),
        ("gs://b/x", {"GOOGLE_APPLICATION_CREDENTIALS": "/h/key.json"}, None),
        ("az://c/x", {"AZURE_STORAGE_ACCOUNT_NAME": "name"}, None),
    ],
)
def test_an_identity_has_only_the_variables_of_its_store(url: str, environ: dict[str, str], names: set[str] | None) -> None:
    found = identity_of(parse_url(url), None, environ)
    assert (None if found is None else set(found.environment)) == names


def test_credentials_override_the_environment_and_survive_encoding() -> None:
    credentials = Credentials(
        access_key_id="id", access_key=Secret("k1"), override_url="http://x", region="r", addressing_style="path"
    )
    found = identity_of(parse_url("gs://b/x"), credentials, KEYS | WHERE)
    assert found is not None
    assert Identity.from_wire(json.loads(json.dumps(found.to_wire()))) == found
    assert (found.credentials, set(found.environment)) == (credentials, {*WHERE})


def test_only_the_key_of_an_account_is_a_secret() -> None:
    found = identity_of(parse_url("azure://name/c/x"), None, AZURE | WHERE)
    assert found is not None
    assert [one.reveal() for one in found.secrets] == ["key"]
    assert "key" not in repr(found).replace("access_key", "").lower().replace("account_key", "")
