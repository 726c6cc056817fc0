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
setup: ## Install what `make site` needs (a second run does nothing)
	@python3 tools/bootstrap.py --virtual

.PHONY: setup-test
setup-test:
	@python3 tools/bootstrap.py --virtual --test

.PHONY: virtual-up
virtual-up: setup ## Build and boot the virtual pair, write inventory/virtual
	@ansible-playbook -i localhost, playbooks/virtual_pair.yml -e virtual_pair_state=up </dev/null

.PHONY: virtual-down
virtual-down: ## Power the virtual pair off (only its own processes)
	@ansible-playbook -i localhost, playbooks/virtual_pair.yml -e virtual_pair_state=down </dev/null

.PHONY: virtual-fresh
virtual-fresh: ## Power it off and forget its disks: the next boot is stock
	@ansible-playbook -i localhost, playbooks/virtual_pair.yml -e virtual_pair_state=absent </dev/null

.PHONY: role
role: ## One role on INVENTORY: make role ROLE=rdma [ARGS=...]
	@$(WITH_ENV) ansible-playbook -i $(INVENTORY) playbooks/role.yml -e role=$(ROLE) $(ARGS) </dev/null
