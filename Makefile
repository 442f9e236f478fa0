# Every target sets up what it needs. Usual variables: PORT=8000, PYTHON=python3.12, ARGS="...", VENV=.venv
PORT ?= 8000
VENV ?= .venv
ARGS ?=
PEER ?=
WORK ?=
CASES ?=
MODEL ?=
# The first Python on the path that is new enough, unless PYTHON names one.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIXELS_INSTALLED := $(VENV)/.installed-pixels
TEST_INSTALLED := $(VENV)/.installed-test
DOCS_INSTALLED := $(VENV)/.installed-docs
CLIENTS := $(VENV)/clients
CLIENTS_INSTALLED := $(CLIENTS)/.installed
GUIDELLM := $(VENV)/guidellm
GUIDELLM_INSTALLED := $(GUIDELLM)/.installed

# Which tests of a lane: all, unless test-fast says otherwise.
FAST :=
# Where a lane that ran tests writes its name; and the end of a target: it fails where no lane ran any.
RAN := /dev/null
SOME_RAN = test $$status != 0 || test -s $$ran || { echo "no test was run: ARGS choose none" >&2; status=5; }; rm -f $$ran; exit $$status
# Each half of the fast tests prints its report in one piece, where make can do that.
SORTED := $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

.DEFAULT_GOAL := help
.PHONY: help setup setup-test setup-clients run test test-fast test-clients cases fuzz lint check docs bench peer chaos audit demo-model ui

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED)  ## make .venv and install tokenyard into it

setup-test: $(TEST_INSTALLED)

setup-clients: $(CLIENTS_INSTALLED) $(GUIDELLM_INSTALLED)

# Without ARGS the embedded painter stands beside the embedded model.
run: $(if $(strip $(ARGS)),$(INSTALLED),$(PIXELS_INSTALLED))  ## serve the embedded models on 127.0.0.1:PORT, or what ARGS names (a model and flags)
	$(BIN)/tokenyard serve --host 127.0.0.1 --port $(PORT) $(or $(strip $(ARGS)),--also painter=tokenyard-painter)

test: $(TEST_INSTALLED)  ## run every test, those without servers on two cores at once (ARGS adds pytest arguments)
	@status=0; ran=$$(mktemp); \
	$(MAKE) --no-print-directory --keep-going --jobs=2 RAN=$$ran lane-api lane-kernels,system || status=$$?; \
	$(MAKE) --no-print-directory RAN=$$ran lane-serving || status=$$?; \
	$(SOME_RAN)

test-fast: $(TEST_INSTALLED)  ## the quick tests: no server, nothing compiled anew, no waiting, on two cores (ARGS as above)
	@status=0; ran=$$(mktemp); \
	$(MAKE) --no-print-directory --jobs=2 $(SORTED) RAN=$$ran FAST="-m 'not slow'" lane-api lane-kernels || status=$$?; \
	$(SOME_RAN)

# Tests of the named lanes (tests/lanes.py). pytest's status 5 says that ARGS choose none of them.
lane-%:
	$(BIN)/python -m pytest --lane $* $(FAST) $(ARGS) && echo $* >> $(RAN) || test $$? = 5

test-clients: $(CLIENTS_INSTALLED) $(GUIDELLM_INSTALLED)  ## the clients that people have, unmodified, against a server (docs/clients.md)
	SERVER_PYTHON=$(abspath $(BIN)/python) $(CLIENTS)/bin/python -m pytest --confcutdir tests/clients tests/clients -rs $(ARGS)

cases: $(TEST_INSTALLED)  ## run the case scripts of a folder against this checkout (CASES=DIR MODEL=DIR; ARGS="--help")
	$(BIN)/python -m tests.cases "$(CASES)" $(if $(MODEL),--model "$(MODEL)") $(ARGS)

fuzz: $(TEST_INSTALLED)  ## the tests that send strange requests, at length (about an hour)
	TOKENYARD_TEST_FUZZ=2000 TOKENYARD_TEST_SEED=random $(BIN)/python -m pytest --timeout 7200 tests/system/test_contract.py tests/system/test_malformed.py $(ARGS)

