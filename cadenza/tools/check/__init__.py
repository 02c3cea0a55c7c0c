"""`cadenza check`: judges programs of an author's file, from tracing to compiled kernels."""
