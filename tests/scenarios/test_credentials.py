"""``distflow credential``: set, list and delete, with values from arguments, files, standard input and a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

from scenarios.conftest import Cli

VALUE = "hidden-value-3f8a"


def test_set_list_and_delete(cli: Cli) -> None:
    (cli.folder / "key").write_text(f"{VALUE}\nsecond line\n\n")
    done = cli.run("credential", "set", "deploy", "--payload-file", f"key={cli.folder / 'key'}")
    assert (done.code, done.out) == (0, "Set GENERIC credential deploy.\n"), done.err
    kept = json.loads((cli.state / "credentials" / "deploy.json").read_text())
    assert kept == {"type": "GENERIC", "payload": {"key": f"{VALUE}\nsecond line"}}
    words = ["endpoint=s3://bucket", "access_key_id=id", f"access_key={VALUE}=="]
    done = cli.run("credential", "set", "store", "--type", "data", "--payload", *words, "-t", "json")
    expected = {
        "cred_name": "store",
        "cred_type": "DATA",
        "profile": "s3://bucket",
        "keys": ["endpoint", "access_key_id", "access_key"],
    }
    assert json.loads(done.out) == expected
    text, listed = cli.run("credential", "list"), cli.run("credential", "--format-type", "json", "list")
    assert text.out.splitlines()[2:] == [
        "deploy  GENERIC  -            key",
        "store   DATA     s3://bucket  endpoint access_key_id access_key",
    ]
    generic = {"cred_name": "deploy", "cred_type": "GENERIC", "profile": None, "keys": ["key"]}
    assert json.loads(listed.out) == {"credentials": [generic, expected]}
    assert cli.run("credential", "delete", "deploy").out == "Deleted credential deploy.\n"
    again = cli.run("credential", "delete", "deploy", "-t", "json")
    assert again.code == 2
    assert json.loads(again.out)["error"]["message"] == "there is no credential `deploy`"
    assert VALUE not in text.out + listed.out + done.out + again.out + again.err


def test_a_value_is_read_from_standard_input(cli: Cli) -> None:
    command = [sys.executable, "-m", "distflow", "credential", "set", "wandb", "--payload-file", "api_key=-"]
    subprocess.run(command, input=f"{VALUE}\n", text=True, check=True, env=cli.environment, cwd=cli.folder, capture_output=True)
    assert json.loads((cli.state / "credentials" / "wandb.json").read_text())["payload"] == {"api_key": VALUE}


def test_a_terminal_prompts_for_the_value_and_does_not_show_it(cli: Cli) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "distflow", "credential", "set", "wandb", "--payload-file", "api_key=-"]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=cli.environment, cwd=cli.folder, start_new_session=True
    )
    os.close(slave)
    output = b""
    while b"api_key: " not in output:
        output += os.read(master, 1024)
    os.write(master, f"{VALUE}\n".encode())
    assert process.wait(30) == 0
    try:
        while data := os.read(master, 1024):
            output += data
    except OSError:
        pass  # the process has closed the terminal, and all output is read
    os.close(master)
    assert b"Set GENERIC credential wandb." in output
    assert VALUE.encode() not in output
    assert VALUE in (cli.state / "credentials" / "wandb.json").read_text()


def test_error_messages_do_not_contain_the_secret_value(cli: Cli) -> None:
    name = ("credential", "set", "one")
    cases = {
        name: "the payload is missing",
        (*name, "--payload", f"a={VALUE}", "--payload-file", "b=-"): "--payload and --payload-file cannot be combined",
        (*name, "--payload", VALUE): "value 1 of --payload is not of the form KEY=VALUE",
        (*name, "--payload", f"a={VALUE}", f"a={VALUE}"): "the key `a` is given twice",
        (*name, "--payload-file", f"a={VALUE}"): "--payload-file a: the file cannot be read: No such file or directory",
        (*name, "--payload-file", "a=/dev/null"): "the value of `a` is empty",
        (*name, "--payload-file", "a=-", "b=-"): "--payload-file: only one key can have the value `-` (standard input)",
        (*name, "--payload-file", f"a={sys.executable}"): "--payload-file a: the value is not valid UTF-8 text",
        (*name, "--type", "REGISTRY", "--payload", f"password={VALUE}"): "`password` is not a key of a REGISTRY credential",
        ("credential", "delete", "one"): "there is no credential `one`\nno credentials exist",
    }
    for arguments, words in cases.items():
        done = cli.run(*arguments)
        assert done.code == 2, arguments
        assert words in done.err, (arguments, done.err)
        assert VALUE not in done.err + done.out
    assert cli.run("credential", "list").out == "There are no credentials yet.\n"


def test_a_credential_that_cannot_be_written_is_reported(cli: Cli) -> None:
    cli.state.mkdir()
    (cli.state / "credentials").write_text("in the way")
    done = cli.run("credential", "set", "one", "--payload", "a=b")
    assert done.code == 5, done.err
    assert "cannot use the credentials" in done.err
    assert Path(cli.state / "credentials").read_text() == "in the way"
