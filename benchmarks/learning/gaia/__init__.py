"""Gaia: islands that send what is significant, when it is. Each module says what it is; ARCHITECTURE.md, decision 131,
says why it stays a benchmark."""
