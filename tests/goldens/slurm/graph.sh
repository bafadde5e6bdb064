#!/bin/sh
# The workflow `graph` as 2 jobs of Slurm, written by `distflow workflow export`.
#
# Submit it:  sh graph.sh
# Variables that it reads:
#   RUN_DIR  the directory of the run, on a file system that all nodes share. Default: graph-<date> in the
#            current directory. The task TASK runs in RUN_DIR/TASK/work, and its output is in RUN_DIR/TASK/output.
#
# A job starts when the jobs before it have succeeded:
# * serving
# * use after serving

set -eu
umask 077
run_dir=${RUN_DIR:-$PWD/graph-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$run_dir" && run_dir=$(cd "$run_dir" && pwd)
# If a job cannot be submitted, cancel the jobs before it.
jobs=
trap '[ $? = 0 ] || [ -z "$jobs" ] || scancel $jobs' EXIT

cat > "$run_dir/serving.sbatch" <<'END_'
#!/bin/bash
# Group `serving` of the workflow `graph` as a job of Slurm, written by `distflow workflow export`.
#
# Node 0 runs the task client.
# Node 1 runs the task server.
#SBATCH --job-name=graph-serving
#SBATCH --output=%x-%j.log
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=08:00:00
#SBATCH --partition=gpu
#SBATCH --constraint=h100
#SBATCH --account=lab
#SBATCH --qos=normal
#SBATCH --exclusive
#SBATCH --mail-type=FAIL
#SBATCH --hint=nomultithread

[ -n "${SLURM_JOB_ID-}" ] || exec sbatch "$0" "$@"
set -u
umask 077
export run_dir=${1:-${RUN_DIR:-$SLURM_SUBMIT_DIR/graph-$SLURM_JOB_ID}}
mkdir -p "$run_dir/files" && run_dir=$(cd "$run_dir" && pwd) || exit
export workflow_id=${run_dir##*/}

# The address of a node for the other nodes: its name, or the address in Slurm's configuration if the name has none.
address() {
    if getent hosts "$1" > /dev/null; then echo "$1"; else
        scontrol show node --oneliner "$1" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p'
    fi
}
# One node for each task.
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
export master_addr=$(address "${nodes[0]}")
export master_port=$((20000 + SLURM_JOB_ID % 10000))

# This script runs once on each node.
cat > "$run_dir/serving.task.sh" <<'END'
#!/bin/bash
umask 077
retry_id=${SLURM_RESTART_COUNT:-0}
case $SLURM_PROCID in
0) task=client ;;
1) task=server ;;
esac
task_dir=$run_dir/$task
mkdir -p "$task_dir/work" "$task_dir/output" || exit
export NCCL_IB_HCA=mlx5
export DISTFLOW_WORKFLOW_ID="${workflow_id}"
export DISTFLOW_GROUP=serving
export DISTFLOW_TASK="${task}"
export DISTFLOW_NODE="${SLURMD_NODENAME}"
export DISTFLOW_RETRY_ID="${retry_id}"
export DISTFLOW_OUTPUT="${task_dir}"/output
export PYTHONUNBUFFERED=1
export PATH=/sw/venv/bin:"$PATH"
module load cuda
ulimit -n 4096

case $task in
client)
cd "$task_dir/work" || exit
sh -c 'echo yes > '"${task_dir}"'/output/keep.txt; echo no > '"${task_dir}"'/output/drop.bin; exit 3' < /dev/null
    ;;
server)
cd "$task_dir/work" || exit
sleep 1000 < /dev/null
    ;;
esac
status=$?
[ $task != client ] || status=$(( status == 3 ? 0 : status == 0 ? 1 : status ))
case $task in
server) status=0 ;;  # only the lead decides
esac
[ $task != client ] || { echo $status > "$run_dir/$task.ended"; exit 1; }
exit $status
END

