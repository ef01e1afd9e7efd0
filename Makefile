# `make run` shows bide at work, from a fresh clone with nothing but Python >= 3.11, pip and make.
# ARGS is passed on: make run ARGS="--port 8500", make test ARGS="-k retry".

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help run test test-busy proofs proofs-long races contract lint bench lab simulate mutants model torture soak fuzz import-time generate clean

ARGS ?=
SETUP := sh scripts/setup
# two for a core, since tests wait; more would collect all of them more often. ARGS="-n 0" for one at a time, in a debugger
PYTEST := .venv/bin/python -m pytest -n 4
INSTALL := .venv/bin/python scripts/services install || { test -z "$$CI" && echo "bide: what needs these is skipped"; }

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-14s%s\n", $$1, $$2 }' Makefile

run: ## show it at work: the console at http://127.0.0.1:8420, with live traffic on a SQLite file
	@$(SETUP) run
	@exec .venv/bin/bide serve --demo $(ARGS)

test: ## run every test: virtual time, real servers, no verdict that depends on how fast this machine is
	@$(SETUP) test
	@$(INSTALL)
	@$(PYTEST) --dist loadscope --no-loadscope-reorder tests --ignore=tests/proofs $(ARGS)

test-busy: ## make test while four busy loops keep the processors from it
	@for loop in 1 2 3 4; do while :; do :; done & busy="$$busy $$!"; done; trap 'kill $$busy' EXIT INT TERM; $(MAKE) --no-print-directory test

proofs: ## short forms of simulation, mutants, torture and soak: nothing lost, doubled, early, stale or left
	@$(SETUP) test
	@$(INSTALL)
	@$(PYTEST) -n 6 --dist load tests/proofs $(ARGS)

races: ## race every store against itself a thousand times over, and play twenty times the games of two stores
	@$(SETUP) test
	@$(INSTALL)
	@RACES=$${RACES:-1000} GAMES=$${GAMES:-20} $(PYTEST) --dist load tests/conformance \
	  -k "against or race or fifty or many_schedules or as_it_must or over_every_timer" $(ARGS)

proofs-long: races simulate mutants model torture soak fuzz ## their long forms, one after the other: hours

contract: ## play 2,000 cases of every HTTP call in each phase: make contract ARGS="-k sqlite"
	@$(SETUP) test
	@CASES=$${CASES:-2000} .venv/bin/python -m pytest tests/service/test_contract.py $(ARGS)

lint: ## check style, format and types
	@$(SETUP) lint
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench: ## measure this machine: make bench ARGS="sqlite:///bench.db --workload lateness"
	@$(SETUP) bench
	@.venv/bin/bide bench $(ARGS)

lab: ## measure the classic strategies beside bide: make lab, or make lab ARGS="--full"
	@$(SETUP) test
	@$(INSTALL)
	@.venv/bin/python scripts/lab.py $(ARGS)

simulate: ## 10,000 seeds of six virtual minutes: make simulate ARGS="--hours 10", or --seed 42 --seeds 1 for a story
	@$(SETUP) test
	@.venv/bin/python -m bide_proofs.simulate --hours 1000 $(ARGS)

mutants: ## break bide on purpose, in each way, and see that the simulation notices
	@$(SETUP) test
	@.venv/bin/python -m bide_proofs.simulate.mutants --results docs/correctness/mutants.jsonl $(ARGS)
	@.venv/bin/python scripts/generate.py

model: ## visit every state of the small model
	@$(SETUP) test
	@.venv/bin/python -m bide_proofs.model $(ARGS)

torture: ## break every store for ten minutes each: make torture SECONDS=60 SERVERS="sqlite redis"
	@$(SETUP) test
	@$(INSTALL)
	@failed=0; for server in $${SERVERS:-sqlite redis redis-cluster redis-sentinel postgres mariadb http}; do \
	  .venv/bin/python -m bide_proofs.torture --server $$server --seconds $${SECONDS:-600} \
	    --results docs/reliability/torture.jsonl --keep torture-$$server $(ARGS) || failed=1; done; \
	  .venv/bin/python scripts/generate.py; exit $$failed

soak: ## work each store at half of its maximum, 15 minutes each, an hour on Redis: nothing may grow
	@$(SETUP) test
	@MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=131072 .venv/bin/python scripts/services run redis postgres mysql -- sh -c 'code=0; \
	soak() { .venv/bin/python -m bide_proofs.soak "$$@" --results docs/reliability/soak.jsonl $(ARGS) || code=1; }; \
	soak sqlite: --minutes 15; soak "$$TEST_POSTGRES_URL" --minutes 15; soak "$$TEST_MYSQL_URL" --minutes 15; \
	soak sqlite: --minutes 15 --service; soak "$$TEST_REDIS_URL" --minutes 60; exit $$code'
	@.venv/bin/python scripts/generate.py

fuzz: ## feed everything that reads what nobody meant, other cases each time: make fuzz FUZZ=50 ARGS="-k urls"
	@$(SETUP) test
	@$(INSTALL)
	@FUZZ=$${FUZZ:-10} $(PYTEST) --dist load tests/fuzz $(ARGS)

import-time: ## how long `import bide` takes, in fresh processes
	@$(SETUP) run
	@.venv/bin/python scripts/import_time.py

generate: ## write the parts of docs/ that come from the code
	@$(SETUP) test
	@.venv/bin/python scripts/generate.py

clean: ## remove everything that the other targets made
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
