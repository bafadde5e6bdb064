"""Checks of host keys against known_hosts."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from distflow.transports.ssh.hostkeys import (
    add_known_host,
    check_host_key,
    fingerprint,
    key_type_of,
    known_algorithms,
    matches_list,
    parse_known_hosts,
    read_known_hosts,
)


def blob(kind: str, body: bytes = b"key") -> bytes:
    return len(kind).to_bytes(4, "big") + kind.encode() + body


def line(names: str, kind: str = "ssh-ed25519", body: bytes = b"key", marker: str = "") -> str:
    return f"{marker}{names} {kind} {base64.b64encode(blob(kind, body)).decode()} a comment\n"


MINE = blob("ssh-ed25519")


def test_lines_that_are_not_entries_are_skipped() -> None:
    text = (
        "# comment\n\n   \nhost\nhost ssh-ed25519\nhost ssh-ed25519 ???\nhost ssh-rsa "
        + base64.b64encode(MINE).decode()
        + "\n@unknown-marker "
        + line("host")
        + line("host")
    )
    found = parse_known_hosts(text, "kh")
    assert [(one.where, one.key_type) for one in found] == [("kh:9", "ssh-ed25519")]


@pytest.mark.parametrize(
    ("names", "name", "matches"),
    [
        ("gpu1", "gpu1", True),
        ("GPU1", "gpu1", True),
        ("gpu1", "Gpu1", True),
        ("gpu1,10.0.0.1", "10.0.0.1", True),
        ("gpu*", "gpu17", True),
        ("gpu?", "gpu17", False),
        ("*,!gpu1", "gpu1", False),
        ("[gpu1]:2222", "[gpu1]:2222", True),
        ("[gpu1]:2222", "gpu1", False),
        ("[gpu1]:2222", "[gpu1]:2223", False),
        ("|1|bad", "gpu1", False),
        ("|1|!!!|!!!", "gpu1", False),
    ],
)
def test_entries_match_names(names: str, name: str, matches: bool) -> None:
    (entry,) = parse_known_hosts(line(names), "kh")
    assert entry.is_for(name) is matches


def test_a_hashed_name_of_openssh_matches() -> None:
    # ssh-keygen -H of `example.org`
    names = "|1|xBnBvprRsrBvczJ5afj/kteN2OM=|XOFoijMX7pKMBB6kgMpesbBIIDM="
    (entry,) = parse_known_hosts(line(names), "kh")
    assert entry.is_for("Example.org")
    assert not entry.is_for("example.com")


def test_a_key_is_known_unknown_changed_or_revoked() -> None:
    known = parse_known_hosts(line("gpu1") + line("gpu2", body=b"other") + line("gpu3") + line("*", marker="@revoked "), "kh")
    without_revoked = known[:-1]
    assert check_host_key(without_revoked, "gpu1", MINE).kind == "known"
    assert check_host_key(without_revoked, "gpu9", MINE).kind == "unknown"
    changed = check_host_key(without_revoked, "gpu2", MINE)
    assert (changed.kind, changed.entries) == ("changed", (known[1],))
    assert check_host_key(known, "gpu3", MINE).kind == "revoked"


def test_a_key_of_another_kind_counts_as_changed() -> None:
    known = parse_known_hosts(line("gpu1", "ssh-rsa") + line("gpu1", "ssh-ed25519", b"old"), "kh")
    check = check_host_key(known, "gpu1", MINE)
    assert check.kind == "changed"
    assert [one.key_type for one in check.entries] == ["ssh-ed25519", "ssh-rsa"]


def test_a_key_without_a_port_is_valid_for_other_ports_and_never_conflicts() -> None:
    known = parse_known_hosts(line("gpu1"), "kh")
    assert check_host_key(known, "[gpu1]:2222", MINE).kind == "known"
    assert check_host_key(known, "[gpu1]:2222", blob("ssh-ed25519", b"container")).kind == "unknown"


def test_a_revoked_key_does_not_hide_a_known_key_of_another_port() -> None:
    known = parse_known_hosts(line("gpu1", "ssh-rsa") + line("*", marker="@revoked ", body=b"stolen"), "kh")
    assert known_algorithms(known, "[gpu1]:2222", ("ssh-ed25519", "rsa-sha2-512"))[0] == "rsa-sha2-512"


def test_algorithms_of_known_keys_are_requested_first() -> None:
    supported = ("ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512", "rsa-sha2-256")
    known = parse_known_hosts(line("gpu1", "ssh-rsa") + line("gpu2", "ecdsa-sha2-nistp256"), "kh")
    assert known_algorithms(known, "gpu1", supported) == (
        "rsa-sha2-512", "rsa-sha2-256", "ssh-ed25519", "ecdsa-sha2-nistp256",
    )  # fmt: skip
    assert known_algorithms(known, "[gpu2]:2222", supported)[0] == "ecdsa-sha2-nistp256"
    assert known_algorithms(known, "gpu3", supported) == supported
    authority = parse_known_hosts(line("gpu*", marker="@cert-authority "), "kh")
    assert known_algorithms(authority, "gpu1", supported)[0] == "ssh-ed25519-cert-v01@openssh.com"
    assert known_algorithms(authority, "gpu1", supported)[4:] == supported


def test_adding_a_key_never_replaces_one(tmp_path: Path) -> None:
    file = str(tmp_path / "sub" / "known_hosts")
    assert add_known_host(file, "[GPU1]:22022", MINE).kind == "known"
    assert add_known_host(file, "[gpu1]:22022", MINE).kind == "known"
    assert add_known_host(file, "[gpu1]:22022", blob("ssh-ed25519", b"new")).kind == "changed"
    assert add_known_host(file, "gpu2", MINE, hashed=True).kind == "known"
    found = read_known_hosts([file, str(tmp_path / "missing"), str(tmp_path)])
    assert [one.names[0][:3] for one in found] == ["[gp", "|1|"]
    assert found[1].is_for("gpu2")
    assert not found[1].is_for("gpu1")


def test_key_types_and_fingerprints() -> None:
    assert key_type_of(MINE) == "ssh-ed25519"
    assert key_type_of(b"") == key_type_of(b"\0\0\0\xffshort") == ""
    assert fingerprint(MINE).startswith("ED25519 SHA256:")
    assert fingerprint(blob("ecdsa-sha2-nistp256")).startswith("ECDSA SHA256:")
    assert fingerprint(blob("sk-ssh-ed25519@openssh.com")).startswith("ED25519 SHA256:")
    assert not fingerprint(MINE).endswith("=")


def test_lists_may_have_wildcards_and_negated_patterns() -> None:
    assert matches_list("gpu12", ["gpu*"])
    assert matches_list("gpu1", ["x", "gpu?"])
    assert not matches_list("gpu12", ["gpu?"])
    assert not matches_list("gpu1", ["*", "!gpu1"])
    assert not matches_list("gpu1", ["!other"])
    assert not matches_list("gpu1", ["gpu[1]", "g.u1"])
    assert not matches_list("gpu1", [])
