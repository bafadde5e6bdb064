sbatch \
  --parsable \
  --no-requeue \
  --job-name=lm-3/train \
  --comment=distflow:7278eb/train/2 \
  --output=/dev/null \
  --chdir=/ \
  --nodes=1 \
  --ntasks-per-node=1 \
  --cpus-per-task=4 \
  --partition=cpu \
  --account=lab \
  : \
  --no-requeue \
  --job-name=lm-3/train \
  --comment=distflow:7278eb/train/2 \
  --output=/dev/null \
  --chdir=/ \
  --nodes=2 \
  --ntasks-per-node=1 \
  --mem=65536M \
  --gres=gpu:8 \
  --account=lab

#!/bin/sh
umask 077
log=~/.distflow/distflow-job-$SLURM_JOB_ID.log
if ! { mkdir -p "${log%/*}" && : >"$log"; } 2>/dev/null; then
  log=
fi
(
exec srun resident 2
) >"${log:-/dev/null}" 2>&1
code=$?
if [ -n "$log" ] && { [ "$code" = 0 ] || [ ! -s "$log" ]; }; then
  rm -f "$log"
fi
exit "$code"
