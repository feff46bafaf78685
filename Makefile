# Every target makes the virtual environment .venv when it is needed; nothing else has to be installed but Python 3.11 or newer and make.
# Where a .venv is there that make did not make, which is yours, it is left alone, and make's is build/venv.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory --no-builtin-rules

PYTHON ?= python3
VENV := $(if $(and $(wildcard .venv),$(if $(wildcard .venv/.skerry-*),,yours)),build/venv,.venv)
BIN := $(VENV)/bin
READY := $(VENV)/.skerry-ready
TRAINERS := .venv-integrations
SUPPLY := build/supply-chain
SITE := build/site-environment
MINUTES ?= 60
INSTALL := -m pip install -qq --disable-pip-version-check --no-compile
# A module is compiled when it is first imported. Many container images set this, and then each process compiles anew.
export PYTHONDONTWRITEBYTECODE :=

# What pytest is given beyond the defaults, for example: make test ARGS="tests/unit/cli -x"
ARGS ?= tests

.PHONY: help demo test test-long test-e2e test-integrations lint format bench fuzz update lock sbom audit dist test-dist release-dry-run protos alerts board docs clean

help: ## say what there is
	@echo "make <target>, the virtual environment $(VENV) is made on the way:"
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '%-17s %s\n' "$$name" "$$text"; done

demo: $(READY) ## train one model on three learners while one of them and the syncer are killed (3 minutes)
	@echo "demo: three learners and a syncer, two of which are killed; the picture and the report go to build/demo"
	@$(BIN)/python -m examples.demo

test: $(READY) ## run the default suite (5 minutes on 2 cores)
	@echo "test: the suite without its long and its end-to-end part"
	@$(BIN)/python -m pytest -m "not e2e and not long" -rs -n 3 --dist worksteal $(ARGS)  # a third of the time they wait

test-long: $(READY) ## run what is too long for the default suite: more seeds and mutations of the simulation, the benchmarks' own tests (10 minutes)
	@echo "test-long: tests that take too long for the default suite"
	@$(BIN)/python -m pytest -m "long and not e2e" -n 3 --dist worksteal $(ARGS)

test-e2e: $(READY) ## run floods and what needs root, containers or Debian's servers, and say what was skipped (half an hour)
	@echo "test-e2e: what measures, one after another"
	@$(BIN)/python -m pytest -m "e2e and alone" -rs $(ARGS) || test $$? = 5  # 5: none of these is in ARGS
	@echo "test-e2e: the others, three files beside each other"
	@$(BIN)/python -m pytest -m "e2e and not alone" -rs -p tests.support.shared_files -n 3 --dist loadfile $(ARGS) || test $$? = 5

test-integrations: $(TRAINERS)/.skerry-ready ## train with transformers, accelerate, Lightning, PEFT and JAX (8 minutes)
	@echo "test-integrations: each trainer trains two islands, one of which is killed"
	@HF_HUB_OFFLINE=1 $(TRAINERS)/bin/python -m pytest -n 2 --dist worksteal tests/e2e/trainers

