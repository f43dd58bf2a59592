"""For all tests: an example that takes long on a busy machine is no defect."""

import os

# Tensors of tests are small: more threads only wait for each other. torch reads it at import.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("stepmark", deadline=None)
settings.load_profile("stepmark")
