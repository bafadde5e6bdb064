# The developer's tasks; `make help` lists them. Each target first installs its tools into .venv.
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-demo

BENCHMARKS := startup launch first_line fanout staging first_upload failure functions samples train

# Of `make lint`; each prints its output as a whole.
LINTS := lint-ruff lint-format lint-types lint-imports lint-runtime lint-prose
LINT_FLAGS := --no-print-directory --jobs --keep-going $(if $(filter output-sync,$(.FEATURES)),--output-sync)

.PHONY: demo check test coverage lint $(LINTS) format bench soak docs screens page-screens clean help

help:
	@echo "make demo    install distflow and train a small model on this machine"
	@echo "make check   the fast checks after each edit: lint, unit and contract tests (tests/README.md)"
	@echo "make test    the whole test suite"
	@echo "make coverage  the branches that the unit tests reach; fails below the floor in pyproject.toml"
	@echo "make lint    ruff, mypy, import contracts, Python 3.8 check of the code for nodes, prose and spelling"
	@echo "make bench   measure speed against a bare Python, ssh loops, torchrun, pdsh, scp and rsync (over half an hour)"
	@echo "make soak    run gangs with random faults on 8 SSH hosts of this machine for half an hour (ARGS='--minutes 5')"
	@echo "make format  fix style and format the code"
	@echo "make docs    regenerate the generated parts of docs/, and build the website in site/"
	@echo "make screens type the commands of README and the tutorials in tmux, and draw the pictures in docs/screens/"
	@echo "make page-screens  draw the pages of \`distflow ui\` in docs/screens/ui-*.png"
	@echo "make clean   remove .venv and caches"

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	PYTHON="$(PYTHON)" sh scripts/setup.sh $(VENV) train,data,dev
	@touch $@

$(DEMO_STAMP): pyproject.toml constraints.txt scripts/setup.sh
	PYTHON="$(PYTHON)" sh scripts/setup.sh $(VENV) train
	@touch $@

# Pytest stores the compiled tests, which its workers share.
unexport PYTHONDONTWRITEBYTECODE

# The demo needs torch, but not the tools of the tests, which take more space than torch.
demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
	$(BIN)/distflow workflow submit workflow_specs/pytorch_dist.yaml --wait

# mypy uses one core, so lint runs while the tests run. Its output comes last.
check: $(STAMP)
	@$(MAKE) --no-print-directory lint >.lint.log 2>&1 & lint=$$!; \
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not ssh and not torch and not slow" tests/unit tests/contract $(ARGS); tests=$$?; \
	wait $$lint; lint=$$?; cat .lint.log; rm .lint.log; [ $$tests -eq 0 ] && [ $$lint -eq 0 ]

test: $(STAMP)
	@sh scripts/install_sshd.sh
	@sh scripts/install_engines.sh
	@sh scripts/install_lookup.sh
	@sh scripts/install_yaml_server.sh $(VENV)
	@sh scripts/install_shells.sh
	@sh scripts/install_browser.sh $(VENV)
	@. scripts/apt.sh; command -v rsync >/dev/null 2>&1 || apt_install rsync || echo "rsync is missing: run sudo apt-get install rsync" >&2
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

# Separate from `make test`, because measuring costs time. Processes on nodes are not measured.
coverage: $(STAMP)
	$(BIN)/coverage run -m pytest -n 0 -m "not ssh and not torch" tests/unit $(ARGS)
	$(BIN)/coverage report

lint: $(STAMP)
	@$(MAKE) $(LINT_FLAGS) $(LINTS)

lint-ruff:
	$(BIN)/ruff check .
lint-format:
	$(BIN)/ruff format --check .
lint-types:
	$(BIN)/mypy
lint-imports:
	$(BIN)/lint-imports
lint-runtime:
	$(BIN)/vermin --quiet --no-tips --target=3.8- --violations src/distflow/protocol src/distflow/runtime
lint-prose:
	$(BIN)/python scripts/check_prose.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	@sh scripts/install_sshd.sh
	@. scripts/apt.sh; apt_install pdsh rsync || echo "pdsh or rsync is missing: run sudo apt-get install pdsh rsync" >&2
	@failed=; for name in $(BENCHMARKS); do \
		echo "$(BIN)/python benchmarks/$$name.py"; \
		$(BIN)/python benchmarks/$$name.py || failed="$$failed $$name"; \
	done; \
	[ -z "$$failed" ] || { echo "these benchmarks failed or missed a limit:$$failed" >&2; exit 1; }

soak: $(STAMP)
	@sh scripts/install_sshd.sh
	PYTHONPATH=tests $(BIN)/python scripts/soak.py $(ARGS)

docs: $(STAMP)
	$(BIN)/python scripts/generate_docs.py
	[ -x $(BIN)/mkdocs ] || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

screens: $(STAMP)
	@sh scripts/install_sshd.sh
	@. scripts/apt.sh; command -v tmux >/dev/null 2>&1 || apt_install tmux || echo "tmux is missing: run sudo apt-get install tmux" >&2
	PYTHONPATH=tests $(BIN)/python scripts/screens.py $(ARGS)

page-screens: $(STAMP)
	@sh scripts/install_sshd.sh
	@sh scripts/install_browser.sh $(VENV)
	PYTHONPATH=tests:. $(BIN)/python scripts/page_screens.py $(ARGS)

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