lint: $(READY) ## check style, types, imports, dead code, stubs and the contract
	@echo "lint: ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "lint: run \`make format\`"; exit 1; }
	@echo "lint: mypy"
	@$(BIN)/mypy --no-error-summary
	@echo "lint: import contracts"
	@mkdir -p build
	@PYTHONPATH=client:services $(BIN)/lint-imports --no-cache > build/lint-imports.txt || { cat build/lint-imports.txt; exit 1; }
	@echo "lint: dead code"
	@$(BIN)/vulture
	@echo "lint: stubs and contract"
	@$(BIN)/python .ci/generate_stubs.py --check
	@$(BIN)/python .ci/check_contract.py

format: $(READY) ## write the code as the formatter would
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --quiet --fix-only .

bench: $(READY) ## measure the speed for 12 minutes; rows and a picture go to build/benchmarks
	@echo "bench: speed"
	@$(BIN)/python -m benchmarks.speed

fuzz: $(READY) ## give every decoder and method wrong input for an hour (MINUTES=60); findings to build/fuzz
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

update: $(SUPPLY)/.ready ## take the newest versions of all packages, generate the stubs anew, and run the tests with them (30 minutes)
	@$(SUPPLY)/bin/python docker/supply_chain.py update
	@$(MAKE) protos
	@$(MAKE) lint test test-long test-integrations

lock: $(SUPPLY)/.ready ## write the versions and hashes of what the images of syncer and console are installed from
	@$(SUPPLY)/bin/python docker/supply_chain.py lock

sbom: $(SUPPLY)/.ready ## list what the wheel and the images hold (CycloneDX), to build/sbom
	@$(SUPPLY)/bin/python docker/supply_chain.py sbom

audit: $(SUPPLY)/.ready ## look the locked packages up in the advisories; status 1: there are some, 2: they were not reached
	@$(SUPPLY)/bin/python docker/supply_chain.py audit

dist: $(SUPPLY)/.ready ## build wheel and sdist into dist, check what the registry would show of them, and list what they hold
	@rm -rf dist
	@echo "dist: building"
	@$(SUPPLY)/bin/python -m build > build/dist.txt || { cat build/dist.txt; exit 1; }
	@$(SUPPLY)/bin/twine check --strict dist/*
	@$(SUPPLY)/bin/python docker/supply_chain.py sbom

test-dist: ## install dist's wheel into a fresh environment of PYTHON, import all of it, and train a learner of arrays
	@$(PYTHON) .ci/try_wheel.py dist/skerry-*.whl

release-dry-run: dist test-dist ## do all of a release that needs no registry, as the release workflow does it

protos: $(READY) ## write the stubs beside the .proto files
	@$(BIN)/python .ci/generate_stubs.py

alerts: $(READY) ## write docker/alerts.yml from the table of alert rules
	@$(BIN)/python .ci/generate_alerts.py

board: $(READY) ## write docker/grafana/skerry.json from the metrics of syncers and learners
	@$(BIN)/python .ci/generate_board.py

docs: $(SITE)/.ready ## build the documents as a site and check its links; it goes to build/site/html
	@echo "docs: building build/site/html"
	@$(SITE)/bin/python docs/site/build.py

clean: ## remove what was built, the virtual environment too
	@rm -rf build dist $(VENV) $(TRAINERS)

# The stamp is touched last, so that an installation that was cut off is done again.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) was not found. install Python 3.11 or newer, or say make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed. found=$$($(PYTHON) --version); say make PYTHON=/path/to/python"; exit 1; }
	@echo "setup: installing into $(VENV) (minutes the first time, torch is large)"
	@test -x $(BIN)/python || { $(PYTHON) -m venv $(VENV) && touch $(VENV)/.skerry-begun; } || { echo "setup: python can't make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(BIN)/python $(INSTALL) --upgrade 'pip>=25.1'
	@$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[torch,console,gcs,otel]' --group dev
	@$(BIN)/python -c 'from skerry.wire import kernels; kernels.load()'  # compiles them once, not in every process at once
	@mkdir -p build
	@touch $@

$(TRAINERS)/.skerry-ready: pyproject.toml constraints.txt
	@echo "setup: installing into $(TRAINERS) (a minute or more the first time)"
	@test -x $(TRAINERS)/bin/python || $(PYTHON) -m venv $(TRAINERS)
	@$(TRAINERS)/bin/python $(INSTALL) --upgrade 'pip>=25.1'
	@$(TRAINERS)/bin/python $(INSTALL) --constraint constraints.txt --editable '.[transformers,lightning,peft,jax]' --group integrations
	@touch $@

$(SUPPLY)/.ready: pyproject.toml
	@$(PYTHON) -m venv $(SUPPLY)
	@$(SUPPLY)/bin/python $(INSTALL) --upgrade 'pip>=25.1'
	@$(SUPPLY)/bin/python $(INSTALL) --group supply-chain
	@touch $@

# The site's tools, and the product's commands without torch, whose help is a page.
$(SITE)/.ready: docs/site/requirements.txt pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python $(INSTALL) --upgrade 'pip>=25.1'
	@$(SITE)/bin/python $(INSTALL) --requirement $<
	@$(SITE)/bin/python $(INSTALL) --constraint constraints.txt --editable '.[console]'
	@touch $@
