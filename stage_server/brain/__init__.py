"""The deciding half of a stage server: which work is ready, which outputs are held, which state a joiner lacks."""
