#!/bin/bash
# Group `training` of the workflow `shapes` as a job of Slurm, written by `distflow workflow export`.
#
# Submit it:  sbatch shapes.sbatch
# Variables that it reads:
#   RUN_DIR  the directory of the run, on a file system that all nodes share. Default: shapes-<job id> in the
#            current directory. The task TASK runs in RUN_DIR/TASK/work, and its output is in RUN_DIR/TASK/output.
#   TOKEN  `token` of the credential `hub` (required)
#   CREDENTIAL_deploy  a directory with a file for each key of the credential `deploy` (required)
#   INPUT_s3_bucket_mnist  a directory with the data of s3://bucket/mnist (required)
#
# Differences from a run by distflow:
# * `notify` is left out (Slurm's own option is `#SBATCH --mail-type=END,FAIL`)
# * `labels` are left out
# * `max_log` is left out: the size of the log is not limited
# * training: `queue_timeout` is left out: the job waits in Slurm's queue without a limit
# * training: `hang_timeout` is left out: a group without output is not reported
# * training: `stop_on_missing_ranks` is left out: if a rank fails but its task ends with code 0, the other tasks keep
#   waiting for that rank
# * training: `elastic` is left out: the job waits until there is room for all tasks
# * master: `checkpoint` is left out: the directory stays in the directory of the run and is not uploaded
# * master: inputs from URLs and datasets are not downloaded (download them, and set the variables `INPUT_…` of the
#   script to their directories)
# * master: the output is not uploaded to the URLs and datasets of `outputs` (it is in RUN_DIR/TASK/output)
# * master: RESCHEDULE of `exitActions` is left out: a failed job is not retried (submit the script again)
# * master: secrets are not in the script (set their variables before you submit the script)
# * master, worker-0, worker-1: `image` is left out: the tasks run without a container (if the cluster has Pyxis, use
#   a pool with `slurm: {container: pyxis}`)
# * master: `storage` is not requested (Slurm's own option is `#SBATCH --tmp=100G`, if the nodes are configured for
#   it)
# * master: `topology` is not requested (Slurm's own option is `#SBATCH --switches=1`)
# * worker-0, worker-1: the platform `unknown` is not requested (add `#SBATCH --partition` or `--constraint`, or use a
#   pool whose `platforms` has the platform)
#
# Node 0 runs the task master, rank 0 of 9.
# Node 1 runs the task worker-0, ranks 1-4 of 9.
# Node 2 runs the task worker-1, ranks 5-8 of 9.
#SBATCH --job-name=shapes
#SBATCH --output=%x-%j.log
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH hetjob
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --gres=gpu:4

[ -n "${SLURM_JOB_ID-}" ] || exec sbatch "$0" "$@"
set -u
umask 077
export run_dir=${1:-${RUN_DIR:-$SLURM_SUBMIT_DIR/shapes-$SLURM_JOB_ID}}
mkdir -p "$run_dir/files" && run_dir=$(cd "$run_dir" && pwd) || exit
export workflow_id=${run_dir##*/}
: "${TOKEN:?must be set: token of the credential hub}"
: "${CREDENTIAL_deploy:?must be set: a directory with a file for each key of the credential deploy}"
: "${INPUT_s3_bucket_mnist:?must be set: a directory with the data of s3://bucket/mnist}"

# The address of a node for the other nodes: its name, or the address in Slurm's configuration if the name has none.
address() {
    if getent hosts "$1" > /dev/null; then echo "$1"; else
        scontrol show node --oneliner "$1" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p'
    fi
}
# One node for each task.
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0") $(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1"))
export master_addr=$(address "${nodes[0]}")
export address_master=$(address "${nodes[0]}")
export master_port=$((20000 + SLURM_JOB_ID % 10000))

# This script runs once on each node.
cat > "$run_dir/training.task.sh" <<'END__'
#!/bin/bash
umask 077
retry_id=${SLURM_RESTART_COUNT:-0}
case $SLURM_PROCID in
0) task=master node_rank=0 rank_offset=0 ;;
1) task=worker-0 node_rank=1 rank_offset=1 ;;
2) task=worker-1 node_rank=2 rank_offset=5 ;;
esac
task_dir=$run_dir/$task
mkdir -p "$task_dir/work" "$task_dir/output" || exit

# Copy the files whose relative path matches REGEX, anchored at its start: copy_matching REGEX FROM TO
copy_matching() {
    python3 - "$@" <<'END'
import os, re, shutil, sys
pattern, source, target = sys.argv[1:]
for folder, _, names in os.walk(source):
    for name in names:
        path = os.path.relpath(os.path.join(folder, name), source)
        if re.match(pattern, path):
            os.makedirs(os.path.dirname(os.path.join(target, path)), exist_ok=True)
            shutil.copy2(os.path.join(source, path), os.path.join(target, path))
END
}
export DISTFLOW_WORKFLOW_ID="${workflow_id}"
export DISTFLOW_GROUP=training
export DISTFLOW_TASK="${task}"
export DISTFLOW_NODE="${SLURMD_NODENAME}"
export DISTFLOW_RETRY_ID="${retry_id}"
export DISTFLOW_OUTPUT="${task_dir}"/output
export PYTHONUNBUFFERED=1
export MASTER_ADDR="${master_addr}"
export MASTER_PORT="${master_port}"
export NODE_RANK="${node_rank}"
export NNODES=3
export PET_NNODES=3
export PET_NODE_RANK="${node_rank}"
export PET_MASTER_ADDR="${master_addr}"
export PET_MASTER_PORT="${master_port}"
export DISTFLOW_RANK_OFFSET="${rank_offset}"
export DISTFLOW_WORLD_SIZE=9

