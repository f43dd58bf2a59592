"""How long kernels take on a device that nobody measured here: published and own measurements.

- kernel_times.py: the time of any operator on a device, and what it rests on.
- products.py: matrix products by a law, and the measured ratio near their shape.

Their data are derived from measurements of operators alone (validation, kernel_times).
"""
