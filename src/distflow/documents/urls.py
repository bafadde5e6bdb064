"""URLs of data such as ``s3://bucket/path``, and names of datasets such as ``mnist:3``, checked without any I/O.

A URL may contain ``{{workflow_id}}``, which is replaced before the URL is used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace  # noqa: TID251  nodes have no msgspec

from distflow.documents.text import did_you_mean
from distflow.errors import InputError

__all__ = ["READ_ONLY", "SecretInUrl", "StorageUrl", "parse_dataset", "parse_url"]

_SCHEMES = ("file", "s3", "gs", "az", "azure", "http", "https", "sftp")
READ_ONLY = ("http", "https")
"""Schemes that distflow can only read."""

_SHAPES = {
    "file": "file:///directory/name",
    "s3": "s3://bucket/path",
    "gs": "gs://bucket/path",
    "az": "az://container/path",
    "azure": "azure://account/container/path",
    "http": "http://host/path",
    "https": "https://host/path",
    "sftp": "sftp://host/path",
}
_WITHOUT_DRIVER = ("swift", "tos")
"""Schemes that only OSMO supports."""
_NO_DRIVER = (
    "for a service with an S3 interface, write s3://bucket/path, and set `override_url` of a DATA credential to its address"
)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


class SecretInUrl(InputError):
    """A URL contains a user or a password. The message does not quote the URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageUrl:
    """A location of data: a container, such as a bucket, and a key in it."""

    scheme: str
    """The scheme, such as ``s3``; ``file`` for a plain absolute path."""
    container: str
    """The bucket; ``account/container`` for ``azure``; ``host[:port]`` for ``http`` and ``https``; ``[user@]host[:port]`` for
    ``sftp``; empty for ``file``."""
    key: str
    """The path in the container, without a slash at either end; empty: the whole container."""
    is_folder: bool = False
    """Whether it ends with a slash, which selects all objects below it."""
    query: str = ""
    """The part after ``?`` of ``http`` and ``https``. It may be a signature, so it is never shown."""

    @property
    def profile(self) -> str:
        """The URL profile, by which object stores find their credentials: scheme and bucket, account or host (``s3://bucket``)."""
        return f"{self.scheme}://{self.container.split('/')[0]}"

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.key.rpartition("/")[2]

    def __str__(self) -> str:
        """Return the URL for messages, without its query."""
        return self.shown(self.key) + ("/" if self.is_folder and self.key else "") + ("?…" if self.query else "")

    def shown(self, key: str) -> str:
        """Return the URL of another key in the same container, for messages."""
        container = f"{self.scheme}://{self.container}"
        return f"{container}/{key}" if key or self.scheme == "file" else container

    def below(self, name: str) -> StorageUrl:
        """Return the URL of ``name`` below this one."""
        return replace(self, key=f"{self.key}/{name}" if self.key else name, is_folder=False)


def parse_url(text: str, *, writes: bool = False) -> StorageUrl:
    """Parse a URL; with ``writes`` its scheme must support writing. Raises ``InputError``.

    >>> parse_url("s3://bucket/runs/7/").key
    'runs/7'
    >>> parse_url("/data/mnist").scheme
    'file'
    """
    if text.startswith("/"):
        return _file(text, text)
    match = _URL.fullmatch(text)
    if match is None:
        hint = "write a URL such as s3://bucket/path, or an absolute path"
        raise InputError(f"`{_without_secrets(text)}` is not a data URL", hint=hint)
    scheme, rest = match.group(1).lower(), match.group(2)
    if scheme not in _SCHEMES:
        if scheme in _WITHOUT_DRIVER:
            raise InputError(f"distflow has no driver for `{scheme}://`", hint=_NO_DRIVER)
        near = did_you_mean(scheme, _SCHEMES, what="schemes")
        raise InputError(f"distflow does not support the scheme `{scheme}://`", hint=near)
    if control := re.search(r"[\x00-\x1f\x7f]", text):
        what = f"contains the control character U+{ord(control.group()):04X} at position {control.start() + 1}"
        raise InputError(f"`{_without_secrets(text)}` {what}", hint="remove it")
    if writes and scheme in READ_ONLY:
        raise InputError(f"`{scheme}://` can only be read", hint="write to s3://, gs://, az://, azure://, sftp:// or file://")
    if scheme == "file":
        return _file(rest.removeprefix("localhost"), text)
    query = ""
    if scheme in READ_ONLY:
        rest, _, query = rest.partition("#")[0].partition("?")
    elif "*" in rest:
        raise InputError(
            f"`{_without_secrets(text)}` contains a `*`", hint="name the directory above it, and select files with `regex`"
        )
    container, key = _split(scheme, rest)
    if "@" in container and (":" in container.rpartition("@")[0] or scheme != "sftp"):
        what = "a password" if scheme == "sftp" else "a user or a password"
        message = f"this {scheme}:// URL contains {what}, and distflow does not store secrets in URLs"
        raise SecretInUrl(message, hint=_secret_remedy(scheme))
    if missing := _missing_part(scheme, container):
        raise InputError(f"`{_without_secrets(text)}` has no {missing}", hint=f"write {_SHAPES[scheme]}")
    _check_parts(key, text)
    return StorageUrl(
        scheme=scheme, container=container, key=key.strip("/"), is_folder=key.endswith("/"), query=query,
    )  # fmt: skip


