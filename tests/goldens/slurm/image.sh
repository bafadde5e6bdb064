sbatch \
  --parsable \
  --no-requeue \
  --job-name=lm-3/train \
  --comment=distflow:7278eb/train/2 \
  --output=/dev/null \
  --chdir=/ \
  --nodes=2 \
  --ntasks-per-node=1 \
  --gres=gpu:8

#!/bin/sh
umask 077
log='/scratch/a b'/distflow-job-$SLURM_JOB_ID.log
if ! { mkdir -p "${log%/*}" && : >"$log"; } 2>/dev/null; then
  log=
fi
root='/scratch/a b'/
root=${root%/}
DISTFLOW_STEP_OPTIONS=$(printf '%s\n' '--container-image=nvcr.io#nvidia/pytorch:24.03-py3' --container-mounts="$root:$root"',/data:/data,/a'"'"'s:/b' --container-mount-home --no-container-remap-root)
export DISTFLOW_STEP_OPTIONS
(
exec srun resident 1
) >"${log:-/dev/null}" 2>&1
code=$?
if [ -n "$log" ] && { [ "$code" = 0 ] || [ ! -s "$log" ]; }; then
  rm -f "$log"
fi
exit "$code"
