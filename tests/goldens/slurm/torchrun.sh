#!/bin/bash
# Group `training` of the workflow `finetune` as a job of Slurm, written by `distflow workflow export`.
#
# Submit it:  sbatch finetune.sbatch
# Variables that it reads:
#   RUN_DIR  the directory of the run, on a file system that all nodes share. Default: finetune-<job id> in the
#            current directory. The task TASK runs in RUN_DIR/TASK/work, and its output is in RUN_DIR/TASK/output.
#
# Node 0 runs the task node-0, ranks 0-7 of 24.
# Node 1 runs the task node-1, ranks 8-15 of 24.
# Node 2 runs the task node-2, ranks 16-23 of 24.
#SBATCH --job-name=finetune
#SBATCH --output=%x-%j.log
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --mem=256G
#SBATCH --gres=gpu:h100:8
#SBATCH --time=1-12:00:00
#SBATCH --partition=large
#SBATCH --constraint=h100
#SBATCH --account=lab
#SBATCH --qos=normal
#SBATCH --exclude=gpu7
#SBATCH --exclusive
#SBATCH --mail-type=FAIL
#SBATCH --hint=nomultithread

[ -n "${SLURM_JOB_ID-}" ] || exec sbatch "$0" "$@"
set -u
umask 077
export run_dir=${1:-${RUN_DIR:-$SLURM_SUBMIT_DIR/finetune-$SLURM_JOB_ID}}
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
cat > "$run_dir/training.task.sh" <<'END_'
#!/bin/bash
umask 077
retry_id=${SLURM_RESTART_COUNT:-0}
case $SLURM_PROCID in
0) task=node-0 node_rank=0 rank_offset=0 ;;
1) task=node-1 node_rank=1 rank_offset=8 ;;
2) task=node-2 node_rank=2 rank_offset=16 ;;
esac
task_dir=$run_dir/$task
mkdir -p "$task_dir/work" "$task_dir/output" || exit
export NCCL_IB_HCA=mlx5
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
export PET_NPROC_PER_NODE=8
export PET_MASTER_ADDR="${master_addr}"
export PET_MASTER_PORT="${master_port}"
export DISTFLOW_RANK_OFFSET="${rank_offset}"
export DISTFLOW_RANK_SIZE=8
export DISTFLOW_WORLD_SIZE=24
export OMP_NUM_THREADS=4
export NCCL_DEBUG=WARN
export PATH=/sw/venv/bin:"$PATH"
module load cuda
ulimit -n 4096

mkdir -p "$task_dir"/work
cat > "$task_dir"/work/train.py <<'END'
import os
print(f"rank {os.environ['RANK']}")
END
if [ ! -L "$task_dir"/work/outputs ]; then
    mkdir -p "$task_dir"/work/outputs && cp -R "$task_dir"/work/outputs/. "$task_dir/output" && rm -r "$task_dir"/work/outputs
    ln -s "$task_dir/output" "$task_dir"/work/outputs
fi
cd "$task_dir/work" || exit
python3 -m torch.distributed.run --nnodes 3 --node-rank "${node_rank}" --nproc-per-node 8 --master-addr "${master_addr}" --master-port "${master_port}" train.py --lr 0.1 --name 'it'"'"'s' < /dev/null
END_

srun --kill-on-bad-exit=1 --label --cpus-per-task=32 bash "$run_dir/training.task.sh"