lint: $(TEST_INSTALLED)  ## style, types and the import rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint  ## the same as lint

docs: $(DOCS_INSTALLED)  ## build the documentation as a site into build/site (ARGS adds mkdocs flags)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "open build/site/index.html"

ui:  ## build the page at /ui/ from ui/ into the API server's package (needs node and npm)
	cd ui && npm ci --no-audit --no-fund && npx tsc --noEmit && node build.mjs

bench: $(TEST_INSTALLED)  ## measure a server, or compare with PEER=vllm,openvino,... or a base URL (WORK=W1,W2; ARGS="--help")
	$(BIN)/python -m benchmarks$(if $(PEER),.compare --peer "$(PEER)" --work "$(WORK)") $(ARGS)

peer: $(TEST_INSTALLED)  ## install PEER=openvino|vllm|llamacpp|llamacpp-int8|max|transformers for make bench
	$(BIN)/python -m benchmarks.peers install $(PEER)

chaos: $(TEST_INSTALLED)  ## kill processes for ten minutes and compare every stream (ARGS="--help" explains)
	$(BIN)/python -m tests.chaos $(ARGS)

audit: $(INSTALLED)  ## look up known vulnerabilities of the installed packages (asks pypi.org)
	@test -x $(VENV)/audit/bin/pip-audit || { $(BIN)/python -m venv $(VENV)/audit && $(VENV)/audit/bin/pip install -q "pip-audit>=2.9,<3"; }
	$(VENV)/audit/bin/pip-audit --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

demo-model: $(TEST_INSTALLED)  ## train the embedded model anew (a bit more than an hour on two cores)
	$(BIN)/python -m demo_model $(ARGS)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "tokenyard needs Python 3.11 or newer, and none is on the path; install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tokenyard needs Python 3.11 or newer; $(PYTHON) is older or missing. Name another: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps are newer than pyproject.toml exactly when its dependencies are installed.
$(INSTALLED): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable .
	@touch $@

$(PIXELS_INSTALLED): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable '.[pixels]'
	@touch $@ $(INSTALLED)

$(TEST_INSTALLED): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable '.[test]'
	$(BIN)/python -m pip install --no-deps trl==1.16.0  # the client of trainers is tested; what trainers themselves need is not
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["test-kernels"], sep="\n")' > $(VENV)/test-kernels.txt
	$(BIN)/python -m pip install --no-deps --upgrade --target $(VENV)/triton --requirement $(VENV)/test-kernels.txt || echo "the tests of kernels for GPUs are skipped"
	@touch $@ $(INSTALLED) $(PIXELS_INSTALLED)

$(DOCS_INSTALLED): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable '.[docs]'
	@touch $@ $(INSTALLED)

# The clients' environment is not the server's: they share no package version. Node's clients need npm; without it their tests are skipped.
$(CLIENTS_INSTALLED): pyproject.toml tests/clients/versions.txt tests/clients/package-lock.json | $(INSTALLED)
	$(BIN)/python -m venv $(CLIENTS)
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["test-clients"], sep="\n")' > $(CLIENTS)/requirements.txt
	$(CLIENTS)/bin/python -m pip install --requirement $(CLIENTS)/requirements.txt --constraint tests/clients/versions.txt
	cd tests/clients && npm ci --no-audit --no-fund || echo "npm is missing or failed: the tests of node's clients are skipped"
	@touch $@

# A public benchmark tool, in an environment that sees the server's packages: it needs torch and transformers, and nothing
# may install 3 GB of them anew. What it wants in other versions it gets for itself.
$(GUIDELLM_INSTALLED): pyproject.toml tests/clients/guidellm_versions.txt | $(INSTALLED)
	$(BIN)/python -m venv $(GUIDELLM)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(GUIDELLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/server.pth"
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["test-guidellm"], sep="\n")' > $(GUIDELLM)/requirements.txt
	$(GUIDELLM)/bin/python -m pip install --requirement $(GUIDELLM)/requirements.txt --constraint tests/clients/guidellm_versions.txt
	@touch $@
