"""The objects that a URL selects, its driver and credentials, and the errors of drivers."""

from __future__ import annotations

import errno
import os
import ssl
from pathlib import Path

import pytest

from distflow.documents.urls import parse_url
from distflow.errors import InputError, StorageError, StorageMissing, StorageRefused, StorageUnreachable
from distflow.shell import Secret
from distflow.storage.base import Entry, check_names, select
from distflow.storage.credentials import Credentials, ambient_credentials, driver_of, package_of
from distflow.storage.failures import TransferCanceled, driver_errors, local_errors
from distflow.storage.files import FolderStore, is_part, part_name
from distflow.storage.sftp import SftpStore
from distflow.storage.stores import open_store


def entries(*keys: str) -> list[Entry]:
    return [Entry(key=key, size=1) for key in keys]


def names(url: str, *keys: str, regex: str = "") -> list[str]:
    return [one.name for one in select(parse_url(url), entries(*keys), regex)]


def test_keys_are_relative_to_the_url() -> None:
    assert names("s3://b/d", "d/x/y", "d/a", "d2/z") == ["a", "x/y"]
    assert names("s3://b", "d/x", "a") == ["a", "d/x"]


def test_a_url_with_the_exact_name_of_an_object_selects_only_it() -> None:
    assert names("s3://b/d/x.pt", "d/x.pt", "d/x.pt/more") == ["x.pt"]
    assert names("s3://b/d/x.pt/", "d/x.pt", "d/x.pt/more") == ["more"]


def test_folder_markers_are_left_out() -> None:
    assert names("s3://b/d", "d/", "d/sub/", "d/sub/a") == ["sub/a"]


def test_a_regex_is_matched_from_the_start_of_the_relative_path() -> None:
    assert names("s3://b/d", "d/a.pt", "d/x/a.pt", "d/a.txt", regex=r"a\.") == ["a.pt", "a.txt"]
    assert names("s3://b/d", "d/a.pt", "d/x/a.pt", "d/a.txt", regex=r".*\.pt$") == ["a.pt", "x/a.pt"]
    for wrong in ("(", "a{99999999999}", "(" * 5000 + ")" * 5000):
        with pytest.raises(InputError, match="not a valid regular expression"):
            names("s3://b/d", "d/a", regex=wrong)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("d/../../etc/passwd", "leads out of the directory"),
        ("d//etc/passwd", "leads out of the directory"),
        ("d/a/./b", "empty or `.`"),
        ("d/a//b", "empty or `.`"),
        ("d/a\0b", "null byte"),
        ("d/" + "ü" * 128, "longer than 255 bytes"),
    ],
)
def test_hostile_keys_are_refused(key: str, why: str) -> None:
    url = parse_url("s3://b/d")
    with pytest.raises(StorageError, match=why):
        check_names(url, select(url, entries("d/good", key)))


def test_a_key_cannot_be_both_a_file_and_a_directory() -> None:
    url = parse_url("s3://b/d")
    with pytest.raises(StorageError, match="a file and a directory"):
        check_names(url, select(url, entries("d/a", "d/a/b/c")))
    check_names(url, select(url, entries("d/a", "d/ab/c")))


def test_incomplete_files_are_recognized_by_name() -> None:
    assert is_part(part_name("0123456789abcdef"))
    assert not is_part("model.part")


KEYS = Credentials(
    access_key_id="id", access_key=Secret("very-secret"), override_url="http://here:1", region="eu", addressing_style="path"
)


def test_credentials_of_s3_become_options_of_its_driver() -> None:
    driver = driver_of(parse_url("s3://b/x"), KEYS)
    assert driver.name == "s3"
    assert (driver.options["key"], driver.options["secret"], driver.options["endpoint_url"]) == (
        "id",
        "very-secret",
        "http://here:1",
    )
    assert driver.options["client_kwargs"] == {"region_name": "eu"}
    assert driver.options["config_kwargs"]["s3"] == {"addressing_style": "path"}


def test_without_credentials_the_driver_finds_its_own() -> None:
    assert ambient_credentials("s3://b") is None
    assert set(driver_of(parse_url("s3://b/x"), None).options) == {"config_kwargs"}
    assert driver_of(parse_url("gs://b/x"), None).options == {}
    assert driver_of(parse_url("azure://account/c/x"), None).options == {"account_name": "account"}


