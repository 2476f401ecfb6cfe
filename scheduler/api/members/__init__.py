"""Admits members and checks their rights: tokens, certificates, passes, relays."""
