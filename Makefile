# From a fresh checkout, as root on Debian 12 with Python 3.11 and cargo: `make demo`, `make test`, `make bench`.
# Every target does its own set-up and skips what is done.

PY := .venv/bin/python
DEMO_ARGS ?=
BENCH_ARGS ?=
TEST_ARGS ?=
FUZZ_SECONDS ?= 60
SEED ?= 1
POINTS ?= 240

.PHONY: setup base demo test test-unit chaos chaos-rollouts lint format bench fuzz openapi lock clean

setup:
	@scripts/setup.sh packages venv runtime

base: setup
	@scripts/setup.sh base

demo: base
	.venv/bin/dsec demo $(DEMO_ARGS)

test: base
	cargo test -q --release --locked
	$(PY) -m pytest $(TEST_ARGS)

test-unit: setup
	cargo test -q --release --locked
	$(PY) -m pytest --ignore=tests/e2e $(TEST_ARGS)

lint: setup
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	cargo fmt --check
	cargo clippy -q --release --locked --all-targets -- -D warnings

format: setup
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .
	cargo fmt

# Kill -9 of every process at every durable step; the last line is a JSON summary.
chaos: base
	$(PY) -m tests.chaos --seed $(SEED) --points $(POINTS)

# The same of trainer, apiserver, edge and launcher while rollouts are recorded, replayed and graded.
chaos-rollouts: base
	$(PY) -m tests.chaos.rollouts --seed $(SEED) --points $(POINTS)

bench: base
	.venv/bin/dsec bench density create exec files stream forward pause log grade adopt neighbour replay $(BENCH_ARGS); status=$$?; \
	.venv/bin/dsec bench exec --sandboxes 64 $(BENCH_ARGS) && exit $$status

fuzz: setup
	@fuzz/run.sh $(FUZZ_SECONDS)

openapi: setup
	$(PY) -m dsec.apiserver.openapi > docs/openapi.json

# No index is written into the lock: it works with whatever index the machine is set up for.
lock: setup
	$(PY) -m uv --version >/dev/null 2>&1 || $(PY) -m pip install -q uv
	$(PY) -m uv pip compile -q pyproject.toml --group dev --generate-hashes --no-annotate --no-header \
		--no-emit-index-url --no-emit-find-links --python-version 3.11 -o requirements.lock
	cargo generate-lockfile

clean:
	rm -rf build target .venv .pytest_cache .mypy_cache .ruff_cache
