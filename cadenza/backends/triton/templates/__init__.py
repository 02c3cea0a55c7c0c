"""The fixed text of kernels: device functions that emitted modules call."""
