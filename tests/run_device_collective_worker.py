"""A rank that opens the allreduce of sys.argv[1] on arrays of CuPy, and beside it on arrays of numpy.

"numpy": those of rank 2 are of numpy too. See test_run_device_codecs.py.
"""

import json
import sys

import numpy as np

from taccl import ErrorFeedback, Job, open_collective
from taccl.runtime import gpu

ELEMENTS = 2400

with Job(20.0) as job:
    file, what = sys.argv[1:]
    gpu.select(job.board.node_slot)
    cuda = gpu.Cuda(gpu.load())
    gradient, there = np.zeros(ELEMENTS, np.float32), cuda.xp.zeros(ELEMENTS, np.float32)
    owed, owes = ErrorFeedback(ELEMENTS), ErrorFeedback(ELEMENTS, cuda.xp)
    how = {"op": "avg", "codec": "q8", "links": "all"}
    if what == "numpy" and job.rank == 2:
        there = gradient
    wrong = 0
    with (
        open_collective(job, file, gradient, gradient, feedback=owed, **how) as average,
        open_collective(job, file, there, there, feedback=owes, **how) as average_there,
    ):
        for step in range(3):
            gradient[:] = np.random.default_rng(10 * step + job.rank).standard_normal(ELEMENTS)
            cuda.upload(there, gradient)
            average()
            average_there()
            found = np.empty_like(gradient)
            cuda.download(found, there)
            wrong += int((found != gradient).sum()) + (average.coded_bytes != average_there.coded_bytes)
            cuda.download(found, owes.residual)
            wrong += int((found != owed.residual).sum()) + (not owed.residual.any())
    total = job.reduce(np.array([wrong]), "sum")
    if job.rank == 0:
        print(json.dumps({"wrong": int(total[0])}))
