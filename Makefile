# One command a chore, the same for people and CI. `make` alone lists them.
PYTHON ?= python3
VENV ?= .venv
PORT ?= 8888
WORKERS ?= 2

RUN = $(VENV)/bin/python
SET_UP = @$(PYTHON) tools/set_up.py --venv "$(VENV)"
ON_CPU = WORKSHOP_DEVICE=cpu WORKSHOP_MODEL=tiny-ernie HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE

.DEFAULT_GOAL := help
.PHONY: help lab test notebooks book walk bench predict-report check doctor diagnose gpu-check versions vllm offline fresh clean set-up

help: ## list these commands
	@echo "make <command>:"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | awk -F '|' '{ printf "%-15s %s\n", $$1, $$2 }'
	@echo "Variables: PYTHON=python3.12 (the Python to build on), PORT=9000, VENV=folder, WORKSHOP_DEVICE=cpu"

lab: set-up ## set everything up and open the workshop in JupyterLab (127.0.0.1, PORT=8888)
	@$(RUN) tools/lab.py --port $(PORT)

test: set-up ## set everything up and run all tests, then every notebook
	@$(ON_CPU) $(RUN) -m pytest tests -m "not gpu" -n $(WORKERS) --dist loadscope --durations 15; tests=$$?; \
	$(RUN) tools/run_nbval.py && exit $$tests

notebooks: set-up ## execute the notebooks and rewrite their outputs reproducibly (NB=04 for one)
	@$(RUN) tools/publish.py $(NB)

book: ## build the course as a website: build/book/html/index.html
	$(SET_UP) dev book
	@$(RUN) tools/book.py

walk: set-up ## run every notebook in a browser as a learner does, and keep screenshots of all of it: build/walk
	@mkdir -p build  # pytest makes the last folder of --basetemp only
	@$(ON_CPU) WORKSHOP_WALK=1 $(RUN) -m pytest tests/browser -k top_to_bottom -v --basetemp=build/walk

bench: ## measure this machine: launch latency side by side with other launchers, recorder on and off
	$(SET_UP) dev bench
	@$(RUN) -m tests.benchmarks

predict-report: set-up ## compare the cost model with published measurements, row by row
	@$(RUN) tools/predict_report.py

check: set-up ## check format, lint, types, and the size of the package
	@$(RUN) -m ruff format --check . && $(RUN) -m ruff check . && $(RUN) -m mypy && $(RUN) tools/count_lines.py

doctor: set-up ## look for what spoils workshops: state, meaning and mend, one line each
	@$(RUN) -m helpers.preflight

diagnose: set-up ## name the fault that a log shows (LOG=file; torchrun, accelerate, vLLM, NCCL, gloo)
	@$(RUN) -m helpers.diagnosis "$(LOG)"

gpu-check: set-up ## on an NVIDIA GPU: run its tests, and record measurements for those without (without one it says so)
	@$(RUN) tools/gpu_check.py

versions: set-up ## try the oldest and the newest supported transformers and accelerate, with a reduced set of tests
	@$(RUN) tools/try_versions.py

vllm: ## try again to add vLLM where the set-up left it out (WORKSHOP_VLLM=no leaves it out: 2 GiB less)
	$(SET_UP) dev vllm --again

offline: set-up ## pack the course and all its packages into one folder for machines without a network (INTO=folder)
	@$(RUN) tools/offline.py --into $(or $(INTO),workshop_offline)

fresh: ## bring one of your notebooks back as the course has it (NB=04); yours stays under a dated name
	@$(PYTHON) tools/learner_notebooks.py "$(NB)"

clean: ## remove the environment and caches; my_notebooks/ stays
	@rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

set-up:
	$(SET_UP) dev vllm
