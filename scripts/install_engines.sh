#!/bin/sh
# The container tests run a real podman and a real dockerd with private stores, and the engine tests real clusters. All of them
# need root. If programs are missing and cannot be installed, pytest skips the tests that need them.
set -eu
. "$(dirname "$0")/apt.sh"

[ "$(id -u)" = 0 ] || exit 0

# has PROGRAM... reports whether all programs exist.
has() {
    for program in "$@"; do command -v "$program" >/dev/null 2>&1 || return 1; done
}

has podman dockerd runc || apt_install podman docker.io runc ||
    echo "podman, dockerd or runc is missing, so container tests will be skipped. Run: sudo apt-get install podman docker.io runc" >&2
# The Kubernetes tests start a cluster with a script that is not part of the project.
if [ -f "${DISTFLOW_TEST_KUBERNETES:-$(dirname "$0")/../../shared/kubernetes}/cluster.sh" ]; then
    has etcd containerd runc busybox openssl curl xz ip && [ -x /usr/lib/cni/bridge ] ||
        apt_install etcd-server containerd runc containernetworking-plugins busybox-static openssl curl xz-utils iproute2 ||
        echo "programs of Kubernetes are missing, so its tests will be skipped. Run: sudo apt-get install etcd-server containerd runc containernetworking-plugins busybox-static openssl curl xz-utils iproute2" >&2
fi
has slurmctld slurmd sbatch || apt_install slurm-wlm ||
    echo "Slurm is missing, so its tests will be skipped. Run: sudo apt-get install slurm-wlm" >&2
