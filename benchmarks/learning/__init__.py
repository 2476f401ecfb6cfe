"""What is learnt: losses of real training, with and without what makes it faster."""
