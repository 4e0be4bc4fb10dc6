.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# As the tests build it, so that nothing is built twice.
BUILD := cargo test --locked --quiet --workspace --all-features --no-run
# Most tests wait more than they work.
TEST_THREADS := $(or $(RUST_TEST_THREADS),$(shell expr 2 '*' "$$(nproc)"))
WITH_DATABASES := cargo run --locked -q -p proving --bin with-databases --
DENY := $(or $(shell command -v cargo-deny),target/tools/bin/cargo-deny)
CARGO_MUTANTS := $(or $(shell command -v cargo-mutants),target/tools/bin/cargo-mutants)

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## See the outbox at work, on an embedded database
	cargo run --locked --release -- demo

.PHONY: test
test: ## Run all tests on SQLite, PostgreSQL and MariaDB; brings its own servers
	RUST_TEST_THREADS=$(TEST_THREADS) $(WITH_DATABASES) cargo test --locked --workspace --all-features --no-fail-fast

.PHONY: api
api: ## Let Schemathesis (from PyPI) try the API against its own description
	$(BUILD)
	scripts/check-api.sh

.PHONY: receivers
receivers: ## Let receivers in Python and Node verify our webhooks with the official packages
	$(BUILD)
	scripts/check-receivers.sh

.PHONY: mcp
mcp: ## Let the official MCP client and the inspector use our tools over both transports
	$(BUILD)
	scripts/check-mcp.sh

