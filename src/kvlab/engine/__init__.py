"""Scheduling policies, executor, sampler and the loop that drives them."""
