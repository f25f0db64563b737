#!/usr/bin/env bash
# Train a draft on one GPU in a given time. Python keeps a GPU of this size half idle while it
# generates for a small model, so several processes answer the prompts, and then one trains.
#
#   train_on_gpu.sh MODEL DIR [ANSWER_MINUTES TRAIN_MINUTES PROCESSES PROMPTS] [-- ARGUMENTS]
#
# DIR gets the draft's two files and logs; ARGUMENTS go to `kvtide draft train`. With the variable
# ANSWERS, a folder, answers are kept there, and a second run takes them from there. With --resume
# training goes on from the draft in DIR, with --resume FOLDER from another: use a lower
# --learning-rate then, and another number as SEED (0), which samples other answers.
set -euo pipefail
model=$1 out=$2
shift 2
plan=(2.8 5.4 4 16000)
for number in 0 1 2 3; do
  [ $# -gt 0 ] && [ "$1" != -- ] || break
  plan[number]=$1
  shift
done
[ "${1:-}" = -- ] && shift
read -r answer_minutes train_minutes processes prompts <<<"${plan[*]}"
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
answers=${ANSWERS:-$work/answers} seed=${SEED:-0}
mkdir -p "$out" "$answers"
"$python" "$here/compose.py" "$work" --prompts "$prompts"
kvtide() { "$python" -u -m kvtide.cli.main "$@"; }
if ! compgen -G "$answers/*.safetensors" >/dev/null; then
  for part in $(seq "$processes"); do
    kvtide draft answer "$model" --text "$work"/train/*.txt --out "$answers/$part.safetensors" \
      --part "$part/$processes" --minutes "$answer_minutes" --answers 3 --answer-tokens 256 \
      --temperature 0.7 --at-once 256 --seed "$seed" >"$work/$part.log" 2>&1 &
  done
  wait
  # A process that failed leaves a log and no answers; the others are enough.
  for part in $(seq "$processes"); do
    echo "answers $part/$processes"
    tail -n 6 "$work/$part.log"
  done | tee "$out/answers.log"
fi
kvtide draft train "$model" --text "$work"/train/*.txt --answered "$answers"/*.safetensors \
  --held-out "$work"/held_out/*.txt --out "$out" --minutes "$train_minutes" \
  --draft-vocab 8192 --lm-head fp8 --max-size 12MB --batch-tokens 32768 --learning-rate 1e-3 \
  --warm-up 100 --seed "$seed" "$@" 2>&1 | tee "$out/train.log"
