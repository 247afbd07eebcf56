"""Set before torch is imported anywhere: one thread keeps the suite steady on a busy machine."""

import os

# Two OpenMP threads collapse when anything else uses the cores; kernels inherit this.
os.environ["OMP_NUM_THREADS"] = "1"
# A profile set in the shell must not change what the tests see.
os.environ.pop("TUTORIAL_PROFILE", None)
