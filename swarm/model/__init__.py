"""Everything that needs torch: models, optimizers, exact sums, codecs."""
