"""The page of ``distflow ui`` and the file of ``workflow report``, in a real Chromium."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distflow.testing.browser import missing_chromium, open_chromium
from distflow.testing.waiting import wait_until
from scenarios.conftest import Cli

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Page

pytestmark = pytest.mark.skipif(missing_chromium() is not None, reason=str(missing_chromium()))

AXE = Path(sys.prefix) / "axe-core" / "node_modules" / "axe-core" / "axe.min.js"

TRAINING = """
workflow:
  name: NAME
  labels: {team: vision}
  groups:
  - name: train
    tasks:
    - name: master
      lead: true
      ranks: {size: 1}
      command: [bash, -c]
      args:
      - |
        for step in 1 2 3 4 5 6 7 8; do for rank in 0; do
          echo "{\\"step\\": $step, \\"rank\\": 0, \\"loss\\": 0.$step, \\"step_s\\": 0.2}"; done; done
        printf '\\033[32mgreen\\033[0m text\\n'
        while [ ! -e GO ] || [ -s GO ]; do sleep 0.1; done  # if the worker fails, this task is stopped
        echo "a later line"; echo model > {{output}}/model.txt
    - name: worker
      ranks: {size: 1}
      command: [bash, -c]
      args:
      - |
        for step in 1 2 3 4 5 6 7 8; do echo "{\\"step\\": $step, \\"rank\\": 1, \\"loss\\": 0.$step, \\"step_s\\": 0.9}"; done
        while [ ! -e GO ]; do sleep 0.1; done
        if [ -s GO ]; then printf '[rank1]: RuntimeError: \\033[31mshapes\\033[0m differ\\n'; exit 3; fi
