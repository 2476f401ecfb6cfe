"""Carries out the decisions: computes microbatches, averages gradients, applies commits."""
