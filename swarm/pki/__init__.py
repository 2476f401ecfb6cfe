"""Identities: names, certificates, join tokens. No other package touches `cryptography`."""
