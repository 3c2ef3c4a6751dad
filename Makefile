# `make` prints the targets.  `make demo` and `make test` do all their set-up on a fresh machine, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Files stay whole, so that what a file captures is captured once; a process takes up to 2 GB.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile
# Python, and each Python that a test starts, imports what is installed, not the folder that it is started in.
ON_THE_WHEEL := TESTED=wheel PYTHONSAFEPATH=1
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check
PIP := $(PIP_INSTALL) --quiet
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help

help: ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  \1\t/' | expand -t 16

# Files have to have the lock's digests. pip takes a build of torch whose digest its index names before a CPU build at hand, so the
# build is asked for first. The last step but one installs this project's wheel, and what the lock cannot name: other platforms and the
# CUDA build of torch need packages of their own.
$(STAMP): pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv $(VENV)
	torch=$$($(PIP_INSTALL) --dry-run --ignore-installed --no-deps -c constraints.txt torch | sed -n 's/^Would install torch-//p') \
	&& sed "s/^torch==[^ ]*/torch==$$torch/" requirements.lock > $(VENV)/requirements.lock
	$(PIP) --no-compile --require-hashes --no-deps -r $(VENV)/requirements.lock
	$(BIN)/python release/install.py --extras dev
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # pip does it on one core; some files are not for this Python
	touch $(STAMP)

setup: installed ## make .venv and install the project's wheel into it

installed: $(STAMP) # does nothing while the sources are what is installed
	$(BIN)/python release/install.py

demo: installed ## export a T5 encoder in fp32, bf16, fp16 and int8, verify, and run prompts without torch
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python examples/demo.py # as the command sets it: see enginecast/__main__.py

format: $(STAMP) ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(STAMP) ## check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP) ## check types
	$(BIN)/mypy

unit: installed ## run the tests alone, on the installed wheel
	$(ON_THE_WHEEL) $(BIN)/python -m pytest $(PARALLEL)

test: lint installed ## format, lint, types, tests: what CI runs
	$(MAKE) -j2 types unit # mypy takes one core, and the last tests leave one

test-slow: installed ## run the slow tests too
	$(ON_THE_WHEEL) $(BIN)/python -m pytest $(PARALLEL) -m "slow or not slow"

