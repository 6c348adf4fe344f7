# Needs make and Python 3.11 or newer; everything else goes into .venv on the first run.
# PYTHON=/path/to/python uses an environment that already has everything, and creates none.

ifdef PYTHON
run_ready :=
dev_ready :=
else
PYTHON := .venv/bin/python
run_ready := .venv/.run
dev_ready := .venv/.dev
endif

ARGS :=
# Python compiles what it imports, once, also where the environment forbids it; pip would compile
# every file of every library, for a minute.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := -m pip install --quiet --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable

.DEFAULT_GOAL := help
.PHONY: help validate test long mutants slips torture spikes boxes zoo finetune preflight locate evals evidence-cuda check static lint types rules skills manifests clients clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 15

validate: $(run_ready)  ## run every gate on a model of the package; ARGS='--model transformer'
	@$(PYTHON) scripts/validate_checkpointing.py $(ARGS)

test: $(dev_ready)  ## run the tests, of the bundle and of the template; ARGS='-k grad_accum'
	@OMP_NUM_THREADS=1 $(PYTHON) -m pytest $(ARGS)

long: .venv/finetune/.installed  ## run the variants that `make test` leaves out, and only those
	@OMP_NUM_THREADS=1 $(PYTHON) -m pytest -m long $(ARGS)
	@OMP_NUM_THREADS=1 .venv/finetune/bin/python -m pytest -m long -n0 -k "sft_trainer or lightning_cli or trl" tests/trainer/test_equip.py tests/workloads/test_from_script.py tests/gates/test_loop_trl.py

mutants: $(dev_ready)  ## count small changes of a technique that its gates and tests catch; ARGS='sac'
	@PYTHONPATH=. OMP_NUM_THREADS=1 $(PYTHON) benchmarks/mutants.py $(ARGS)

slips: $(dev_ready)  ## apply what somebody may do by mistake, one by one, and name the test that notices; ARGS='--only 3 17'
	@for list in first second; do PYTHONPATH=. $(PYTHON) benchmarks/slips.py tests/slips/$$list.yaml $(ARGS) || exit 1; done

ifdef PEER
torture: .venv/torture/.installed
	@PYTHONPATH=template:benchmarks OMP_NUM_THREADS=1 nice .venv/torture/bin/python -m torture_peers --peer $(PEER) $(ARGS)
else
torture: $(dev_ready)  ## kill and stop trainings, and record what they lose; PEER=ours or PEER=dcp for flips, full disks and hostile files; ARGS='--kills 20 --every 30' or '--json evidence/checkpoint_torture.json'
	@PYTHONPATH=template:benchmarks:. OMP_NUM_THREADS=1 nice $(PYTHON) -m torture $(ARGS)
endif

spikes: $(dev_ready)  ## record hundreds of small trainings under the loss watchdog; ARGS='--json evidence/loss_spike.json'
	@PYTHONPATH=template:benchmarks:. OMP_NUM_THREADS=1 $(PYTHON) -m spike_runs $(ARGS)

boxes: $(dev_ready)  ## replay bad steps with planted faults, and steps that do not repeat; ARGS='--each 5' or '--json evidence/boxes.json'
	@PYTHONPATH=template:benchmarks OMP_NUM_THREADS=1 $(PYTHON) benchmarks/boxes.py $(ARGS)

zoo: .venv/zoo/.installed  ## models of 40 libraries through all gates and a plan; ARGS='--only bert' or '--json evidence/zoo.json'
	@PYTHONPATH=template OMP_NUM_THREADS=1 .venv/zoo/bin/python benchmarks/zoo.py $(ARGS)

finetune: .venv/finetune/.installed  ## predict and measure steps of other libraries' optimizers and adapters; ARGS='--only lora' or '--json evidence/finetune.json'
	@PYTHONPATH=template OMP_NUM_THREADS=1 .venv/finetune/bin/python benchmarks/finetune.py $(ARGS)

preflight: $(dev_ready)  ## score and cost of the check of loops, on faulty and healthy ones; ARGS='--only loops.undivided' or '--json evidence/preflight.json'
	@PYTHONPATH=template:. OMP_NUM_THREADS=1 $(PYTHON) benchmarks/preflight.py $(ARGS)

locate: $(dev_ready)  ## planted differences, equal runs and rounding under `runs locate`; ARGS='--part costs' or '--jobs 2 --json evidence/locate.json'
	@PYTHONPATH=template:benchmarks OMP_NUM_THREADS=1 $(PYTHON) benchmarks/locate.py $(ARGS)

evals: $(dev_ready)  ## run an agent on the cases of the skills, with and without them; ARGS='--agent "COMMAND {prompt}"' or '--dry-run'
	@PYTHONPATH=template:benchmarks:. OMP_NUM_THREADS=1 $(PYTHON) benchmarks/evals.py $(ARGS)

evidence-cuda: $(run_ready)  ## record the figures of a CUDA device, going on where it stopped; ARGS='--dry-run --folder DIR'
	@PYTHONPATH=template $(PYTHON) benchmarks/evidence_cuda.py $(ARGS)

.venv/%/.installed: benchmarks/%_requirements.txt $(dev_ready)
	@echo "installing the libraries of 'make $*' into .venv/$*"
	@$(PYTHON) benchmarks/side_environment.py $*
	@touch $@

check: static test  ## all that CI runs

static: lint types skills  ## all that CI runs except the tests

lint: $(dev_ready)  ## ruff: rules and format
	@$(PYTHON) -m ruff check --quiet
	@$(PYTHON) -m ruff format --check --quiet || { echo "not formatted: $(PYTHON) -m ruff format" >&2; exit 1; }

types: $(dev_ready)  ## mypy --strict over the package and the scripts
	@nice $(PYTHON) -m mypy --no-error-summary

rules: $(dev_ready)  ## the house rules alone: layers and cycles of imports, and what tests/house/rules.py holds
	@$(PYTHON) -m pytest -q -n0 tests/house/test_house.py

skills: $(dev_ready)  ## the open validator over each skill, and skillsaw over the bundle
	@for skill in skills/*/; do $(PYTHON) -m skills_ref.cli validate "$$skill" || exit 1; done
	@$(PYTHON) -m skillsaw lint --strict --quiet --no-progress

manifests: $(run_ready)  ## write the clients' manifests, the version and the scripts' requirements from pyproject.toml
	@$(PYTHON) scripts/manifests.py

clients: $(dev_ready)  ## install the bundle into five agent clients, list the skills they load; needs npm and 1.4 GB
	@PYTHONPATH=template:. $(PYTHON) benchmarks/clients.py $(ARGS)

clean:  ## remove .venv and the caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

.venv/bin/python:
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "curry-train needs Python 3.11 or newer and python3 is $$(python3 --version 2>&1):" \
	    "put a newer one first on PATH, or name one that has everything with make PYTHON=/path/to/python" >&2; exit 1; }
	@python3 -m venv .venv

.venv/.run: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing what the scripts need into .venv"
	@$(PYTHON) $(PIP_INSTALL) '.[plots]'
	@touch $@

.venv/.dev: .venv/.run
	@echo "installing what the tests need into .venv"
	@$(PYTHON) $(PIP_INSTALL) '.[dev]'
	@# Compile once what each worker of the tests would compile for itself.
	@PYTEST_ADDOPTS= $(PYTHON) -m pytest --collect-only --numprocesses=0 >/dev/null || true
	@touch $@