"""
SECTIONS = ("", "/logs", "/metrics", "/events", "/diagnosis", "/outputs", "/stacks", "/spec")


def visit(page: Page, url: str) -> None:
    """Open a URL, as if in a new tab.

    Chromium aborts all requests when a network interface appears or disappears, as in other tests, and shows its
    own page.
    """
    from playwright.sync_api import Error

    def is_open() -> bool:
        try:
            page.goto("about:blank")
            page.goto(url)
        except Error as error:
            if not re.search("ERR_NETWORK_CHANGED|chrome-error:", error.message):
                raise
            return False
        return True

    wait_until(is_open, 60, f"{url} is open")


def show_fragment(page: Page, fragment: str) -> None:
    """Show another fragment in the open page, as a click on a link does."""
    page.evaluate("fragment => { location.hash = fragment; }", fragment)
    page.wait_for_selector(f'html[data-ready="{fragment}"]', state="attached")


class Ui:
    """A server of ``distflow ui``, and a browser."""

    def __init__(self, url: str, page: Page) -> None:
        self.url = url
        self.origin, _, self.token = url.partition("/?token=")
        self.page = page
        self.errors: list[str] = []
        self.expects_missing = False  # whether the test requests a missing resource, which Chromium reports as an error
        page.on(
            "response", lambda answer: self.errors.append(f"{answer.status} {answer.url}") if answer.status >= 500 else None
        )
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._console)

    def _console(self, message: ConsoleMessage) -> None:
        is_expected = "ERR_NETWORK_CHANGED" in message.text or (self.expects_missing and "404" in message.text)
        if message.type == "error" and not is_expected:
            self.errors.append(message.text)

    def open(self, fragment: str = "") -> Page:
        """Show a page, as if it were opened in a new tab."""
        visit(self.page, f"{self.origin}/{fragment}")
        self.page.wait_for_selector("html[data-ready]", state="attached")
        return self.page

    def request(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, str]:
        """Send a request without the browser. If no headers are given, it has the token."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()} or {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(self.origin + path, method=method, headers=sent)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    """One page of a browser for all tests, because a start takes a second."""
    with open_chromium() as page:
        page.emulate_media(reduced_motion="reduce")  # an animation would draw the page 60 times a second
        yield page


@contextmanager
def serving(cli: Cli, browser: Page, *options: str) -> Iterator[Ui]:
    """Run ``distflow ui``, open its URL, and end it with Ctrl-C. No script may have failed."""
    reader, writer = os.pipe()
    with open(reader) as output, tempfile.TemporaryFile("w+") as errors:
        process = cli.fork("ui", *options, stdout=writer, stderr=errors.fileno())
        os.close(writer)
        try:
            ui = Ui(output.readline().strip(), browser)
            browser.context.clear_cookies()
            visit(browser, ui.url)
            browser.wait_for_selector("main h1")
            yield ui
        finally:
            visit(browser, "about:blank")
            process.send_signal(signal.SIGINT)
            code = process.wait(30)
        errors.seek(0)
        assert (code, errors.read(), ui.errors) == (0, "", [])


@pytest.fixture
def ui(cli: Cli, browser: Page) -> Iterator[Ui]:
    """A server whose page has no actions, and a browser."""
    with serving(cli, browser) as made:
        yield made


def start_training(cli: Cli, name: str = "gang") -> tuple[str, Path]:
    """Start a training of two tasks, and return its id and the file that ends it."""
    go = cli.folder / f"{name}.go"
    workflow = cli.submit(cli.spec(TRAINING.replace("GO", str(go)).replace("NAME", name), f"{name}.yaml"))
    cli.await_log(workflow, "green")
    return workflow, go


def fail_training(cli: Cli) -> str:
    """Start a training whose worker fails, wait for its end, and return its id."""
    workflow, go = start_training(cli, "failing")
    go.write_text("fail")
    cli.await_status(workflow, "FAILED")
    return workflow


def test_a_running_training_is_shown_live_on_a_page_without_actions_and_to_prometheus(cli: Cli, browser: Page) -> None:
    workflow, go = start_training(cli)
    cli.environment["DISTFLOW_UI_TOKEN"] = "t" * 32
    with serving(cli, browser, "--metrics") as ui:
        check_prometheus(ui, workflow)
        page = ui.open(f"#/workflows/{workflow}")
        page.wait_for_selector(".badge.live >> text=running")
        assert page.locator(".ranks li").all_inner_texts() == ["0", "1"]
        assert page.locator("main button").count() == 0
        bearer = {"Authorization": f"Bearer {ui.token}", "Origin": ui.origin}
        assert ui.request(f"/api/workflows/{workflow}/cancel", method="POST", **bearer)[0] == 404
        page.click("text=Logs")
        page.wait_for_selector(".row .fg2 >> text=green")
        page.click("text=Metrics")
        page.wait_for_selector(".chart canvas")
        names = page.locator(".chart h2").all_inner_texts()  # charts of resources may follow already
        assert [*takewhile(lambda name: name != "CPU cores in use", names)] == ["loss", "step_s"]
        assert "rank 1" in page.locator(".bars .slow").inner_text()  # 0.9 s a step, and the other one 0.2 s
        page.wait_for_selector("h2 >> text=CPU cores in use")
        page.click("text=Diagnosis")
        page.wait_for_selector(".found >> text=some ranks of the gang are slower than the others")
        page.click("text=Logs")
        page.wait_for_selector(".row >> text=green")
        go.touch()
        page.wait_for_selector(".row >> text=a later line")
        page.wait_for_selector(".title .badge >> text=completed")
        page.click("text=Outputs")
        with page.expect_download() as download:
            page.click("text=model.txt")
        assert download.value.path().read_text() == "model\n"
    cli.environment["DISTFLOW_UI_TOKEN"] = "short"
    assert cli.run("ui").code == 2


def check_prometheus(ui: Ui, workflow: str) -> None:
    """Check that ``/metrics`` describes an unfinished workflow, and needs the token of the environment."""
    assert ui.token == "t" * 32
    assert ui.request("/metrics", Accept="*/*")[0] == 403
    status, text = ui.request("/metrics")
    assert status == 200
    assert 'distflow_workflows{pool="local",status="RUNNING"} 1\n' in text
    assert f'distflow_task_running{{workflow="{workflow}",task_name="worker",node_name="local"}} 1\n' in text
    assert f'distflow_metric{{workflow="{workflow}",task_name="master",rank="0",name="step"}} 8\n' in text


def test_a_failure_is_shown_with_its_line_on_the_page_and_in_a_report_of_one_file(cli: Cli, ui: Ui) -> None:
    workflow = fail_training(cli)
    page = ui.open(f"#/workflows/{workflow}")
    cause = page.locator(".cause").inner_text()
    assert "worker" in cause
    assert "exit code 3" in cause
    assert "first cause" in str(page.locator(".track").nth(1).get_attribute("aria-label"))
    assert "stopping" in str(page.locator(".track").nth(0).get_attribute("aria-label"))
    assert page.locator(".ranks li.first").inner_text().startswith("1")
    page.click("text=Show in the log")
    page.wait_for_selector(".row.marked >> text=shapes differ")
    # The worker's ranks share one output, whose prefixes name them.
    page.select_option("[aria-label='Task or rank']", label="rank 1 (worker)")
    wait_until(lambda: page.locator(".row .text").all_inner_texts() == ["[rank1]: RuntimeError: shapes differ"], 20)
    done = cli.run("workflow", "report", workflow)
    assert re.fullmatch(rf"wrote {workflow}\.html \(\d+ KiB\)\n", done.out), done.out
    path = cli.folder / f"{workflow}.html"
    page = show_report(ui.page, path)
    assert "exit code 3" in page.locator(".cause").inner_text()
    page.click("text=Show in the log")
    page.wait_for_selector(".row.marked >> text=shapes differ")
    page = show_report(ui.page, path, f"#/workflows/{workflow}/metrics")
    assert page.locator(".chart h2").all_inner_texts() == ["loss", "step_s"]
    assert cli.run("workflow", "report", workflow, "-o", "/missing/x.html").code == 2


def test_workflows_are_filtered_and_their_charts_are_zoomed_and_compared(cli: Cli, ui: Ui) -> None:
    failing, (running, go) = fail_training(cli), start_training(cli, "other")
    page = ui.open()

    def listed() -> list[str]:
        return page.locator("tbody th").all_inner_texts()

    assert listed() == [running, failing]
    page.click("button >> text=Failed")
    wait_until(lambda: listed() == [failing], 10)
    page.click("button >> text=All")
    page.keyboard.press("/")
    page.keyboard.type("oth")
    wait_until(lambda: listed() == [running], 10)
    page.fill("input[type=search]", "team=audio")
    page.wait_for_selector("text=No workflow matches.")
    page.fill("input[type=search]", "team=vision")
    wait_until(lambda: len(listed()) == 2, 10)
    check_charts(ui, running, failing)
    page = ui.open()
    page.wait_for_selector(".badge.live >> text=running")
    go.touch()
    page.wait_for_selector(".badge >> text=completed")  # the list is live, too


def check_charts(ui: Ui, workflow: str, other: str) -> None:
    """Check that the charts of a workflow can be zoomed and compared with those of another one."""
    page = ui.open(f"#/workflows/{workflow}/metrics")
    card = page.locator(".chart").first
    card.locator("canvas").wait_for()

    def shown() -> tuple[float, float]:
        return float(str(card.get_attribute("data-min"))), float(str(card.get_attribute("data-max")))

    assert shown() == (1, 8)
    box = card.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 60, steps=5)
    page.mouse.up()
    wait_until(lambda: 2 < shown()[0] < shown()[1] < 7, 10)
    card.locator("[title='Show all']").press("Enter")
    assert shown() == (1, 8)
    card.locator("[title='Zoom in']").click()
    assert shown() == (2.75, 6.25)
    page.fill("[aria-label='Compare with a run']", other)
    page.keyboard.press("Enter")
    page.wait_for_selector(f".legend >> text={other}")
    assert page.url.endswith(f"?with={other}")
    ui.expects_missing = True  # the page requests both runs again at each change
    page.fill("[aria-label='Compare with a run']", "missing-1")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=there is no workflow `missing-1`")


def test_a_log_of_100_000_lines_can_be_searched_and_its_report_is_small(cli: Cli, ui: Ui) -> None:
    spec = "workflow: {name: long, tasks: [{name: one, command: [bash, -c, 'seq -f \"line %.0f of many\" 100000']}]}"
    workflow = cli.submit(cli.spec(spec))
    cli.await_status(workflow, "COMPLETED")
    page = ui.open(f"#/workflows/{workflow}/logs")
    page.wait_for_selector(".lines[data-total='100000']")
    page.wait_for_selector(".row >> text=line 100000 of many")
    page.fill("[aria-label='Search the log']", "line 50000 of")
    page.keyboard.press("Enter")
    page.wait_for_selector(".row.marked >> text=line 50000 of many")
    assert page.locator(".hits").inner_text() == "1 of 1"
    page.fill("[aria-label='Search the log']", "00 OF MANY")
    page.keyboard.press("Enter")
    wait_until(lambda: page.locator(".hits").inner_text() == "1 of 1,000", 20)
    page.click("[aria-label='Next match']")
    page.wait_for_selector(".row.marked >> text=line 200 of many")
    page.evaluate("document.querySelector('.lines').scrollTop = 19 * 70000")
    page.wait_for_selector(".row >> text=line 70010 of many")
    # Only the visible lines are elements, and only some pages are kept.
    assert page.locator(".row").count() < 100
    assert page.evaluate("performance.memory.usedJSHeapSize") < 100e6
    page.fill("[aria-label='Search the log']", "of many")
    page.keyboard.press("Enter")
    wait_until(lambda: page.locator(".hits").inner_text() == "1 of 10,000+", 20)
    page.click("[aria-label='Next match']")
    assert page.locator(".hits").inner_text() == "2 of 10,000+"
    page = ui.open(f"#/workflows/{workflow}/metrics")
    page.wait_for_selector("text=There are no metrics yet.")
    ui.expects_missing = True
    page.fill("[aria-label='Compare with a run']", "missing-1")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=there is no workflow `missing-1`")
    assert cli.run("workflow", "report", workflow, "-o", "long.html").code == 0
    assert (cli.folder / "long.html").stat().st_size < 3e6
    page = show_report(ui.page, cli.folder / "long.html", f"#/workflows/{workflow}/logs")
    page.wait_for_selector(".row >> text=line 100000 of many")
    assert "lines in the middle are left out" in page.locator(".note").inner_text()


def test_a_list_of_many_workflows_is_drawn_in_parts(cli: Cli, ui: Ui) -> None:
    workflow = cli.submit(cli.spec('workflow: {name: gang, tasks: [{name: one, command: "true"}]}'))
    cli.await_status(workflow, "COMPLETED")
    copy_workflow(cli.state / "distflow.sqlite3", 603)  # the server returns at most 500 at once
    page = ui.open()
    for shown in (100, 200, 400):
        wait_until(lambda shown=shown: page.locator("tbody tr").count() == shown, 20)  # type: ignore[misc]
        page.click("text=Show more")
    page.wait_for_selector("text=603 workflows")
    assert page.locator("tbody th").last.inner_text() == workflow
    assert page.locator("text=Show more").count() == 0
    page.fill("input[type=search]", "gang-417")
    wait_until(lambda: page.locator("tbody th").all_inner_texts() == ["gang-417"], 10)


def copy_workflow(store: Path, count: int) -> None:
    """Store copies of the only workflow under other names."""
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(store)) as database, database:
        names = [row[1] for row in database.execute("PRAGMA table_info(workflows)")]
        row = dict(zip(names, database.execute("SELECT * FROM workflows").fetchone(), strict=True))
        for number in range(2, count + 1):
            new = row | {"uuid": f"{number:032x}", "id": f"gang-{number}", "number": number}
            marks = ",".join("?" * len(names))
            database.execute(f"INSERT INTO workflows ({','.join(names)}) VALUES ({marks})", list(new.values()))


def test_a_page_with_actions_cancels_and_restarts_and_requests_of_others_are_refused(cli: Cli, browser: Page) -> None:
    workflow, go = start_training(cli)
    with serving(cli, browser, "--actions") as ui:
        check_refused_requests(ui, workflow)
        assert cli.query(workflow)["cancelled_by"] is None
        page = ui.open(f"#/workflows/{workflow}")
        page.click("main button >> text=Cancel")
        page.click("dialog >> text=Back")
        page.click("main button >> text=Cancel")
        page.click("dialog >> text=Cancel the workflow")
        page.wait_for_selector(".title .badge >> text=canceled")
        assert cli.query(workflow)["status"] == "FAILED_CANCELED"
        go.touch()
        page.click("main button >> text=Restart")
        page.wait_for_selector("h1 >> text=gang-2")
        cli.await_status("gang-2", "COMPLETED")


def check_refused_requests(ui: Ui, workflow: str) -> None:
    """Check that requests without the token or from other sites are refused."""
    good = {"Authorization": f"Bearer {ui.token}"}
    port = ui.origin.rpartition(":")[2]
    for path in ("/", "/static/main.js", "/api/about", "/api/workflows", "/?token=wrong", "/?token="):
        assert ui.request(path, Accept="*/*")[0] == 403, path
    assert ui.request("/api/about", **good)[0] == 200
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", ""):
        assert ui.request("/api/about", Host=host, **good)[0] == 403, host
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", f"https://127.0.0.1:{port}"):
        assert ui.request("/api/about", Origin=origin, **good)[0] == 403, origin
        assert ui.request(f"/api/workflows/{workflow}/cancel", method="POST", Origin=origin, **good)[0] == 403, origin
    code, text = ui.request(f"/api/workflows/{workflow}/cancel", method="POST", **good)
    assert (code, text) == (403, f"403: the request has no Origin header: add `Origin: {ui.origin}`\n")
    for site in ("cross-site", "same-site"):
        assert ui.request("/api/about", Sec_Fetch_Site=site, **good)[0] == 403
    assert ui.request("/static/../server.py", **good)[0] == 404
    assert ui.request("/static/..%2fserver.py", **good)[0] == 404
    # A page of another site, in the browser that has the cookie.
    page = ui.page.context.new_page()
    page.route("http://evil.example/", lambda route: route.fulfill(body="<h1>evil</h1>", content_type="text/html"))
    page.goto("http://evil.example/")
    send = "path => fetch(path, {method: 'POST', credentials: 'include'}).then(() => 'sent', () => 'refused')"
    assert page.evaluate(send, f"{ui.origin}/api/workflows/{workflow}/cancel") == "refused"
    page.close()


EVIL = (
    "<img src=x onerror=hacked()>",
    "<script>hacked()</script>",
    "\"><svg onload='hacked()'>",
    "javascript:hacked()",
    "{{7*7}}",
)


def test_names_and_output_are_shown_as_text(cli: Cli, ui: Ui, browser: Page) -> None:
    lines = [json.dumps({"step": step, one: step, "rank": 0}) for one in EVIL for step in (1, 2)] + list(EVIL)
    (cli.folder / "lines.txt").write_text(
        "\n".join([*lines, "</script><script>hacked()</script>", "RuntimeError: <b>bold</b>"])
    )
    spec = """
