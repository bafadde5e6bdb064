"""Deliver one message to one target: a web server, Slack, a command of this machine, or a service of Apprise.

Errors name only the host of a web address, because the rest of a URL may be a secret.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import ssl
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from distflow import __version__
from distflow.client.client import Client
from distflow.client.notifications.message import Message, sample
from distflow.client.notifications.targets import INSTALL_APPRISE, is_loopback, target_problems, url_of
from distflow.documents.notify import NotifyTarget, Trigger
from distflow.documents.quantities import seconds_text
from distflow.errors import NotifyError
from distflow.protocol.ends import signal_name

__all__ = ["deliver", "send_test_notification"]

_COMMAND_S = 30.0
"""The maximum time that a command may run."""

_ANSWER_S = 10.0
_TRANSIENT = (408, 425, 429)
"""Status codes after which a retry may succeed, in addition to 500 and above."""
_SLACK_HOST = "hooks.slack.com"
_SLACK_LENGTH = 3000


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, because they could send the message to another host."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request, so that the redirect becomes an error."""


def deliver(target: NotifyTarget, message: Message, url: str) -> None:
    """Deliver a message.

    Args:
        target: The entry of ``notify`` to deliver it to.
        message: The message.
        url: The URL of the target, which may come from a credential. Empty for a command.

    Raises:
        NotifyError: if the delivery failed, or was not confirmed.

    """
    if target.command:
        _run(target.command, message)
    elif urllib.parse.urlsplit(url).scheme.lower() in ("http", "https"):
        _post(url, _body(target, message, url))
    else:
        _send_by_apprise(url, message)


def send_test_notification(client: Client, target: NotifyTarget, trigger: Trigger | None = None) -> str:
    """Send a test message to an entry, once and without retries.

    Args:
        client: The client whose credentials the entry may use.
        target: The entry.
        trigger: The event that the message pretends to report. Default: the first trigger of the entry.

    Returns:
        The reason why the message was not sent, such as an unreadable credential, or an empty text if it was sent.

    """
    if problems := target_problems(client, [target]):
        return ": ".join(filter(None, (problems[0].message, problems[0].hint)))
    try:
        deliver(target, sample(trigger or target.on[0]), url_of(client, target))
    except NotifyError as error:
        return error.message
    return ""


def _body(target: NotifyTarget, message: Message, url: str) -> dict[str, Any]:
    is_slack = target.format == "slack" or (target.format is None and urllib.parse.urlsplit(url).hostname == _SLACK_HOST)
    if not is_slack:
        return dict(message)
    text = message["text"]
    for character, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, escaped)
    return {"text": text[:_SLACK_LENGTH]}


def _post(url: str, body: dict[str, Any]) -> None:
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname
    headers = {"Content-Type": "application/json", "User-Agent": f"distflow/{__version__}"}
    if parts.username is not None:
        login = urllib.parse.unquote(f"{parts.username}:{parts.password or ''}")
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    # Loopback addresses need no proxy: it would receive the request, with the secret in its URL, unencrypted.
    proxies = urllib.request.ProxyHandler({} if is_loopback(host) else None)
    opener = urllib.request.build_opener(_NoRedirects, proxies)
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")  # noqa: S310  checked by `deliver`
        with opener.open(request, timeout=_ANSWER_S):
            pass  # the content of the answer is not read
    except urllib.error.HTTPError as error:
        code = error.code
        error.close()
        if 300 <= code < 400:
            raise NotifyError(f"{host} answered {code}: redirects are not followed; use the final URL") from None
        raise NotifyError(
            f"{host} answered {code} {http.client.responses.get(code, '')}".rstrip(),
            may_retry=code >= 500 or code in _TRANSIENT,
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _failure(host, error) from None


def _failure(host: str | None, error: Exception) -> NotifyError:
    """Return the error of a failed request. It omits the texts of most exceptions, because they may contain the URL."""
    reason = getattr(error, "reason", None)
    reason = reason if isinstance(reason, Exception) else error
    if isinstance(reason, ssl.SSLCertVerificationError):
        return NotifyError(f"the certificate of {host} is not valid: {reason.verify_message}")
    if isinstance(reason, TimeoutError):
        return NotifyError(f"{host} did not answer within {seconds_text(_ANSWER_S)}", may_retry=True)
    if isinstance(reason, OSError):
        return NotifyError(f"the request to {host} failed: {reason.strerror or type(reason).__name__}", may_retry=True)
    if isinstance(reason, http.client.InvalidURL | ValueError):
        return NotifyError(f"the URL for {host} is not valid: check its port, and encode characters that are not ASCII")
    return NotifyError(
        f"{host} did not answer with valid HTTP ({type(reason).__name__}): check the scheme and the port of the URL"
    )


def _run(command: tuple[str, ...], message: Message) -> None:
    values = {"ON": "on", "ID": "name", "STATUS": "status", "SUMMARY": "summary"}
    environment = {**os.environ, **{f"DISTFLOW_NOTIFY_{name}": str(message[key]) for name, key in values.items()}}
    program = os.path.expanduser(command[0])
    try:
        process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=Path.home(),
            start_new_session=True,
        )
    except OSError as error:
        raise NotifyError(f"{command[0]} cannot be started: {error.strerror}") from None
    try:
        process.communicate(json.dumps(message).encode(), timeout=_COMMAND_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise NotifyError(f"{command[0]} ran longer than {seconds_text(_COMMAND_S)} and was killed") from None
    if process.returncode < 0:
        raise NotifyError(f"{command[0]} was ended by {signal_name(-process.returncode)}")
    if process.returncode:
        raise NotifyError(f"{command[0]} ended with exit code {process.returncode}")


def _send_by_apprise(url: str, message: Message) -> None:
    try:
        import apprise
    except ImportError:
        raise NotifyError(f"apprise is not installed; install it: {INSTALL_APPRISE}") from None
    try:
        service = apprise.Apprise.instantiate(url, suppress_exceptions=True)
        is_sent = service is not None and service.notify(title=message["summary"], body=message["text"])
    except Exception as error:  # noqa: BLE001  plugins raise anything; do not show the text, which may contain the URL
        raise NotifyError(f"apprise failed ({type(error).__name__})") from None
    if service is None:
        raise NotifyError(
            "apprise does not accept this URL: its service is unknown, or a part of the URL is missing or invalid"
        )
    if not is_sent:
        raise NotifyError("apprise could not deliver the message", may_retry=True)
