#!/usr/bin/env bash
# Character-level tiny-shakespeare with 0.79 M parameters on a CPU, in the time that nanoGPT's published CPU recipe takes (79 s to a
# validation loss of 1.886 with 0.80 M) or in a third of it. What was tried is in LOG.md.
#
#   recipes/char-shakespeare.sh tinyshakespeare.txt          loss 1.60 in 75 seconds, compiling included (1.56 with 940 steps)
#   recipes/char-shakespeare.sh tinyshakespeare.txt short    loss 1.86 in 25 seconds
#
# The validation text is the last tenth, as nanoGPT has it. English characters are bytes, so the tokenizer's 261 ids are those 65 characters
# and some that never come.
set -euo pipefail
text=$1 length=${2:-long}
case $length in
  short) steps=340 batch_size=16 seq_len=64 more=(--compile off --dtype float32) ;;
  long) steps=760 batch_size=16 seq_len=128 more=(--compile on --dtype bfloat16) ;;
  *) echo "error: $length must be short or long" >&2; exit 2 ;;
esac
clockhand train --data "$text" --kind char --val-fraction 0.1 --out "${3:-runs/char-shakespeare-$length}" \
  --preset tiny --set d_model=128 --set n_layers=4 --set n_heads=4 --set n_kv_heads=4 --set head_dim=32 --set d_ff=320 --set max_seq_len=256 \
  --optimizer muon --learning-rate 0.015 --min-lr-ratio 0 --warmup-steps $((steps / 20)) \
  --steps $steps --batch-size $batch_size --seq-len $seq_len "${more[@]}" \
  --eval-every 0 --eval-windows 2000 --save-every 0 --sample-every 0 --no-keep-best
