"""A job with islands: a brain for each, outer steps between them."""
