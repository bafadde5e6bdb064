"""SHA-256 and keyed hashes of short texts, without ``hashlib`` and ``hmac`` if Python is CPython.

Those two modules load OpenSSL, which takes 8 ms of CPU time at the start of every agent. This module uses CPython's internal
implementations instead. Hash large files with ``hashlib``, which is faster for them.
"""

from __future__ import annotations

try:
    from _blake2 import blake2b
    from _operator import _compare_digest as compare_digest

    try:
        from _sha2 import sha256  # type: ignore[import-not-found,unused-ignore]
    except ImportError:  # before Python 3.12
        from _sha256 import sha256  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # another implementation of Python
    from hashlib import blake2b, sha256
    from hmac import compare_digest  # type: ignore[no-redef]

__all__ = ["compare_digest", "keyed_hash", "sha256_hex"]


def sha256_hex(data: bytes) -> str:
    """Return the SHA-256 of ``data`` as 64 hexadecimal digits."""
    return str(sha256(data).hexdigest())


def keyed_hash(key: bytes, data: bytes) -> bytes:
    """Return a message authentication code as 64 hexadecimal digits: keyed BLAKE2b (RFC 7693). The key has at most 64 bytes."""
    return blake2b(data, key=key, digest_size=32).hexdigest().encode()