case $task in
master)
mkdir -p "$task_dir"/work
[ -d "$INPUT_s3_bucket_mnist" ] || { echo "$INPUT_s3_bucket_mnist" does not exist. Do all nodes share this directory? >&2; exit 1; }
mkdir -p "$task_dir"/input/0 && copy_matching '.*[.]gz' "$INPUT_s3_bucket_mnist" "$task_dir"/input/0 || exit
mkdir -p "$task_dir"/files/run/secrets/deploy && cp -R "$CREDENTIAL_deploy"/. "$task_dir"/files/run/secrets/deploy || exit
export DISTFLOW_CHECKPOINT="${task_dir}"/work/models
export CUDA_VISIBLE_DEVICES=''
export PET_NPROC_PER_NODE=1
export DISTFLOW_RANK_SIZE=1
export RANK="${rank_offset}"
export LOCAL_RANK=0
export LOCAL_WORLD_SIZE=1
export WORLD_SIZE=9
export OMP_NUM_THREADS=2
cd "$task_dir/work" || exit
sh -c 'echo "$DISTFLOW_TASK: rank $RANK, GPUs $CUDA_VISIBLE_DEVICES, token $TOKEN"' < /dev/null
    ;;
worker-0 | worker-1)
mkdir -p "$task_dir"/files/tmp
cat > "$task_dir"/files/tmp/entry.sh <<END_
#!/bin/bash
# END
echo "costs \\\$5 \`date\` at ${master_addr}:${master_port} in \$(pwd)" '\\' > ${task_dir}/output/log
echo "END"
END
END_
chmod 700 "$task_dir"/files/tmp/entry.sh
export PET_NPROC_PER_NODE=4
export DISTFLOW_RANK_SIZE=4
export OMP_NUM_THREADS=1
cd "$task_dir/work" || exit
bash "${task_dir}"/files/tmp/entry.sh "${address_master}" < /dev/null
    ;;
esac
END__

srun --kill-on-bad-exit=1 --label --het-group=0 --cpus-per-task=2 bash "$run_dir/training.task.sh" : --het-group=1 --cpus-per-task=1 bash "$run_dir/training.task.sh"

# stderr: shapes.yaml:24: warning: this machine has no credential `hub`
# stderr:     set it: `distflow credential set hub --payload-file KEY=FILE`
# stderr: shapes.yaml:25: warning: this machine has no credential `deploy`
# stderr:     set it: `distflow credential set deploy --payload-file KEY=FILE`
# stderr: shapes.yaml:33: warning: only master has a `checkpoint` of `models`, so after a restart worker-0 and worker-1 begin without these files
# stderr:     write `shared: models` in the group, so that all tasks have the same files, because ranks must resume at the same step
# stderr: shapes.yaml: warning: `notify` is left out
# stderr:     Slurm's own option is `#SBATCH --mail-type=END,FAIL`
# stderr: shapes.yaml: warning: `labels` are left out
# stderr: shapes.yaml: warning: `max_log` is left out: the size of the log is not limited
# stderr: shapes.yaml: warning: training: `queue_timeout` is left out: the job waits in Slurm's queue without a limit
# stderr: shapes.yaml: warning: training: `hang_timeout` is left out: a group without output is not reported
# stderr: shapes.yaml: warning: training: `stop_on_missing_ranks` is left out: if a rank fails but its task ends with code 0, the other tasks keep waiting for that rank
# stderr: shapes.yaml: warning: training: `elastic` is left out: the job waits until there is room for all tasks
# stderr: shapes.yaml: warning: master: `checkpoint` is left out: the directory stays in the directory of the run and is not uploaded
# stderr: shapes.yaml: warning: master: inputs from URLs and datasets are not downloaded
# stderr:     download them, and set the variables `INPUT_…` of the script to their directories
# stderr: shapes.yaml: warning: master: the output is not uploaded to the URLs and datasets of `outputs`
# stderr:     it is in RUN_DIR/TASK/output
# stderr: shapes.yaml: warning: master: RESCHEDULE of `exitActions` is left out: a failed job is not retried
# stderr:     submit the script again
# stderr: shapes.yaml: warning: master: secrets are not in the script
# stderr:     set their variables before you submit the script
# stderr: shapes.yaml: warning: master, worker-0, worker-1: `image` is left out: the tasks run without a container
# stderr:     if the cluster has Pyxis, use a pool with `slurm: {container: pyxis}`
# stderr: shapes.yaml: warning: master: `storage` is not requested
# stderr:     Slurm's own option is `#SBATCH --tmp=100G`, if the nodes are configured for it
# stderr: shapes.yaml: warning: master: `topology` is not requested
# stderr:     Slurm's own option is `#SBATCH --switches=1`
# stderr: shapes.yaml: warning: worker-0, worker-1: the platform `unknown` is not requested
# stderr:     add `#SBATCH --partition` or `--constraint`, or use a pool whose `platforms` has the platform