"""A GPU that no test has, and a cell that is measured on it."""

from scripts.gpu_day.plan import Cell

MACHINE = {
    "device": "NVIDIA H200",
    "n_devices": 1,
    "backend": "gpu",
    "platform": "cuda 13010",
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "kernels": ["pallas_gpu"],
    "tiled": ["pallas_gpu"],
    "others": ["chunked"],
    "commit": "abc1234",
    "sources": "0f0f",
    "smoke": False,
    "free_disk_bytes": 1 << 40,
}
GRID = Cell(part="decode", what="attention", shape="llama-3.1-8b", batch=32, context=4096)
