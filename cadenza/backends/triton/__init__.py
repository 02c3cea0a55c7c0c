"""The Triton back end: plans as kernels for any GPU that Triton drives."""
