"""Records of older versions of distflow can still be read."""

from __future__ import annotations

import pytest

from distflow.state.codec import decode, encode
from distflow.state.record import DataKind, DataRef, TransferRecord


@pytest.mark.parametrize(
    ("op", "data", "is_relayed"),
    [
        ("fetch/0", DataRef(DataKind.FETCH, 0), False),
        ("write/2", DataRef(DataKind.WRITE, 2), False),
        ("relay/fetch/1", DataRef(DataKind.FETCH, 1), True),
        ("relay/write/0", DataRef(DataKind.WRITE, 0), True),
    ],
)
def test_a_transfer_record_of_an_older_distflow_is_read(op: str, data: DataRef, is_relayed: bool) -> None:
    found = decode(f'{{"op":"{op}","task":"t","at":1.0,"url":"s3://b/x"}}'.encode(), TransferRecord)
    assert found == TransferRecord(data=data, is_relayed=is_relayed, task="t", at=1.0, url="s3://b/x")
    assert decode(encode(found), TransferRecord) == found
