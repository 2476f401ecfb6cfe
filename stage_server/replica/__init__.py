"""Carries it out: computes microbatches, averages gradients, applies commits."""