# The lead ends with an error in any case, so that srun stops the other tasks. Its own exit code is in the file.
rm -f "$run_dir/client.ended"
srun --kill-on-bad-exit=1 --label bash "$run_dir/serving.task.sh"
exit "$(cat "$run_dir/client.ended" || echo 1)"
END_
job_serving=$(sbatch --parsable "$run_dir/serving.sbatch" "$run_dir")
job_serving=${job_serving%%;*}
jobs="$jobs $job_serving"
echo "serving: job $job_serving"

cat > "$run_dir/use.sbatch" <<'END__'
#!/bin/bash
# Group `use` of the workflow `graph` as a job of Slurm, written by `distflow workflow export`.
#
# Node 0 runs the task reader.
# Node 1 runs the task helper.
#SBATCH --job-name=graph-use
#SBATCH --output=%x-%j.log
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=08:00:00
#SBATCH --partition=gpu
#SBATCH --constraint=h100
#SBATCH --account=lab
#SBATCH --qos=normal
#SBATCH --exclusive
#SBATCH --mail-type=FAIL
#SBATCH --hint=nomultithread

[ -n "${SLURM_JOB_ID-}" ] || exec sbatch "$0" "$@"
set -u
umask 077
export run_dir=${1:-${RUN_DIR:-$SLURM_SUBMIT_DIR/graph-$SLURM_JOB_ID}}
mkdir -p "$run_dir/files" && run_dir=$(cd "$run_dir" && pwd) || exit
export workflow_id=${run_dir##*/}

# The address of a node for the other nodes: its name, or the address in Slurm's configuration if the name has none.
address() {
    if getent hosts "$1" > /dev/null; then echo "$1"; else
        scontrol show node --oneliner "$1" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p'
    fi
}
# One node for each task.
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
export master_addr=$(address "${nodes[0]}")
export master_port=$((20000 + SLURM_JOB_ID % 10000))

# This script runs once on each node.
cat > "$run_dir/use.task.sh" <<'END_'
#!/bin/bash
umask 077
retry_id=${SLURM_RESTART_COUNT:-0}
case $SLURM_PROCID in
0) task=reader ;;
1) task=helper ;;
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
export NCCL_IB_HCA=mlx5
export DISTFLOW_WORKFLOW_ID="${workflow_id}"
export DISTFLOW_GROUP=use
export DISTFLOW_TASK="${task}"
export DISTFLOW_NODE="${SLURMD_NODENAME}"
export DISTFLOW_RETRY_ID="${retry_id}"
export DISTFLOW_OUTPUT="${task_dir}"/output
export PYTHONUNBUFFERED=1
export PATH=/sw/venv/bin:"$PATH"
module load cuda
ulimit -n 4096

case $task in
reader)
[ -d "$run_dir"/client/output ] || { echo "$run_dir"/client/output does not exist. Do all nodes share this directory? >&2; exit 1; }
mkdir -p "$task_dir"/input/0 && copy_matching '.*[.]txt' "$run_dir"/client/output "$task_dir"/input/0 || exit
cd "$task_dir/work" || exit
sh -c 'ls '"${task_dir}"'/input/0 > '"${task_dir}"'/output/seen; cat '"${task_dir}"'/input/0/keep.txt >> '"${task_dir}"/output/seen < /dev/null
    ;;
helper)
cd "$task_dir/work" || exit
false < /dev/null
    ;;
esac
status=$?
case $task in
helper) status=0 ;;  # only the lead decides
esac
[ $task != reader ] || { echo $status > "$run_dir/$task.ended"; exit 1; }
exit $status
END_

# The lead ends with an error in any case, so that srun stops the other tasks. Its own exit code is in the file.
rm -f "$run_dir/reader.ended"
srun --kill-on-bad-exit=1 --label bash "$run_dir/use.task.sh"
exit "$(cat "$run_dir/reader.ended" || echo 1)"
END__
job_use=$(sbatch --parsable --dependency=afterok:$job_serving --kill-on-invalid-dep=yes "$run_dir/use.sbatch" "$run_dir")
job_use=${job_use%%;*}
jobs="$jobs $job_use"
echo "use: job $job_use"

echo "Files: $run_dir"
