"""Images of tasks on a real Slurm, with a stand-in for Pyxis: an ``srun`` that accepts its options.

The stand-in shows another ``/etc/os-release`` to the commands of a step with an image, and starts no container.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scenarios.cluster import SHORT, Cluster

STAND_IN = """#!/bin/sh
image= count=$#
for word; do
  case $word in
    --container-image=*) image=${{word#*=}} ;;
    --container-mounts=*) echo "$word" >>{log} ;;
    --container-mount-home|--no-container-remap-root) ;;
    *) set -- "$@" "$word" ;;
  esac
done
shift "$count"
[ -n "$image" ] || exec {srun} "$@"
options=
for word; do
  case $word in -*) options="$options $word"; shift ;; *) break ;; esac
done
echo "$image" >{log}.image
exec {srun} $options unshare --mount sh -c 'mount --bind {log}.image /etc/os-release && exec "$@"' sh "$@"
"""
SPEC = """
workflow:
  name: inside
  groups:
  - name: g
    tasks:
    - &task
      name: master
      lead: true
      image: nvcr.io/nvidia/pytorch:24.03-py3
      volumeMounts: ["/no/such/directory:/data"]
      ranks: {size: 1}
      command: [sh, /tmp/show.sh]
      files: [{path: /tmp/show.sh, contents: "cat /etc/os-release; sleep 600"}]
    - <<: *task
      name: worker
      lead: false
"""


@pytest.fixture
def pyxis(cluster: Cluster) -> Path:
    """Put the stand-in into PATH. Return the file to which it writes its option ``--container-mounts``."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounts need root")
    folder = cluster.cli.folder / "pyxis"
    folder.mkdir()
    (folder / "srun").write_text(STAND_IN.format(log=folder / "mounts", srun=cluster.slurm.commands / "srun"))
    (folder / "srun").chmod(0o755)
    cluster.cli.environment["PATH"] = f"{folder}:{cluster.cli.environment['PATH']}"
    cluster.configure(slurm={"container": "pyxis"})
    return folder / "mounts"


def test_all_tasks_of_a_gang_run_in_its_image(cluster: Cluster, pyxis: Path) -> None:
    cli = cluster.cli
    workflow = cli.submit(cli.spec(SPEC))
    for task in ("master", "worker"):
        assert f"[{task}] nvcr.io#nvidia/pytorch:24.03-py3\n" in cli.await_log(workflow, f"[{task}] nvcr")
    assert cli.run("workflow", "exec", workflow, "worker", "--entry", "cat /etc/os-release").out.startswith("nvcr.io#nvidia")
    assert pyxis.read_text() == f"--container-mounts={cli.top}:{cli.top},/no/such/directory:/data\n"
    assert "nvcr" not in Path("/etc/os-release").read_text()
    assert cli.run("workflow", "cancel", workflow, "--wait", "60").code == 0
    cluster.await_no_jobs()
    # A gang without images runs on the nodes themselves, and one with several images is refused.
    plain = cli.run("workflow", "submit", cli.spec(SHORT.replace('["true"]', "[cat, /etc/os-release]")), "--wait")
    assert plain.code == 0, plain.err
    assert Path("/etc/os-release").read_text().splitlines()[0] in plain.out
    mixed = cli.run("workflow", "submit", cli.spec(SPEC + "      image: ubuntu\n"), "--wait")
    assert mixed.code != 0
    assert "the tasks of group `g` have different images" in mixed.err + mixed.out


def test_pool_check_reports_a_cluster_without_pyxis(cluster: Cluster) -> None:
    cluster.configure(slurm={"container": "pyxis"})
    found = cluster.cli.run("pool", "check")
    assert found.code != 0
    assert "`srun` has no option `--container-image`" in found.out + found.err
