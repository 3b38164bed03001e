# Each target makes .venv and installs what it needs. No root, no GPU, no compiler.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: demo test check fix clean

$(STAMP): pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[all,timm,dev]'
	touch $@

# Two ranks: on two GPUs, or on the CPU where there is none. A single GPU takes one.
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
RANKS ?= $(if $(filter 1,$(GPUS)),1,2)

demo: $(STAMP)  ## the main job: DeepSpeed trains a classifier on real images, ZeRO-2, bf16
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(if $(filter-out 0,$(GPUS)),,DS_ACCELERATOR=cpu) deepspeed --quiet --num_gpus $(RANKS) dsimg/train.py \
		--deepspeed_config ds_configs/demo.json --epochs 12 --out runs/demo --overwrite

test: $(STAMP)  ## the tests (those marked slow or gpu are run by hand)
	$(VENV)/bin/python -m pytest

check: $(STAMP)  ## lint, format, types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

fix: $(STAMP)  ## mend what can be mended by machine
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache
