"""How long kernels take on a device that nobody measured here: published and own measurements.

- products.py: matrix products by a law, and the measured ratio near their shape.
- kernel_times.py: the time of any operator on a device, and what it rests on.

Data are data/kernel_times.toml and data/product_times.csv, which validation/kernel_times.py
derives from measurements of operators alone.
"""