newest: installed ## run README and the tests with pip's newest of everything, in .venv-newest; needs the network, 6 GB and half an hour
	rm -rf $(VENV)-newest && $(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --quiet "$$(ls $(VENV)/wheel/*.whl)[export]"
	$(BIN)/python tests/support/docs_blocks.py README.md $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager "$$(ls $(VENV)/wheel/*.whl)[dev]"
	$(VENV)-newest/bin/python -m pip install --quiet --no-deps --force-reinstall $(VENV)/wheel/*.whl
	$(ON_THE_WHEEL) $(VENV)-newest/bin/python -m pytest $(PARALLEL)

oldest: installed ## run the tests with the oldest versions that pyproject.toml allows, in .venv-oldest; needs the network
	$(BIN)/uv pip compile --quiet --resolution lowest-direct --extra dev pyproject.toml -o $(VENV)/oldest.txt
	rm -rf $(VENV)-oldest && $(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --quiet -r $(VENV)/oldest.txt
	$(VENV)-oldest/bin/python -m pip install --quiet --no-deps $(VENV)/wheel/*.whl
	$(ON_THE_WHEEL) $(VENV)-oldest/bin/python -m pytest $(PARALLEL)

zoo: installed ## export every architecture of transformers in small: docs/results/zoo.md; ONLY=bert,t5 for some
	$(BIN)/python campaigns/run.py zoo --only '$(ONLY)'

vision: installed ## export models of torchvision, timm, open_clip and Lightning, where installed: docs/results/vision.md
	$(BIN)/python campaigns/run.py vision --only '$(ONLY)'

fp16: installed ## export models with loud channels in fp16: docs/results/fp16.md; ONLY=vae,flux for some
	$(BIN)/python campaigns/run.py fp16 --only '$(ONLY)'

diffusion: installed ## export tiny pipelines whole: the table of docs/results/diffusion.md; ONLY=flux,wan for some
	$(BIN)/python campaigns/run.py diffusion --only '$(ONLY)'

control-flow: installed ## export models with control flow: docs/results/control-flow.md; ONLY=db,IfElse for some
	$(BIN)/python campaigns/run.py flow --only '$(ONLY)'

operators: installed ## export each operator of torch's database: docs/results/operators.md; ONLY=topk,fft for some
	$(BIN)/python campaigns/run.py operators --only '$(ONLY)'

golden: installed ## rewrite the golden IR diffs; read `git diff tests/golden` before committing
	GOLDEN=accept $(BIN)/python -m pytest tests -q -k golden

models: installed ## test every family and rewrite docs/results/models.md from what was found
	FAMILY_ROWS=docs/results/models.json $(BIN)/python -m pytest tests/compiler/test_families.py -q -m "slow or not slow"
	$(BIN)/python campaigns/models_page.py

adversary: installed ## export modules that try to mislead, and count what is wrong; ONLY=writes,edges for some
	$(BIN)/python campaigns/run.py adversary --only '$(ONLY)'

mutations: installed ## put random faults into engines, and count those that a verification finds: docs/results/mutations.md
	$(BIN)/python campaigns/mutation_score.py

faults: installed ## fail system calls, kill, damage, race and load on purpose: docs/how-it-works/reliability.md; ONLY="kills" for some
	$(BIN)/python campaigns/run.py faults --only '$(ONLY)'

trt-gate: installed ## ask the installed TensorRT-RTX for each operator of ONNX, and write the gate's table; ONLY=TopK,Cast for some
	$(BIN)/python campaigns/run.py trt_gate --only '$(ONLY)'

trt-models: installed ## build the zoo's and vision's networks with TensorRT-RTX: docs/results/tensorrt.md; ONLY=bert,t5 MISSING=1
	$(BIN)/python campaigns/run.py trt_models --only '$(ONLY)' $(if $(MISSING),--missing)

gpu: installed ## verify and time engines on the GPU here, in 8 minutes: benchmarks/results/gpu-NAME.json; ONLY=t5,vit ENGINES=tensorrt DRY=1
	$(BIN)/python benchmarks/gpu.py --only '$(ONLY)' --engines '$(ENGINES)' --minutes $(or $(MINUTES),8) $(if $(DRY),--dry-run)

bench: installed ## time engines on this CPU beside peers, and write the table of docs/results/speed.md; ONLY="minilm 32x64" for some rows
	$(BIN)/python benchmarks/peers.py --only '$(ONLY)' --minutes $(or $(MINUTES),20)
	$(BIN)/python benchmarks/peers_page.py
	$(BIN)/python release/install.py --extras bench
	$(BIN)/python benchmarks/peers_plot.py

docs: installed ## build the documentation into site/, with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: installed ## show the documentation at http://127.0.0.1:8000 while it is written
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

lock: $(STAMP) ## resolve constraints.txt anew and write requirements.lock with its digests; UPGRADE=1 for the newest of the rest
	$(BIN)/python release/lock.py $(if $(UPGRADE),--upgrade)

dist: $(STAMP) ## build the sdist and the wheel of HEAD, byte for byte the same each time, into dist/
	$(BIN)/python release/dist.py

sbom: $(STAMP) ## write the bill of the installed packages (CycloneDX), the same bytes each time, into dist/
	mkdir -p dist
	$(BIN)/python -m cyclonedx_py environment --pyproject pyproject.toml --output-reproducible --spec-version 1.6 \
	  -o dist/enginecast-$$($(BIN)/python -c "from importlib.metadata import version; print(version('enginecast'))").cdx.json $(BIN)/python

audit: $(STAMP) ## ask OSV for known vulnerabilities of the locked packages; passes, and says so, where it is not reached
	$(BIN)/python release/audit.py

clean: ## remove what the targets made
	rm -rf $(VENV) $(VENV)-newest $(VENV)-oldest demo build dist site *.egg-info

.PHONY: help setup installed newest oldest demo docs docs-serve format lint types unit test test-slow zoo diffusion control-flow operators adversary faults mutations golden models trt-gate trt-models gpu bench lock dist sbom audit clean
