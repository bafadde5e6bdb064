sbatch \
  --parsable \
  --no-requeue \
  --job-name=lm-3/train \
  --comment=distflow:7278eb/train/2 \
  --output=/dev/null \
  --chdir=/ \
  --nodes=1 \
  --ntasks-per-node=1

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