.PHONY: verify-unified
verify-unified: ## Check what an outage of OpenMemory costs; VERIFY_FULL=1 makes one
	$(BUILD)
	@mkdir -p target/verify
	$(if $(POSTGRES_DSN)$(POSTRIDER_DATABASE),,POSTRIDER_DATABASE=sqlite://target/verify/postrider.db) \
		target/debug/postrider verify $(if $(filter 1,$(VERIFY_FULL)),--full)

.PHONY: lint
lint: $(DENY) ## Check format, clippy, the dependencies' licences and sources, and the alert rules
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets --all-features -- -D warnings
	cargo clippy --locked -p postrider --no-default-features -- -D warnings
	$(DENY) --locked check licenses bans sources
	scripts/check-rules.sh

.PHONY: bench
bench: ## Measure all three databases; figures go to target/bench/; MESSAGES=50 only tries whether they run
	cargo build --locked --release
	$(WITH_DATABASES) scripts/bench.sh $(if $(MESSAGES),--messages $(MESSAGES))

.PHONY: bench-against
bench-against: ## Measure this against another revision, in turns: REV=main BENCH=drain PAIRS=10 DATABASE=all MESSAGES=…
	@REV='$(REV)' BENCH='$(BENCH)' PAIRS='$(PAIRS)' DATABASE='$(DATABASE)' MESSAGES='$(MESSAGES)' scripts/bench-against.sh

.PHONY: simulate
simulate: ## Run the simulator over SEEDS=1000 seeds from FIRST=0 on, or EVERY so many of them, for at most LIMIT_SEC; STORY=seed tells what happens in one
	cargo build --locked --release -p simulator
	target/release/simulate $(if $(STORY),--story $(STORY),--first $(or $(FIRST),0) --seeds $(or $(SEEDS),1000) $(if $(EVERY),--every $(EVERY)) $(if $(LIMIT_SEC),--seconds $(LIMIT_SEC)))

.PHONY: models
models: ## Look through every order of claims, settles, losses and crashes, one tick further than the tests do
	POSTRIDER_MODELS=1 cargo test --locked -p models -- --nocapture

.PHONY: mutants
mutants: ## Plant every seeded bug in a copy of the tree and see its test find it; MUTANTS="name…" only those
	$(WITH_DATABASES) cargo run --locked -q -p proving --bin mutants -- $(MUTANTS)

.PHONY: mutants-some
mutants-some: ## Three of the seeded bugs, chosen by the commit
	$(WITH_DATABASES) cargo run --locked -q -p proving --bin mutants -- --pick 3 $(shell git rev-parse HEAD)

.PHONY: cargo-mutants
cargo-mutants: $(CARGO_MUTANTS) ## Change the pure functions in every way cargo-mutants knows; FILES="crates/outbox/src/lease.rs …" only those
	CARGO_TARGET_DIR=$(CURDIR)/target/mutants/target $(CARGO_MUTANTS) mutants --workspace --output target \
		$(if $(FILES),--no-config --all-features --cargo-arg=--locked --cargo-arg=--lib --exclude-re 'impl (std::fmt::)?(Debug|Display) for' $(foreach file,$(FILES),--file $(file)))

.PHONY: sweep
sweep: ## Do every wrong to every message between us and a database, and see whether answers stay honest; ONLY=word for some
	POSTRIDER_SWEEP=all POSTRIDER_SWEEP_ONLY='$(ONLY)' $(WITH_DATABASES) \
		cargo test --locked -p proving -p postrider-webhooks -p postrider-orders -p postrider-memories --test it -- --ignored sweep:: --nocapture

.PHONY: sweep-some
sweep-some: ## One fault of 23 of the sweep, on a machine with nothing else to do
	$(WITH_DATABASES) cargo test --locked --workspace --all-features --test it -- --ignored sweep:: --test-threads=1

.PHONY: databases
databases: ## Run the suites on the servers people have, and write the table of README; NAMES="mysql-9.7 pgbouncer" only those
	scripts/databases.sh $(NAMES)

.PHONY: packaging
packaging: ## Check Dockerfile, compose file and systemd unit, and take their steps in an empty folder
	$(WITH_DATABASES) --postgres-only scripts/check-packaging.sh

.PHONY: dashboard-load
dashboard-load: ## See the dashboard on a million live messages and 200 changes a second
	cargo build --locked --release
	$(WITH_DATABASES) cargo test --locked -p postrider-server --test it -- --ignored dashboard_under_load --nocapture

.PHONY: http-load
http-load: ## See what 10,000 idle connections, clients that never read and nonsense cost the others; CONNECTIONS=1000 only tries whether it runs
	cargo build --locked --release
	cargo run --locked -q -p proving --bin http-load -- target/release/postrider $(if $(CONNECTIONS),--connections $(CONNECTIONS) --only-try)

.PHONY: kill-loop
kill-loop: ## Kill workers KILLS=1000 times on each database, and judge what they leave by the receiver's book
	$(BUILD)
	POSTRIDER_KILLS=$(or $(KILLS),1000) $(WITH_DATABASES) \
		cargo test --locked -p postrider-server --all-features --test it kill_loop:: -- --nocapture --test-threads=1

.PHONY: crash-points
crash-points: ## Let a server die before and after every commit there is, on each database
	$(BUILD)
	POSTRIDER_CRASH_POINTS=all $(WITH_DATABASES) \
		cargo test --locked -p postrider-server --all-features --test it dies_at_every_commit -- --nocapture --test-threads=1

.PHONY: disks
disks: ## Let the power fail after each thing a disk was told, and lose every part of it that may be lost
	$(BUILD)
	POSTRIDER_DISKS=all $(WITH_DATABASES) \
		cargo test --locked -p postrider-server --all-features --test it disks:: -- --nocapture --test-threads=1

.PHONY: soak
soak: ## Everything at once on each database, MINUTES=10 each: kills, pauses, locks, clocks that jump, networks, databases and an OpenMemory that fail; reports go to target/soak/
	$(BUILD)
	@mkdir -p target/soak
	POSTRIDER_SOAK_MINUTES=$(or $(MINUTES),10) POSTRIDER_SOAK_REPORT=$(CURDIR)/target/soak $(WITH_DATABASES) \
		cargo test --locked --workspace --all-features --test it soak:: -- --nocapture --test-threads=1

.PHONY: upgrade
upgrade: ## Let processes of another version go on while this one migrates: REV=2ac8c0f DATABASE=all
	@REV='$(REV)' DATABASE='$(DATABASE)' THIS='$(THIS)' scripts/upgrade.sh

.PHONY: scm-million
scm-million: ## Read a Git history of a million commits, and see that memory does not grow with it
	cargo build --locked --release
	cargo test --locked -p postrider-server --test it -- --ignored bounded_memory --nocapture

.PHONY: ci
ci: lint test mutants-some api receivers mcp ## Everything CI runs
	# What is wrong is wrong twice; a busy machine may be too slow for its deadlines once.
	$(MAKE) sweep-some || $(MAKE) sweep-some
	$(MAKE) databases NAMES="--kernel mysql-9.7 postgres-18"
	VERIFY_FULL=1 $(MAKE) verify-unified
	$(MAKE) demo
	$(MAKE) packaging
	MESSAGES=50 $(MAKE) bench
	SEEDS=160 $(MAKE) simulate
	CONNECTIONS=1000 $(MAKE) http-load

# Once per clone, and unoptimised: building the tool takes far longer than its work.
target/tools/bin/cargo-deny:
	CARGO_PROFILE_DEV_DEBUG=0 cargo install cargo-deny --version 0.20.2 --locked --quiet --debug --root target/tools

target/tools/bin/cargo-mutants:
	CARGO_PROFILE_DEV_DEBUG=0 cargo install cargo-mutants --version 27.1.0 --locked --quiet --debug --root target/tools
