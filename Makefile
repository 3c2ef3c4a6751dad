# `make` prints the targets.  `make demo` and `make test` do all their set-up on a fresh machine, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Files stay whole, so that what a file captures is captured once; a process takes up to 2 GB.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check
PIP := $(PIP_INSTALL) --quiet
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help

help: ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  \1\t/' | expand -t 16

# Files have to have the lock's digests. pip takes a build of torch whose digest its index names before a CPU build at hand, so the
# build is asked for first. The last step installs this project, and what the lock cannot name: other platforms and the CUDA build of
# torch need packages of their own.
$(STAMP): pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv $(VENV)
	torch=$$($(PIP_INSTALL) --dry-run --ignore-installed --no-deps -c constraints.txt torch | sed -n 's/^Would install torch-//p') \
	&& sed "s/^torch==[^ ]*/torch==$$torch/" requirements.lock > $(VENV)/requirements.lock
	$(PIP) --no-compile --require-hashes --no-deps -r $(VENV)/requirements.lock
	$(PIP) --no-compile -c constraints.txt --no-build-isolation --editable '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # pip does it on one core; some files are not for this Python
	touch $(STAMP)

setup: $(STAMP) ## make .venv and install the project into it

demo: $(STAMP) ## export a T5 encoder in fp32, bf16, fp16 and int8, verify, and run prompts without torch
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/demo.py # as the command sets it: see enginecast/__main__.py

format: $(STAMP) ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(STAMP) ## check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP) ## check types
	$(BIN)/mypy

unit: $(STAMP) ## run the tests alone
	$(BIN)/python -m pytest $(PARALLEL)

test: lint ## format, lint, types, tests: what CI runs
	$(MAKE) -j2 types unit # mypy takes one core, and the last tests leave one

test-slow: $(STAMP) ## run the slow tests too
	$(BIN)/python -m pytest $(PARALLEL) -m "slow or not slow"

zoo: $(STAMP) ## export every architecture of transformers in small: docs/results/zoo.md; ONLY=bert,t5 for some
	$(BIN)/python tests/zoo/run.py --only '$(ONLY)'

vision: $(STAMP) ## export models of torchvision, timm, open_clip and Lightning, where installed: docs/results/vision.md
	$(BIN)/python tests/vision/run.py --only '$(ONLY)'

control-flow: $(STAMP) ## export models with control flow: docs/results/control-flow.md; ONLY=db,IfElse for some
	$(BIN)/python tests/flow/run.py --only '$(ONLY)'

operators: $(STAMP) ## export each operator of torch's database: docs/results/operators.md; ONLY=topk,fft for some
	$(BIN)/python tests/operators/run.py --only '$(ONLY)'

golden: $(STAMP) ## rewrite the golden IR diffs; read `git diff tests/golden` before committing
	GOLDEN=accept $(BIN)/python -m pytest tests -q -k golden

models: $(STAMP) ## test every family and rewrite docs/results/models.md from what was found
	FAMILY_ROWS=docs/results/models.json $(BIN)/python -m pytest tests/test_families.py -q -m "slow or not slow"
	$(BIN)/python tests/models_page.py

adversary: $(STAMP) ## export modules that try to mislead, and count what is wrong; ONLY=writes,edges for some
	$(BIN)/python tests/adversary/run.py --only '$(ONLY)'

mutations: $(STAMP) ## put random faults into engines, and count those that a verification finds: docs/results/mutations.md
	$(BIN)/python tests/mutation_score.py

faults: $(STAMP) ## fail system calls, kill, damage, race and load on purpose: docs/how-it-works/reliability.md; ONLY="kills" for some
	$(BIN)/python tests/faults/run.py --only '$(ONLY)'

trt-acceptance: $(STAMP) ## build, verify and time TensorRT engines here; ONLY=t5,vit PRECISION=fp16 QUICK=1
	$(BIN)/python benchmarks/trt_acceptance.py --only '$(ONLY)' --precision '$(PRECISION)' $(if $(QUICK),--quick)

bench: $(STAMP) ## time engines on this CPU beside peers, and write the table of docs/results/speed.md; ONLY="minilm 32x64" for some rows
	$(BIN)/python benchmarks/peers.py --only '$(ONLY)' --minutes $(or $(MINUTES),20)
	$(BIN)/python benchmarks/peers_page.py
	$(PIP) -c constraints.txt --no-build-isolation --editable '.[bench]'
	$(BIN)/python benchmarks/peers_plot.py

docs: $(STAMP) ## build the documentation into site/, with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(STAMP) ## show the documentation at http://127.0.0.1:8000 while it is written
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

lock: $(STAMP) ## resolve constraints.txt anew and write requirements.lock with its digests; UPGRADE=1 for the newest of the rest
	$(BIN)/python release/lock.py $(if $(UPGRADE),--upgrade)

dist: $(STAMP) ## build the sdist and the wheel of HEAD, byte for byte the same each time, into dist/
	$(BIN)/python release/dist.py

sbom: $(STAMP) ## write the bill of the locked packages (CycloneDX), the same bytes each time, into dist/
	$(BIN)/python release/sbom.py

audit: $(STAMP) ## ask OSV for known vulnerabilities of the locked packages; passes, and says so, where it is not reached
	$(BIN)/python release/audit.py

clean: ## remove what the targets made
	rm -rf $(VENV) demo build dist site *.egg-info

.PHONY: help setup demo docs docs-serve format lint types unit test test-slow zoo control-flow operators adversary faults mutations golden models trt-acceptance bench lock dist sbom audit clean
