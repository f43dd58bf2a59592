"""For all tests: an example that takes long on a busy machine is no defect."""

from hypothesis import settings

settings.register_profile("stepmark", deadline=None)
settings.load_profile("stepmark")
