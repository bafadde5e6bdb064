"""URLs of data and names of datasets: their parts, and the messages for invalid ones."""

from __future__ import annotations

import pytest

from distflow.documents.urls import StorageUrl, parse_dataset, parse_url
from distflow.errors import InputError


@pytest.mark.parametrize(
    ("text", "scheme", "container", "key", "profile", "shown"),
    [
        ("s3://bucket", "s3", "bucket", "", "s3://bucket", "s3://bucket"),
        ("S3://bucket/a/b.txt", "s3", "bucket", "a/b.txt", "s3://bucket", "s3://bucket/a/b.txt"),
        ("gs://bucket/a/", "gs", "bucket", "a", "gs://bucket", "gs://bucket/a/"),
        ("az://container/a", "az", "container", "a", "az://container", "az://container/a"),
        ("azure://account/container/a/b", "azure", "account/container", "a/b", "azure://account", "azure://account/container/a/b"),
        ("/data/x", "file", "", "data/x", "file://", "file:///data/x"),
        ("file:///data/x/", "file", "", "data/x", "file://", "file:///data/x/"),
        ("file://localhost/data", "file", "", "data", "file://", "file:///data"),
        ("sftp://ada@host:2222/x", "sftp", "ada@host:2222", "x", "sftp://ada@host:2222", "sftp://ada@host:2222/x"),
        ("https://host/a?X-Sig=secret#part", "https", "host", "a", "https://host", "https://host/a?…"),
        ("s3://bucket/runs/{{workflow_id}}", "s3", "bucket", "runs/{{workflow_id}}", "s3://bucket", "s3://bucket/runs/{{workflow_id}}"),
    ],
)  # fmt: skip
def test_a_url_is_parsed_into_its_parts(text: str, scheme: str, container: str, key: str, profile: str, shown: str) -> None:
    url = parse_url(text)
    assert (url.scheme, url.container, url.key, url.profile, str(url)) == (scheme, container, key, profile, shown)
    assert url.is_folder == text.endswith("/")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bucket/path", "not a data URL"),
        ("swift://endpoint/account/container/x", "no driver for `swift://`\nfor a service with an S3 interface"),
        ("tos://endpoint/bucket/x", "no driver for `tos://`\nfor a service with an S3 interface"),
        ("data", "not a data URL"),
        ("azur://account/c", "did you mean `azure`?"),
        ("s3://", "has no bucket"),
        ("s3:///x", "has no bucket"),
        ("azure://", "has no account and container"),
        ("azure://account", "`azure://account` has no container"),
        ("azure:///container/x", "has no account\nwrite azure://account/container/path"),
        ("https://", "has no host"),
        ("s3://bucket/a/../b", "contains `.`, `..` or an empty part"),
        ("s3://bucket/a//b", "contains `.`, `..` or an empty part"),
        ("/data/./x", "contains `.`, `..` or an empty part"),
        ("file://data/x", "names a host\nwrite file:///directory/name, without a host"),
        ("file://", "`file://` has no path"),
        ("s3://bucket/*.pt", "contains a `*`"),
        ("s3://bucket/a\nb", "control character"),
        ("https://ada:pass-word@host/x", "does not store secrets in URLs"),
        ("sftp://ada:pass-word@host/x", "does not store secrets in URLs"),
        ("s3://key:pass-word@bucket/x", "does not store secrets in URLs"),
        ("s3://key:pass-word@bucket/*.pt", "contains a `*`"),
    ],
)
def test_an_invalid_url_is_refused_with_a_hint(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_url(text)
    assert words in str(caught.value)
    assert caught.value.hint
    assert "pass-word" not in str(caught.value)


def test_https_urls_can_only_be_read() -> None:
    with pytest.raises(InputError, match="can only be read"):
        parse_url("https://host/x", writes=True)
    assert parse_url("s3://b/x", writes=True).key == "x"


def test_a_query_is_never_shown() -> None:
    url = parse_url("https://host/a?X-Amz-Signature=0123")
    assert url.query == "X-Amz-Signature=0123"
    assert "0123" not in str(url)
    with pytest.raises(InputError) as caught:
        parse_url("ftp://host/a?sig=0123")
    assert "0123" not in str(caught.value)


def test_the_root_directory_is_shown_as_a_valid_url() -> None:
    assert str(parse_url("/")) == str(parse_url("file:///")) == "file:///"


def test_below_appends_to_the_key() -> None:
    assert parse_url("s3://b/runs/").below("a/b") == StorageUrl(scheme="s3", container="b", key="runs/a/b")
    assert parse_url("s3://b").below("a") == StorageUrl(scheme="s3", container="b", key="a")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("mnist", ("mnist", None)), ("mnist:latest", ("mnist", None)), ("My-Set_1:12", ("My-Set_1", 12))],
)
def test_a_dataset_is_parsed_into_its_name_and_version(text: str, expected: tuple[str, int | None]) -> None:
    assert parse_dataset(text) == expected


@pytest.mark.parametrize("text", ["", "a/b", "../a", "a:", "a:0", "a:01", "a:best", "a:b:c", "a b", "a:99999999999"])
def test_an_invalid_dataset_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_dataset(text)
    assert caught.value.hint
