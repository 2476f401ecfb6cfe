"""The relay: carries bytes between stage servers of which one can only dial out."""