def _secret_remedy(scheme: str) -> str:
    if scheme == "sftp":
        return "remove the password: sftp:// uses SSH keys and ~/.ssh/config, as `ssh` does"
    if scheme in READ_ONLY:
        return "remove the part before the `@`, and use a file that needs no login, or a URL with a signature"
    return "remove the part before the `@`, and set a credential: `distflow credential set`"


def _split(scheme: str, rest: str) -> tuple[str, str]:
    """Return the container and the key."""
    container, _, key = rest.partition("/")
    if scheme == "azure":
        inner, _, key = key.partition("/")
        container = f"{container}/{inner}" if inner else container
    return container, key


def _missing_part(scheme: str, container: str) -> str:
    """Return the name of the part that is missing in a container; empty if it is complete."""
    if scheme == "azure":
        account, _, inner = container.partition("/")
        return " and ".join(noun for noun, value in (("account", account), ("container", inner)) if not value)
    return "" if container else {"s3": "bucket", "gs": "bucket", "az": "container"}.get(scheme, "host")


def _file(path: str, text: str) -> StorageUrl:
    if not path.startswith("/"):
        what = "names a host" if path else "has no path"
        raise InputError(f"`{_without_secrets(text)}` {what}", hint=f"write {_SHAPES['file']}, without a host")
    _check_parts(path, text)
    return StorageUrl(scheme="file", container="", key=path.strip("/"), is_folder=path.endswith("/") and path != "/")


def _check_parts(key: str, text: str) -> None:
    parts = key.strip("/").split("/")
    if "" in parts[1:] or {".", ".."} & set(parts):
        hint = "write the path without `.`, `..` and empty parts"
        raise InputError(f"the path of `{_without_secrets(text)}` contains `.`, `..` or an empty part", hint=hint)


def _without_secrets(text: str) -> str:
    """Return a URL for a message, without parts that may be a signature or a password."""
    return re.sub(r"//[^/@]*@", "//…@", text.partition("?")[0])


_DATASET = re.compile(r"([A-Za-z0-9_-]+)(?::([A-Za-z0-9_-]+))?")


def parse_dataset(text: str) -> tuple[str, int | None]:
    """Return the name of a dataset and its version, which is ``None`` for the latest. Raises ``InputError``.

    >>> parse_dataset("mnist:3")
    ('mnist', 3)
    >>> parse_dataset("mnist:latest")
    ('mnist', None)
    """
    match = _DATASET.fullmatch(text)
    if match is None:
        hint = "use letters, digits, `-` and `_`; write a version after a colon: `mnist:3`"
        raise InputError(f"`{text}` is not a valid dataset name", hint=hint)
    name, version = match.group(1), match.group(2)
    if version in (None, "latest"):
        return name, None
    if not re.fullmatch("[1-9][0-9]{0,8}", version):
        raise InputError(f"`{version}` is not a dataset version", hint="versions are 1, 2, 3, …, and `latest`")
    return name, int(version)
