"""Notifications, delivered to a real web server and a real command."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import ssl
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from distflow.client.client import Client
from distflow.client.notifications import delivery
from distflow.client.notifications.delivery import send_test_notification
from distflow.client.notifications.message import compose, sample
from distflow.client.notifications.sender import main, send_notifications
from distflow.client.notifications.targets import set_profile_notify, target_problems
from distflow.documents.notify import NotifyTarget, Trigger
from distflow.documents.problems import Mark, ProblemsFound
from distflow.errors import NotifyError, StateError
from distflow.lifecycle.states import Reason, WorkflowState
from distflow.plan.model import Plan
from distflow.pools.model import Pool
from distflow.shell import Secret
from distflow.state.credentials import CredentialStore, CredentialType
from distflow.state.event_details import NotificationFailed, NotificationSent
from distflow.state.notification import Notification
from distflow.state.record import WorkflowRecord
from outputs import assert_documented
from unit.state.stored import T0, failed_group, workflow
from webhooks import SECRET, Receiver, running_receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A web server."""
    with running_receiver() as made:
        yield made


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """A client on an empty state directory."""
    with Client(environ={**os.environ, "DISTFLOW_STATE": str(tmp_path / "state")}) as made:
        made.writable_directory()
        yield made


def set_url(client: Client, name: str, url: str, key: str = "url") -> None:
    CredentialStore(client.directory.credentials).set(name, CredentialType.GENERIC, {key: Secret(url)})


def stored(client: Client, *targets: NotifyTarget, on: Trigger = Trigger.FAILED) -> WorkflowRecord:
    """Store a failed workflow whose notifications are due."""
    number = len(client.store.uuids()) + 1
    record = workflow([failed_group()], number=number, state=WorkflowState.FAILED, reason=Reason.EXIT_CODE)
    plan, pool = Plan(name="digits", pool="lab", groups=()), Pool(name="lab", backend="ssh", nodes=())
    record = client.store.submit(record, template="", spec="", plan=plan, pool=pool, notify=targets)
    due = [Notification(workflow=record.uuid, target=position, on=on, at=T0) for position in range(len(targets))]
    client.store.save([record], [], due)
    return record


def outcomes(client: Client, record: WorkflowRecord) -> list[NotificationSent | NotificationFailed]:
    details = (event.details for event in client.store.events(record.uuid))
    return [one for one in details if isinstance(one, NotificationSent | NotificationFailed)]


def test_a_failure_is_sent_with_its_cause_and_only_once(client: Client, receiver: Receiver) -> None:
    set_url(client, "team", receiver.url)
    record = stored(client, NotifyTarget(credential="team"))
    receiver.answers.put(503)
    send_notifications(client, pauses_s=(0.01,))
    first, second = receiver.received
    assert first == second, "each try sends the same document"
    assert_documented(second, "notification")
    assert (second["name"], second["on"], second["group"], second["test"]) == ("digits-1", "failed", "training", False)
    assert (second["first_cause"]["task"], second["first_cause"]["exit_code"]) == ("worker", 1)
    assert second["end_time"] == "2025-04-11T21:32:42.000Z"
    assert second["lines"][-1] == "RuntimeError: shapes differ"
    assert second["summary"] == (
        "digits-1 failed after 1:23: worker on worker-node, rank 11: exit code 1: RuntimeError: shapes differ"
    )
    assert second["text"].endswith("Details: distflow workflow why digits-1")
    assert outcomes(client, record) == [NotificationSent(on="failed", target="team")]
    send_notifications(client)
    assert len(receiver.received) == 2


@pytest.mark.parametrize(
    ("trigger", "summary"),
    [
        (Trigger.STARTED, "digits-1 started on master-node, worker-node"),
        (Trigger.COMPLETED, "digits-1 completed after 1:23"),
        (Trigger.CANCELED, "digits-1 was canceled"),
        (Trigger.WAITING, "digits-1 is waiting for nodes: training: worker: exit code 1: RuntimeError: shapes differ"),
    ],
)
def test_every_kind_of_message_is_documented(client: Client, trigger: Trigger, summary: str) -> None:
    message = compose(
        client, stored(client), trigger, notification_id="x", subject="training/0" if trigger.value == "waiting" else ""
    )
    assert_documented(message, "notification")
    assert message["summary"] == summary
    assert_documented(sample(trigger), "notification")


