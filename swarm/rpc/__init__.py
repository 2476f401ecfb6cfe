"""The wire: framed tensors between peers, sessions with the scheduler."""
