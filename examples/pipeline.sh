#!/usr/bin/env bash
# The whole chain by hand, on the embedded digits: about two minutes on two cores. Every command is one to copy; given
# again, each goes on where it was, and a finished one does nothing.
#
#     examples/pipeline.sh [FOLDER]        default: runs/pipeline
#
# `dsimg compress --source FOLDER/teacher --out FOLDER/search` tries many such chains, and takes the best.
set -eu
folder=${1:-runs/pipeline}
mkdir -p "$folder"
cd "$folder"

# A teacher, and a smaller network that learns to say what it says.
dsimg train --data digits --model cifar_resnet32 --epochs 10 --out teacher
dsimg distill --source teacher --model cifar_resnet20 --epochs 10 --out student

# Half of the student's multiply-adds go; what is left is trained again, with the teacher's help.
dsimg prune --source student --teacher teacher --target_macs 0.5 --round_to 8 --epochs 10 --lr 0.05 \
    --out pruned

# Out of torch: one ONNX file, the same in int8, and the proof that it says here what it said there.
dsimg export --source pruned --out file
dsimg quantize --source file --out int8
dsimg verify --source int8

# How good, how fast, and where it came from.
dsimg evaluate --source int8
dsimg bench --source file int8 --batch_sizes 1 --threads 1 --out bench
dsimg show int8
dsimg predict --source int8 --top 3 data/digits/val/7/03*.png
