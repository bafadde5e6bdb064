sbatch \
  --parsable \
  --no-requeue \
  --job-name=lm-3/train \
  --comment=distflow:7278eb/train/2 \
  --output=/dev/null \
  --chdir=/ \
  --nodes=4 \
  --ntasks-per-node=1 \
  --cpus-per-task=96 \
  --mem=512001M \
  --gres=gpu:h100:8 \
  --time=480 \
  --partition=gpu \
  --account=lab \
  --qos=high '--constraint=h100&ib' \
  --reservation=week \
  --exclude=n7,n3,n9 \
  --exclusive \
  --licenses=matlab '--mail-user=a b'

#!/bin/sh
umask 077
log=~/.distflow/distflow-job-$SLURM_JOB_ID.log
if ! { mkdir -p "${log%/*}" && : >"$log"; } 2>/dev/null; then
  log=
fi
(
exec srun resident 1
) >"${log:-/dev/null}" 2>&1
code=$?
if [ -n "$log" ] && { [ "$code" = 0 ] || [ ! -s "$log" ]; }; then
  rm -f "$log"
fi
exit "$code"
