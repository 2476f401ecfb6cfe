"""Carries out what the brain decides, for each job from its submission to its end."""