def test_keys_for_google_storage_use_the_s3_driver() -> None:
    keys = Credentials(access_key_id="id", access_key=Secret("k"))
    driver = driver_of(parse_url("gs://b/x"), keys)
    assert driver.speaks_s3
    assert package_of(parse_url("gs://b/x"), keys) == "s3fs"
    assert package_of(parse_url("gs://b/x")) == "gcsfs"
    assert driver.options["endpoint_url"] == "https://storage.googleapis.com"


def test_azure_takes_a_key_or_a_connection_string() -> None:
    key = driver_of(parse_url("az://c/x"), Credentials(access_key_id="account", access_key=Secret("k")))
    assert key.options == {"account_name": "account", "account_key": "k"}
    text = "AccountName=a;AccountKey=k"
    whole = driver_of(parse_url("azure://a/c/x"), Credentials(access_key_id="", access_key=Secret(text)))
    assert whole.options == {"account_name": "a", "connection_string": text}


def test_the_repr_of_credentials_hides_the_secret() -> None:
    assert "very-secret" not in repr(KEYS)


class ClientAuthenticationError(Exception):
    """Has the name of an error of Azure's driver."""


class HttpError(Exception):
    """Has a status code, like an error of Google's driver."""

    def __init__(self, code: int) -> None:
        super().__init__(f"{code} at https://host/o?sig=0123abc")
        self.code = code


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError("no"), StorageRefused),
        (ClientAuthenticationError("no"), StorageRefused),
        (HttpError(403), StorageRefused),
        (FileNotFoundError("no"), StorageMissing),
        (HttpError(404), StorageMissing),
        (OSError(errno.EINVAL, "no"), StorageError),
        (ValueError("no"), StorageError),
        (ssl.SSLCertVerificationError("no"), StorageError),
        (ConnectionResetError("no"), StorageUnreachable),
        (TimeoutError(), StorageUnreachable),
        (HttpError(503), StorageUnreachable),
    ],
)
def test_errors_of_drivers_are_converted(error: Exception, kind: type[StorageError]) -> None:
    with pytest.raises(StorageError) as caught, driver_errors("s3://b/x"):
        raise error
    assert type(caught.value) is kind
    assert caught.value.message.startswith("s3://b/x: ")
    assert "0123abc" not in str(caught.value)
    assert ("does not accept" in caught.value.message) is (getattr(error, "errno", None) == errno.EINVAL)


def test_secrets_are_masked_in_errors_of_drivers() -> None:
    with pytest.raises(StorageError) as caught, driver_errors("s3://b/x", [Secret("very-secret")]):
        raise ConnectionError("signed with very-secret")
    assert "very-secret" not in str(caught.value)
    # A traceback does not show the driver's error either.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_errors_of_distflow_pass_unchanged() -> None:
    for error in (TransferCanceled(), InputError("x")):
        with pytest.raises(type(error)), driver_errors("s3://b/x"):
            raise error


def test_the_error_for_a_full_disk_says_what_to_do() -> None:
    with pytest.raises(StorageError, match=r"(?s)/x/y: No space left.*free space there"), local_errors("/x/y"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_azure_without_credentials_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(StorageRefused, match="no usable credentials") as caught:
        open_store(parse_url("az://c/x"))
    assert "AZURE_STORAGE_CONNECTION_STRING" in caught.value.hint


def test_a_folder_that_cannot_be_inspected_is_an_error_of_the_store(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="File name too long"):
        FolderStore().check_writable(f"{tmp_path}/{'x' * 300}".lstrip("/"))
    FolderStore().check_writable(f"{tmp_path}/new/deep".lstrip("/"))


def test_broken_and_circular_links_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, target in (("broken", "gone"), ("inside", "file/gone"), ("loop", "loop")):
        (tmp_path / name).symlink_to(target)
    assert [one.key for one in FolderStore().find(str(tmp_path).lstrip("/"))] == [f"{tmp_path}/file".lstrip("/")]


def test_a_wrong_ssh_configuration_is_not_retried() -> None:
    with pytest.raises(StorageError, match="cannot use the SSH configuration") as caught:
        SftpStore(parse_url("sftp://a;b@host/x")).find("x")
    assert type(caught.value) is StorageError
