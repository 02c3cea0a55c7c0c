"""What users call: programs as PyTorch functions, the built-in blocks, operations and models."""
