"""Gaia: islands that send what is significant, when it is. Each module says what it is;
docs/decisions/045 says why it stays a benchmark."""
