# make run [ONLY=02] [DATA=photos] [COMMENTS=folder] [PROFILE=small] | test | lab | soak | bench | gpu-check
#      notebooks [FORCE=1] [ONLY=02] | report | kaggle | clean
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/ready
BUSY := $(VENV)/unfinished

# Threads that wait at a barrier spin for a moment and then sleep: two that go on spinning collapse
# (some twenty times slower) as soon as another program wants one of the cores, and two that sleep
# at once are slower where nothing does. (GNU's OpenMP reads the second, others the first.)
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT ?= 2000

.PHONY: run test lab soak bench gpu-check notebooks report kaggle clean

run: $(READY)
	@$(PY) -m helpers run \
		$(if $(ONLY),--only $(ONLY)) $(if $(DATA),--data '$(DATA)') \
		$(if $(COMMENTS),--comments '$(COMMENTS)') $(if $(PROFILE),--profile $(PROFILE))

# Two at a time: every test computes on one thread, and waits for kernels and processes.
test: $(READY)
	@$(PY) -m pytest -q -n 2 --dist worksteal

lab: $(READY)
	@$(PY) -m jupyterlab --KernelManager.transport_encryption=auto notebooks

# Kills, made-up recipes by the hundred, and twenty minutes of training: half an hour in all.
soak: $(READY)
	@SOAK=1 $(PY) -m pytest -q -s tests/test_properties.py tests/soak/soak_*.py

bench: $(READY)
	@$(PY) -m pip install -qq --disable-pip-version-check -r tests/benchmarks/requirements.txt
	@$(PY) -m pytest -q -s tests/benchmarks/bench_*.py

# PY=python takes another interpreter, with versions of torch and transformers of its own.
gpu-check: $(if $(filter $(VENV)/bin/python,$(PY)),$(READY))
	@PYTHONPATH=. $(PY) tests/benchmarks/gpu_check.py

# Outputs of one clean run for the notebooks in git: those whose code or helpers have changed.
notebooks: $(READY)
	@$(PY) -m helpers notebooks $(if $(ONLY),--only $(ONLY)) $(if $(FORCE),--force)

report: $(READY)
	@$(PY) -m helpers report

kaggle: $(READY)
	@$(PY) -m helpers kaggle

clean:
	rm -rf runs build .pytest_cache .ruff_cache .hypothesis *.egg-info

# READY is written last. Whatever stops the set-up before that leaves BUSY behind, and the next
# call starts again: pip takes a package that it was interrupted in for an installed one.
$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and \
		"Python 3.10 or newer is needed, this is %d.%d: make PYTHON=path" % v[:2])'
	@if [ -e $(BUSY) ]; then \
		echo "The last set-up did not finish: making $(VENV) again."; rm -rf $(VENV); fi
	@echo "Setting up $(VENV) from requirements.txt: some minutes, several GiB of disk."
	@mkdir -p $(VENV) && rm -f $(READY) && touch $(BUSY)
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -qq --disable-pip-version-check -r requirements.txt
	@mv $(BUSY) $(READY) && touch $(READY)
