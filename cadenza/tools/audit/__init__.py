"""`cadenza audit`: what a model's training step spends its time on, before and after Cadenza."""
