# Each target makes .venv and installs what it needs. No root, no GPU, no compiler.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: demo test check fix clean

$(STAMP): pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[train,timm,dev]'
	touch $@

demo: $(STAMP)  ## the main job: DeepSpeed trains a classifier on real images, two CPU ranks, ZeRO-2, bf16
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" deepspeed --num_gpus 2 dsimg/train.py --deepspeed_config ds_configs/demo.json --overwrite

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