def test_slack_gets_a_text(client: Client, receiver: Receiver) -> None:
    set_url(client, "team", receiver.url)
    stored(client, NotifyTarget(credential="team", format="slack"))
    send_notifications(client)
    (body,) = receiver.received
    assert list(body) == ["text"]
    assert "RuntimeError: shapes differ" in body["text"]
    assert delivery._body(NotifyTarget(), {"text": "a<b>&c"}, "https://hooks.slack.com/x") == {"text": "a&lt;b&gt;&amp;c"}


@pytest.mark.parametrize(
    ("answers", "error", "requests"),
    [
        ([404], "127.0.0.1 answered 404 Not Found", 1),
        ([307, 307], "127.0.0.1 answered 307: redirects are not followed; use the final URL", 1),
        ([302, 302], "127.0.0.1 answered 302: redirects are not followed; use the final URL", 1),
        ([500, 429, 503], "127.0.0.1 answered 503 Service Unavailable (3 tries)", 3),
    ],
)
def test_a_refusal_is_recorded_without_the_url(
    client: Client, receiver: Receiver, answers: list[int], error: str, requests: int, capfd: pytest.CaptureFixture[str]
) -> None:
    set_url(client, "team", receiver.url)
    record = stored(client, NotifyTarget(credential="team"))
    for answer in answers:
        receiver.answers.put(answer)
    send_notifications(client, pauses_s=(0.01, 0.01))
    assert outcomes(client, record) == [NotificationFailed(on="failed", target="team", error=error)]
    assert len(receiver.received) == requests
    assert SECRET not in capfd.readouterr().err + "".join(event.text for event in client.store.events(record.uuid))
    assert not client.store.has_notifications()


def test_target_that_does_not_answer_does_not_delay_others(
    client: Client, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_ANSWER_S", 0.3)
    receiver.is_silent.set()
    command = ("sh", "-c", f'cat > {tmp_path}/body; echo "$DISTFLOW_NOTIFY_ON $DISTFLOW_NOTIFY_ID" > {tmp_path}/environment')
    record = stored(client, NotifyTarget(url=receiver.url), NotifyTarget(command=command))
    send_notifications(client, pauses_s=())
    assert outcomes(client, record) == [
        NotificationSent(on="failed", target="sh"),
        NotificationFailed(
            on="failed", target=receiver.url.partition(f"/{SECRET}")[0], error="127.0.0.1 did not answer within 0.3 s"
        ),
    ]
    assert (tmp_path / "environment").read_text() == "failed digits-1\n"
    assert_documented(json.loads((tmp_path / "body").read_text()), "notification")


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (("sh", "-c", "exit 7"), "sh ended with exit code 7"),
        (("/no/such/program",), "/no/such/program cannot be started: No such file or directory"),
        (("sh", "-c", "sleep 600 & wait"), "sh ran longer than 0.3 s and was killed"),
    ],
)
def test_a_command_that_fails_or_hangs_is_an_error(
    command: tuple[str, ...], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_COMMAND_S", 0.3)
    with pytest.raises(NotifyError) as caught:
        delivery.deliver(NotifyTarget(command=command), sample(Trigger.FAILED), "")
    assert caught.value.message == error


def test_changed_credential_is_checked_again(client: Client) -> None:
    record = stored(client, NotifyTarget(credential="team"))
    set_url(client, "team", f"http://ci.example/{SECRET}")
    send_notifications(client)
    (outcome,) = outcomes(client, record)
    assert isinstance(outcome, NotificationFailed)
    assert outcome.error == "the URL of the credential `team` is a secret, and http:// would send it without encryption"


def test_a_request_to_this_machine_uses_no_proxy(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    delivery.deliver(NotifyTarget(credential="team"), sample(Trigger.FAILED), receiver.url)
    assert len(receiver.received) == 1


def test_process_sends_due_notifications_unless_another_process_does(client: Client, receiver: Receiver) -> None:
    stored(client, NotifyTarget(url=receiver.url))
    argv = [str(client.directory.path)]
    with client.directory.notify_lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert (main(argv), receiver.received) == (0, [])
    assert main(argv) == 0
    assert (len(receiver.received), client.store.has_notifications()) == (1, False)


def test_a_login_in_the_url_becomes_a_header(receiver: Receiver) -> None:
    url = receiver.url.replace("http://", "http://me:a%40b@")
    delivery.deliver(NotifyTarget(credential="team"), sample(Trigger.FAILED), url)
    assert receiver.authorizations == [f"Basic {base64.b64encode(b'me:a@b').decode()}"]


def test_a_server_without_a_valid_certificate_gets_nothing(receiver: Receiver, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    day, now = timedelta(days=1), datetime.now(timezone.utc)
    unsigned = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
    certificate = unsigned.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    (tmp_path / "server.pem").write_bytes(certificate + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    receiver.socket = context.wrap_socket(receiver.socket, server_side=True)
    url = receiver.url.replace("http://127.0.0.1", "https://localhost")
    with pytest.raises(NotifyError, match="the certificate of localhost is not valid: self-signed certificate") as caught:
        delivery.deliver(NotifyTarget(credential="team"), sample(Trigger.FAILED), url)
    assert not caught.value.may_retry
    assert receiver.received == []


def test_missing_credential_ends_the_notification(client: Client) -> None:
    record = stored(client, NotifyTarget(credential="team"))
    send_notifications(client)
    assert outcomes(client, record) == [
        NotificationFailed(on="failed", target="team", error="this machine has no credential `team`")
    ]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (f"http://127.example/{SECRET}", "http:// would send it without encryption"),
        (f"https:///{SECRET}", "has no host"),
        (SECRET, "is not a URL"),
        (f"https://ci.example/{SECRET} x", "is not a URL"),
        (f"https://[{SECRET}/", "is not a URL"),
    ],
)
def test_a_credential_without_a_usable_url_is_refused(client: Client, url: str, expected: str) -> None:
    set_url(client, "team", url)
    (problem,) = target_problems(client, [NotifyTarget(credential="team", where=Mark("spec.yaml", 4))])
    assert expected in problem.message
    assert problem.as_text().startswith("spec.yaml:4: error: the ")
    assert SECRET not in problem.as_text()


def test_other_schemes_need_apprise(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    set_url(client, "mail", f"mailto://me:{SECRET}@example.com")
    (problem,) = target_problems(client, [NotifyTarget(credential="mail")])
    assert problem.message == "the URL of the credential `mail` begins with `mailto://`, which needs apprise"
    assert problem.hint == "install it: pip install 'distflow-cli[notify]'"


def test_broken_apprise_or_a_bug_does_not_delay_other_notifications(
    client: Client, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apprise.py").write_text("raise AttributeError('x')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apprise", raising=False)
    set_url(client, "mail", f"mailto://me:{SECRET}@example.com")
    record = stored(client, NotifyTarget(credential="mail"), NotifyTarget(url=receiver.url))
    broken = stored(client, NotifyTarget(url=receiver.url))
    client.store._db.execute("UPDATE documents SET notify = '[3]' WHERE workflow = ?", (broken.uuid,))
    send_notifications(client)
    error = "apprise is installed, but cannot be imported: AttributeError: x"
    assert outcomes(client, record)[0] == NotificationFailed(on="failed", target="mail", error=error)
    assert len(receiver.received) == 1
    (outcome,) = outcomes(client, broken)
    assert isinstance(outcome, NotificationFailed)
    assert (outcome.target, "cannot be read" in outcome.error) == ("target 1", True)
    bug = stored(client, NotifyTarget(url=receiver.url))
    monkeypatch.setattr("distflow.client.notifications.message.diagnose_groups", lambda *_: 1 // 0)
    send_notifications(client)
    (outcome,) = outcomes(client, bug)
    assert outcome == NotificationFailed(
        on="failed", target=NotifyTarget(url=receiver.url).label, error="a bug in distflow: ZeroDivisionError"
    )
    assert not client.store.has_notifications()


def test_a_full_disk_does_not_repeat_a_message_forever(
    client: Client, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(*_: object) -> None:
        raise StateError("the disk is full")

    record = stored(client, NotifyTarget(url=receiver.url))
    with monkeypatch.context() as full:
        full.setattr(client.store, "count_delivery", raise_error)
        with pytest.raises(StateError):
            send_notifications(client)
    assert receiver.received == []
    with monkeypatch.context() as full:
        full.setattr(client.store, "finish_notification", raise_error)
        for _ in range(7):
            with pytest.raises(StateError):
                send_notifications(client)
    assert len(receiver.received) == 5
    send_notifications(client)
    (outcome,) = outcomes(client, record)
    assert isinstance(outcome, NotificationFailed)
    assert outcome.error == "given up: its delivery was interrupted 5 times"
    assert len(receiver.received) == 5


def test_unreachable_servers_do_not_delay_others(client: Client) -> None:
    unreachable = [stored(client, NotifyTarget(url=f"http://127.0.0.1:9/{number}")) for number in range(9)]
    quick = stored(client, NotifyTarget(command=("true",)))
    send_notifications(client, pauses_s=(2.0,))
    (sent,) = client.store.events(quick.uuid)
    assert isinstance(sent.details, NotificationSent)
    assert all(sent.sequence < event.sequence for record in unreachable for event in client.store.events(record.uuid))


def test_server_gets_one_message_at_a_time(client: Client, receiver: Receiver) -> None:
    for _ in range(2):
        stored(client, NotifyTarget(url=receiver.url))
    receiver.answers.put(503)
    send_notifications(client, pauses_s=(0.1,))
    assert [one["name"] for one in receiver.received] == ["digits-1", "digits-1", "digits-2"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # apprise imports imghdr
def test_apprise_delivers(client: Client, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("apprise")
    set_url(client, "service", receiver.url.replace("http://", "json://"))
    record = stored(client, NotifyTarget(credential="service"))
    assert target_problems(client, [NotifyTarget(credential="service")]) == []
    send_notifications(client)
    set_url(client, "wrong", "slak://token")
    for is_quick in (True, False):
        (problem,) = target_problems(client, [NotifyTarget(credential="wrong")], is_quick=is_quick)
        assert problem.message.startswith(
            "apprise does not accept the URL of the credential `wrong`, which begins with `slak://`"
        )
    monkeypatch.delitem(sys.modules, "apprise")
    assert target_problems(client, [NotifyTarget(credential="service")], is_quick=True) == []
    assert "apprise" not in sys.modules, "the check before a submit has imported it"
    (body,) = receiver.received
    assert body["title"].startswith("digits-1 failed")
    assert "RuntimeError: shapes differ" in body["message"]
    assert outcomes(client, record) == [NotificationSent(on="failed", target="service")]


def test_profile_has_its_own_targets(client: Client, receiver: Receiver) -> None:
    set_url(client, "team", receiver.url, key="webhook")
    with pytest.raises(ProblemsFound, match=r"no credential `taem`\n.*did you mean `team`"):
        set_profile_notify(client, ["taem"])
    with pytest.raises(ProblemsFound, match="unknown key `onn`"):
        set_profile_notify(client, ["{credential: team, onn: [failed]}"])
    assert client.profile_notify() == ()
    set_profile_notify(client, ["team", "{command: [sh, -c, exit 1], name: mine, on: [waiting], after: 1h}"])
    team, mine = client.profile_notify()
    assert (team.credential, mine.label, mine.after_s) == ("team", "mine", 3600.0)
    assert [send_test_notification(client, one) for one in (team, mine)] == ["", "sh ended with exit code 1"]
    (body,) = receiver.received
    assert (body["test"], body["on"]) == (True, "completed")
    set_profile_notify(client, ())
    assert client.profile_notify() == ()


def test_a_relative_command_is_searched_in_the_home_directory(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("home", "elsewhere"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    target = NotifyTarget(command=("./report",), on=(Trigger.FAILED,))
    script = tmp_path / "elsewhere" / "report"
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o700)
    (problem,) = target_problems(client, [target])
    assert problem.message == "the command `./report` does not exist or is not executable"
    script.rename(tmp_path / "home" / "report")
    assert send_test_notification(client, target) == ""
    (tmp_path / "home" / "report").chmod(0o600)
    assert "make it executable" in send_test_notification(client, target)
