"""``distflow data`` against a server that speaks S3 and checks signatures."""

from __future__ import annotations

import json
from pathlib import Path

from distflow.testing.s3 import S3Server
from scenarios.conftest import Cli


def _write_files(top: Path, names: dict[str, str]) -> Path:
    for name, text in names.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    return top


def test_files_are_uploaded_listed_downloaded_checked_and_deleted(cli: Cli, s3: S3Server) -> None:
    bucket = s3.bucket("b")
    _write_files(cli.folder / "results", {"a.txt": "A", "sub/b.pt": "BB"})
    sent = cli.run("data", "upload", "s3://b/run", "results", "-t", "json", "-b", "measured")
    assert (sent.code, sent.err) == (0, "")
    assert json.loads(sent.out) == {"url": "s3://b/run", "files": 2, "bytes": 3, "already_there": 0}
    (measured,) = (cli.folder / "measured").iterdir()
    figures = json.loads(measured.read_text())
    assert (figures["bytes"], figures["transferred_bytes"]) == (3, 3)
    assert (bucket / "run/results/sub/b.pt").read_text() == "BB"
    assert cli.run("data", "upload", "s3://b/run", "results").out == "uploaded 0 files, 0 B; 2 files were already there\n"

    listed = cli.run("data", "list", "s3://b/run/results")
    assert (listed.out, listed.err) == ("a.txt\nsub/\n", "2 objects, 3 B\n")
    assert cli.run("data", "list", "-r", "s3://b", "-x", r".*\.pt$").out == "run/results/sub/b.pt\n"
    assert cli.run("data", "list", "-r", "s3://b", "-p", "run/results/s").out == "run/results/sub/b.pt\n"
    body = json.loads(cli.run("data", "list", "-r", "s3://b/run/results", "-t", "json").out)
    assert [(one["name"], one["url"], one["bytes"]) for one in body["objects"]] == [
        ("a.txt", "s3://b/run/results/a.txt", 1),
        ("sub/b.pt", "s3://b/run/results/sub/b.pt", 2),
    ]
    assert cli.run("data", "list", "-r", "s3://b/run/results", "list.txt").out == ""
    assert (cli.folder / "list.txt").read_text() == "a.txt\nsub/b.pt\n"
    assert cli.run("data", "list", "s3://b/run/results", "list.txt").code == 2

    got = _write_files(cli.folder / "got", {"a.txt": "A"})
    again = cli.run("data", "download", "s3://b/run/results", "got", "-r").out
    assert again == "downloaded 1 file, 2 B; 1 file was already there\n"
    assert (got / "sub/b.pt").read_text() == "BB"

    for access in ("READ", "write", "DELETE"):
        assert cli.run("data", "check", "s3://b/run", "-a", access).code == 0
    assert json.loads(cli.run("data", "check", "s3://b/run", "-t", "json").out) == {"status": "pass"}
    gone = cli.run("data", "delete", "s3://b/run", "-x", "results/sub", "-t", "json")
    assert json.loads(gone.out) == {"url": "s3://b/run", "deleted": 1}
    assert cli.run("data", "list", "-r", "s3://b/run").out == "results/a.txt\n"


def test_failed_commands_exit_with_2_or_3_and_name_the_cause(cli: Cli, s3: S3Server) -> None:
    s3.bucket("b")
    _write_files(cli.folder / "results", {"a.txt": "A"})
    for arguments, code, words in (
        (["upload", "s3://b/run", "nothing"], 3, "nothing: No such file"),
        (["upload", "s3://b/run", "results", "-x", "x"], 2, "no files to upload that match `x`"),
        (["upload", "https://b/run", "results"], 2, "can only be read"),
        (["upload", "s3://none/run", "results"], 3, "no such bucket"),
        (["download", "s3://b/run", "nowhere"], 2, "mkdir -p nowhere"),
        (["download", "s3://b/run", "results"], 3, "nothing at s3://b/run"),
        (["list", "s3://none"], 3, "no such bucket"),
        (["list", "s3://b", "-x", "("], 2, "not a valid regular expression"),
        (["delete", "s3://b/run"], 3, "nothing at s3://b/run"),
        (["delete", "/"], 2, "cannot delete `file:///`: it is the root directory of this machine"),
        (["check", "s3://none", "-a", "WRITE"], 3, "no such bucket"),
        (["check", "ftp://b"], 2, "does not support the scheme `ftp://`"),
    ):
        done = cli.run("data", *arguments)
        assert (done.code, done.out) == (code, ""), arguments
        assert words in done.err
    cli.run("data", "upload", "s3://b/run", "results")
    for verb in (["download", "s3://b/run", "results"], ["delete", "s3://b/run"]):
        done = cli.run("data", *verb, "-x", "x")
        assert (done.code, "matches `x`" in done.err) == (2, True)
    cli.environment["AWS_SECRET_ACCESS_KEY"] = "wrong-4711"
    done = cli.run("data", "check", "s3://b/run", "-t", "json")
    assert done.code == 3
    assert json.loads(done.out)["status"] == "fail"
    assert "signature" in done.err
    assert "wrong-4711" not in done.out + done.err


def test_a_stored_credential_is_used_for_its_bucket(cli: Cli, s3: S3Server) -> None:
    bucket = s3.bucket("b")
    _write_files(bucket, {"in/a.txt": "A\n"})
    for name in list(s3.environment):
        cli.environment.pop(name, None)
    cli.environment["AWS_EC2_METADATA_DISABLED"] = "true"
    refused = cli.run("data", "list", "s3://b/in")
    assert refused.code == 3
    assert "there are no usable credentials for it" in refused.err
    for key, code, words in (("wrong-5ecret", 3, "s3://b/in: "), (s3.access_key, 0, "a.txt")):
        payload = [f"access_key_id={s3.access_key_id}", f"access_key={key}", "endpoint=s3://b", f"override_url={s3.url}"]
        stored = cli.run("credential", "set", "store", "--type", "DATA", "--payload", *payload, "region=us-east-1")
        assert stored.code == 0, stored.err
        done = cli.run("data", "list", "s3://b/in")
        assert done.code == code, done.err
        assert words in done.out + done.err
        assert key not in done.out + done.err
    spec = """
workflow:
  name: kept
  tasks:
  - name: one
    command: [sh, -c, 'cat "{{input:0}}/a.txt" | tee "{{output}}/b.txt"']
    inputs: [{url: s3://b/in}]
    outputs: [{url: s3://b/out}]
"""
    done = cli.run("workflow", "submit", cli.spec(spec), "--wait")
    assert done.code == 0, done.err
    assert (bucket / "out" / "b.txt").read_text() == "A\n"
