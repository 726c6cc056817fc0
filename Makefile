# goodput.spark: `make` lists the targets.
SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
INVENTORY ?= inventory/virtual
BIN := .venv/bin
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Emulated guests use the in-process strategy that the virtual pair's inventory names; hardware has no such file.
WITH_ENV = set -a; if [ -f $(INVENTORY)/ansible.env ]; then . $(INVENTORY)/ansible.env; fi; set +a;

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

.PHONY: setup
setup: ## Install what `make site` needs on this INVENTORY (a second run does nothing)
	@python3 tools/bootstrap.py $(if $(filter inventory/virtual,$(INVENTORY)),--virtual)

.PHONY: setup-test
setup-test:
	@python3 tools/bootstrap.py --virtual --test

.PHONY: site
site: setup ## From stock to a verified first token (INVENTORY=inventory/pair for two Sparks)
	@if [ "$(INVENTORY)" = inventory/virtual ]; then goodput virtual up; fi
	goodput site -i $(INVENTORY) $(ARGS)

.PHONY: test
test: setup-test ## Everything: lint, unit, then the virtual pair through molecule and every fault
	@python tools/stages.py $(STAGES)

.PHONY: virtual-ssh
virtual-ssh: ## A shell on a guest: make virtual-ssh NODE=spark2
	@goodput virtual ssh $(or $(NODE),spark1)

.PHONY: bench-site
bench-site: setup ## Seconds of every stage from nothing to the first token, and of a second run
	@goodput bench site -i $(INVENTORY)

.PHONY: virtual-up
virtual-up: setup ## Build and boot the virtual pair, write inventory/virtual
	@ansible-playbook -i localhost, playbooks/virtual_pair.yml -e virtual_pair_state=up $(ARGS) </dev/null

.PHONY: virtual-down
virtual-down: ## Power the virtual pair off (only its own processes)
	@ansible-playbook -i localhost, playbooks/virtual_pair.yml -e virtual_pair_state=down </dev/null

.PHONY: virtual-fresh
virtual-fresh: ## Power it off and forget its disks: the next boot is stock
	@ansible-playbook -i localhost, playbooks/virtual_pair.yml -e virtual_pair_state=absent </dev/null

.PHONY: role
role: ## One role on INVENTORY: make role ROLE=rdma [ARGS=...]
	@$(WITH_ENV) ansible-playbook -i $(INVENTORY) playbooks/role.yml -e role=$(ROLE) $(ARGS) </dev/null

.PHONY: lint
lint: setup-test ## Every static check; all of them run, then it fails if one did
	@failed=
	step() { printf '== %s\n' "$$*"; "$$@" || failed="$$failed$$(printf '\n  %s' "$$*")"; }
	step ruff check --quiet .
	step ruff format --check --quiet .
	step python tools/check_argspecs.py
	step python tools/check_variables.py
	step python tools/role_readmes.py --check
	step python tools/check_plugin_docs.py
	step antsibull-changelog lint
	step yamllint --strict .
	step mypy
	# It installs the collection for itself, and would go on with a former copy's modules.
	rm -rf .cache/lint-home
	step env ANSIBLE_HOME=$(CURDIR)/.cache/lint-home ansible-lint -q
	if [ -n "$$failed" ]; then printf 'lint: failed:%s\n' "$$failed" >&2; exit 1; fi

.PHONY: unit
unit: setup-test ## Unit tests: no node, no network
	@pytest tests/unit -n 2 -q

.PHONY: docs
docs: setup-test ## Write the tables of inputs in the roles' READMEs
	@python tools/role_readmes.py

.PHONY: conformity
conformity: setup-test ## Plans before the real LMCache, Dynamo and vLLM, objects before a real Kubernetes API server (GOODPUT_KUBE_DATA=…)
	@pytest tests/conformity -q -s

.PHONY: conformity-vllm
conformity-vllm: setup-test
	@pytest tests/conformity/test_vllm.py -q -s

.PHONY: bench-plan
bench-plan: setup-test ## Time of the planner, and random plans without a crash
	@python tests/bench_kv_plan.py
