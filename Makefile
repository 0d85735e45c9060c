# Two commands: `make demo` and `make test`. Both make .venv ready first.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
REPORTS := build
TESTS := not slow and not gpu and not gpu2
# hypothesis draws the same examples each time here, and others where pytest is called by hand;
# two files of tests at a time, where the plugin is: most tests keep one core busy
TWO = $(shell $(PY) -c "import xdist" 2>/dev/null && echo --numprocesses 2 --dist loadfile --no-loadscope-reorder)

.PHONY: demo test test-all test-rdma test-gpu bench bench-models lint setup proxy clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      compile two models on two ranks, explain what was fused, compare with eager and Inductor"
	@echo "make test      everything that needs no GPU"
	@echo "make test-all  the wide matrices and other torch versions too"
	@echo "make test-rdma the proxy over real ibverbs, in a virtual machine (Debian, root; installs QEMU)"
	@echo "make test-gpu  kernels on one or two GPUs"
	@echo "make bench-models  whole models on two GPUs against eager, Inductor and async TP; may be stopped and resumed"
	@echo "make bench     operators on two GPUs against cuBLAS+NCCL and torch's symmetric memory"

$(VENV)/.ready: tools/setup.py pyproject.toml tools/constraints.txt
	@$(PYTHON) tools/setup.py --venv $(VENV)

setup: $(VENV)/.ready

proxy: $(VENV)/.ready
	@$(PY) tools/build_proxy.py

demo: $(VENV)/.ready
	@$(PY) -m mkcompile demo --html $(REPORTS)/report.html

lint: $(VENV)/.ready
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

test: $(VENV)/.ready
	@$(PYTHON) tools/setup.py --browser
	@tools/rdma/run_vm.sh -i || true
	@$(MAKE) --no-print-directory lint
	@$(PY) -m pytest $(TWO) --hypothesis-profile ci -m "$(TESTS)" --durations 10
	@$(PY) tools/receipt.py check

test-all: $(VENV)/.ready
	@$(MAKE) --no-print-directory test
	@$(PY) -m pytest -m "slow and not other_torch and not gpu and not gpu2" --durations 10
	@$(PY) tools/other_torch.py

test-rdma: $(VENV)/.ready
	@tools/rdma/run_vm.sh -i
	@$(PY) -m pytest -m slow -rP tests/rdma

test-gpu: $(VENV)/.ready
	@$(PY) tools/receipt.py run

bench: $(VENV)/.ready
	@$(PY) -m mkcompile bench ops

bench-models: $(VENV)/.ready
	@$(PY) -m mkcompile bench models --together --profile --compile-times

clean:
	rm -rf $(REPORTS) dist