workflow:
  name: evil
  tasks:
  - name: one
    command: [bash, -c]
    args: ['cat /lines.txt; touch "{{output}}/<img src=x onerror=hacked()>"; exit 3']
    files: [{path: /lines.txt, localpath: lines.txt}]
"""
    spec = spec.replace("cat /lines.txt", "cat $(dirname {{output}})/files/lines.txt")
    workflow = cli.submit(cli.spec(spec))
    cli.await_status(workflow, "FAILED")
    report = cli.folder / "evil.html"
    assert cli.run("workflow", "report", workflow, "-o", str(report)).code == 0
    check_evil_sections(ui.open(), workflow)
    with without_other_requests(browser, report):
        check_evil_sections(show_report(browser, report), workflow)


def check_evil_sections(page: Page, workflow: str) -> None:
    """Check that each section of the open page shows ``EVIL`` as text."""
    for section in SECTIONS:
        show_fragment(page, f"#/workflows/{workflow}{section}")
        page.wait_for_timeout(200)
        assert page.locator(".body").inner_text().strip(), section
        assert page.evaluate("typeof hacked") == "undefined"
        assert page.locator("main img, main script, main b[onclick], main svg[onload]").count() == 0, section
        if section == "/logs":
            page.wait_for_selector(".row")
            assert all(one in page.locator(".lines").inner_text() for one in EVIL)
        if section == "/metrics":
            page.wait_for_selector(".chart")
            assert page.locator(".chart h2").all_inner_texts() == list(EVIL)


def show_report(page: Page, path: Path, fragment: str = "") -> Page:
    """Open a report from the disk."""
    with without_other_requests(page, path):
        visit(page, path.as_uri() + fragment)
        page.wait_for_selector("html[data-ready]", state="attached")
    return page


@contextmanager
def without_other_requests(page: Page, report: Path) -> Iterator[None]:
    """Check that the page of a report requests only the report."""
    urls: list[str] = []

    def record_url(request: Any) -> None:
        urls.append(request.url)

    page.on("request", record_url)
    yield
    page.remove_listener("request", record_url)
    assert [url for url in urls if not url.startswith((report.as_uri(), "data:", "about:"))] == []


def test_submit_writes_a_report_also_if_it_is_refused(cli: Cli, browser: Page) -> None:
    wrong = cli.spec("workflow:\n  name: wrong\n  tasks:\n  - {name: one, comand: [true]}\n")
    assert cli.run("workflow", "submit", wrong, "--wait", "--report", "refused.html").code == 2
    page = show_report(browser, cli.folder / "refused.html")
    assert "comand" in page.locator("main").inner_text()
    fails = cli.spec("workflow: {name: fails, tasks: [{name: one, command: [bash, -c, 'echo oh no; exit 7']}]}")
    assert cli.run("workflow", "submit", fails, "--wait", "--report", "fails.html").code == 1
    assert "exit code 7" in show_report(browser, cli.folder / "fails.html").locator(".cause").inner_text()
    assert cli.run("workflow", "submit", fails, "--report", "fails.html").code == 2


def test_pools_show_who_holds_each_gpu(cli: Cli, browser: Page) -> None:
    smi = cli.folder / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(
        f'#!/bin/sh\ncase "$1" in *apps*) echo "GPU-c, {os.getpid()}, /usr/bin/<b>evil, 512";; '
        '-L) printf "GPU 0: A\\nGPU 1: A\\nGPU 2: A\\nGPU 3: A\\nGPU 4: A\\n";; '
        '*) printf "0, GPU-a, 00000000:17:00.0\\n2, GPU-c, 00000000:3B:00.0\\n";; esac\n'
    )
    smi.chmod(0o755)
    cli.environment["PATH"] = f"{smi.parent}:{cli.environment['PATH']}"
    cli.configure(gpus=5)
    go = cli.folder / "go"
    spec = f"while [ ! -e {go} ]; do sleep 0.1; done"
    text = (
        f"workflow: {{name: holds, resources: {{default: {{gpu: 2}}}}, tasks: [{{name: one, command: [bash, -c, '{spec}']}}]}}"
    )
    with lease_of_another_user(cli.leases, gpus=(0, 9_999_999_999)), serving(cli, browser) as ui:
        workflow = cli.submit(cli.spec(text))
        cli.await_running(workflow)
        page = ui.open("#/pools")
        page.wait_for_selector(".gpu.mine")
        wait_until(lambda: page.locator("main").inner_text().count("asking") == 0, 20)

        def shown(state: str) -> list[str]:
            return [str(one.get_attribute("title")) for one in page.locator(f"li.gpu.{state}").all()]

        assert shown("mine") == [f"GPU {gpu}: yours ({workflow}/one)" for gpu in (1, 3)]
        assert shown("free") == ["GPU 4: free"]
        assert shown("other") == ["GPU 0: another user (grace: bert-7/worker)"]
        (foreign,) = shown("foreign")
        assert re.match(rf"GPU 2: another program \(pid {os.getpid()} \(\w+, <b>evil, 512 MiB\)", foreign), foreign
        (node,) = json.loads(cli.run("top", "-t", "json").out)["nodes"]
        assert [gpu["state"] for gpu in node["gpus"]] == ["other", "mine", "foreign", "mine", "free"]
        assert (node["gpus"][0]["used_by"], node["gpus"][1]["used_by"]) == ("grace: bert-7/worker", f"{workflow}/one")
        listed = cli.run("top").out
        assert "4 of 5 GPUs in use, 1 by other users, 1 by other programs" in listed
        page.click(f"a >> text={workflow}/one")
        page.wait_for_selector(f"h1 >> text={workflow}")
        go.touch()
        cli.await_status(workflow, "COMPLETED")
        config = cli.folder / "distflow.yaml"
        config.write_text(config.read_text().replace("name: local, root", "name: local, python: /missing, root"))
        page = ui.open("#/pools")
        page.wait_for_selector(".machines .error")
        assert shown("unknown") == [f"GPU {gpu}: unknown" for gpu in range(5)]


@contextmanager
def lease_of_another_user(leases: Path, *, gpus: tuple[int, ...]) -> Iterator[None]:
    """Hold GPUs with leases of another user. If the tests run as root, the process has another user, too."""
    leases.mkdir(mode=0o1777)
    leases.chmod(0o1777)
    directory = os.open(leases, os.O_RDONLY)
    held = {"user": "grace", "attempt": f"{'7e' * 16}/train/worker/0", "label": "bert-7/worker", "pid": 4711}
    code = f"""
import fcntl, os, sys
for gpu in {gpus}:
    fd = os.open(f"gpu-{{gpu}}.lock", os.O_RDWR | os.O_CREAT, 0o644, dir_fd={directory})
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.write(fd, {json.dumps(held).encode()!r})
print("locked", flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen(
        ["/usr/bin/python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[directory], cwd="/",
        user=65534 if os.getuid() == 0 else None,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        yield
    finally:
        holder.communicate()
        os.close(directory)


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: sh scripts/install_browser.sh .venv")
def test_pages_meet_the_rules_of_accessibility(cli: Cli, ui: Ui) -> None:
    workflow = fail_training(cli)
    # The dark scheme has other colors, and everything else in common with the light one.
    schemes: dict[Any, dict[str, Any]] = {
        "dark": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]},
        "light": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]},
    }
    found: list[str] = []
    # Without `resultTypes`, axe describes every element that fulfills a rule.
    run = "rules => axe.run({runOnly: rules, resultTypes: ['violations']})"
    page = ui.open()
    page.evaluate(AXE.read_text(encoding="utf-8"))  # not add_script_tag, which the page's policy forbids
    for fragment in ("#/", "#/pools", *(f"#/workflows/{workflow}{section}" for section in SECTIONS)):
        show_fragment(page, fragment)
        page.wait_for_timeout(300)
        for scheme, rules in schemes.items():
            page.emulate_media(color_scheme=scheme)
            result = page.evaluate(run, rules)
            found += [
                f"{fragment} ({scheme}): {one['id']}: {node['target']} {node.get('failureSummary')}"
                for one in result["violations"]
                for node in one["nodes"]
            ]
            assert result["passes"]
    assert found == []


def test_a_missing_ui_extra_is_reported(cli: Cli) -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from distflow.cli.app import run; sys.exit(run(['ui']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=cli.environment, check=False)
    assert done.returncode == 2
    assert "pip install 'distflow-cli[ui]'" in done.stderr


def test_a_port_in_use_is_refused(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = cli.run("ui", "--port", str(server.getsockname()[1]))
    assert done.code == 2
    assert "cannot be used" in done.err
