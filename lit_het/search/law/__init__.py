"""The law by which the shape of a model grows with compute (Alabdulmohsin et al. 2023, SoViT): functions of arrays."""

# Of a budget of compute: operations, or hours of a device.
UNITS = ("GFLOP", "core-hours", "GPU-hours", "TPU-hours")
